"""What people look at: tables, and a run as it goes on."""

from neural_mp.reporting.audit import audit_table, audit_words
from neural_mp.reporting.capabilities import CapabilitySummary, capability_table, summary_table
from neural_mp.reporting.console import error_console, output_console
from neural_mp.reporting.live import LiveListener
from neural_mp.reporting.tables import (
    benchmark_table,
    hardware_table,
    paint_table,
    plan_table,
    result_tables,
    trial_table,
)

__all__ = [
    "CapabilitySummary",
    "LiveListener",
    "audit_table",
    "audit_words",
    "benchmark_table",
    "capability_table",
    "error_console",
    "hardware_table",
    "output_console",
    "paint_table",
    "plan_table",
    "result_tables",
    "summary_table",
    "trial_table",
]
