"""What people look at: tables, and a run as it goes on."""

from neural_mp.reporting.live import LiveListener
from neural_mp.reporting.tables import (
    benchmark_table,
    capability_table,
    hardware_table,
    paint_table,
    plan_table,
    result_tables,
    trial_table,
)

__all__ = [
    "LiveListener",
    "benchmark_table",
    "capability_table",
    "hardware_table",
    "paint_table",
    "plan_table",
    "result_tables",
    "trial_table",
]
