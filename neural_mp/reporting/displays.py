"""Notebook displays of plans, hardware, reports and comparisons; see `neural_mp.util.text`."""

from __future__ import annotations

import io
from functools import singledispatch
from pathlib import Path

from rich.console import Console, Group, RenderableType

from neural_mp.core.hardware import Hardware
from neural_mp.core.plan import PrecisionPlan
from neural_mp.core.precision import CPU_PRECISIONS
from neural_mp.core.trial import Trials
from neural_mp.errors import NeuralMPError
from neural_mp.profiling.audit import Audit
from neural_mp.reporting.comparison import build_comparison_tables
from neural_mp.reporting.page import page_of, report_cell, write_page
from neural_mp.reporting.tables import (
    build_audit_table,
    build_sensitivity_table,
    build_trial_table,
    report_tables,
    summarize_audit_lines,
)
from neural_mp.runs.report import Report
from neural_mp.tuning.measurement.comparison import Comparison
from neural_mp.tuning.measurement.sensitivity import SensitivityReport
from neural_mp.util.html import create_notebook_table
from neural_mp.util.text import format_count

render_table = build_comparison_tables
#: Width of tables in notebooks, which scroll.
_CHARACTERS = 160


@singledispatch
def render_cell(value: object) -> str:
    """Return notebook HTML for an object of a registered class."""
    raise TypeError(f"no notebook display is registered for {type(value).__name__}")


render_cell.register(Report, report_cell)


@singledispatch
def render_text(value: object) -> str:
    """Return plain text for an object of a registered class."""
    raise TypeError(f"no text is registered for {type(value).__name__}")


def _render_text(renderable: RenderableType) -> str:
    console = Console(file=io.StringIO(), width=_CHARACTERS, force_jupyter=False)
    with console.capture() as captured:
        console.print(renderable)
    return "\n".join(line.rstrip() for line in captured.get().splitlines())


def _render_html(renderable: RenderableType) -> str:
    console = Console(record=True, file=io.StringIO(), width=_CHARACTERS, force_jupyter=False)
    console.print(renderable)
    return console.export_html(inline_styles=True, code_format="<pre>{code}</pre>")


render_cell.register(
    SensitivityReport, lambda report: _render_html(build_sensitivity_table(report))
)
render_text.register(
    SensitivityReport, lambda report: _render_text(build_sensitivity_table(report))
)
render_cell.register(
    Comparison, lambda comparison: _render_html(build_comparison_tables(comparison))
)
render_cell.register(
    Trials,
    lambda trials: _render_html(build_trial_table([(trial, trial.speedup) for trial in trials])),
)
render_cell.register(
    Audit,
    lambda audit: _render_html(Group(build_audit_table(audit.ops), summarize_audit_lines(audit))),
)


@render_text.register
def _render_audit_text(audit: Audit) -> str:
    findings = (build_audit_table(audit.findings),) if audit.findings else ()
    return _render_text(Group(*findings, summarize_audit_lines(audit)))


@render_text.register
def _report_text(report: Report) -> str:
    return _render_text(report_tables(report, f"{report.source_name} and result"))


@render_cell.register
def _plan_html(plan: PrecisionPlan) -> str:
    rows = [(op, str(config), str(config.weight or "")) for op, config in plan.items()]
    caption = f"{format_count(len(plan), 'op')} of the plan"
    return create_notebook_table(("op", "configuration", "weight"), rows, caption)


@render_cell.register
def _render_machine_html(machine: Hardware) -> str:
    rows = [
        (
            f"{device}, {precision}" if machine.gpus else precision.value,
            support.execution_mode,
            support.reason,
        )
        for device in (("cpu", "gpu") if machine.gpus else ("cpu",))
        for precision in CPU_PRECISIONS
        for support in [machine.support(precision, device)]
    ]
    caption = f"{machine.name}, {format_count(machine.cores, 'core')}"
    return create_notebook_table(("precision", "support", "reason"), rows, caption)


def save_page(report: Report, path: str | Path) -> None:
    """Write the HTML page of a report's run.

    Raises:
        NeuralMPError: the report has no run record, or the file is not writable.
    """
    if report.record is None:
        raise NeuralMPError(
            "the report has no run record, which a page requires; use the report of a tuning "
            "result, or `neural-mp report` with the workspace of the run"
        )
    write_page(path, page_of(report.record))
