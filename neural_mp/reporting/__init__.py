"""Output for users: tables, and the progress of a run."""

from neural_mp.reporting.capabilities import CapabilitySummary, capability_table, summary_table
from neural_mp.reporting.console import error_console, output_console
from neural_mp.reporting.live import LiveListener, NotebookListener, is_notebook
from neural_mp.reporting.tables import (
    audit_table,
    audit_words,
    benchmark_table,
    explanation_table,
    hardware_table,
    plan_table,
    result_tables,
    sensitivity_table,
    target_audit_tables,
    trial_table,
)

__all__ = [
    "CapabilitySummary",
    "LiveListener",
    "NotebookListener",
    "audit_table",
    "audit_words",
    "benchmark_table",
    "capability_table",
    "error_console",
    "explanation_table",
    "hardware_table",
    "is_notebook",
    "output_console",
    "plan_table",
    "result_tables",
    "sensitivity_table",
    "summary_table",
    "target_audit_tables",
    "trial_table",
]
