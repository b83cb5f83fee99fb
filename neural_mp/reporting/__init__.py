"""Output for users: tables, and the progress of a run."""

from neural_mp.reporting.capabilities import (
    CapabilitySummary,
    build_capability_table,
    build_summary_table,
)
from neural_mp.reporting.console import (
    LiveListener,
    NotebookListener,
    create_error_console,
    create_output_console,
    is_notebook,
)
from neural_mp.reporting.tables import (
    build_audit_table,
    build_benchmark_table,
    build_explanation_table,
    build_hardware_table,
    build_sensitivity_table,
    build_trial_table,
    plan_table,
    result_tables,
    summarize_audit_lines,
    target_audit_tables,
)

__all__ = [
    "CapabilitySummary",
    "LiveListener",
    "NotebookListener",
    "build_audit_table",
    "build_benchmark_table",
    "build_capability_table",
    "build_explanation_table",
    "build_hardware_table",
    "build_sensitivity_table",
    "build_summary_table",
    "build_trial_table",
    "create_error_console",
    "create_output_console",
    "is_notebook",
    "plan_table",
    "result_tables",
    "summarize_audit_lines",
    "target_audit_tables",
]
