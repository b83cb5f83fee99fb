"""Notebook displays of plans, hardware, reports and comparisons; see `neural_mp.util.text`.

A model comparison also has a table for terminals, and CSV.
"""

from __future__ import annotations

import io
from functools import singledispatch
from pathlib import Path

from rich.console import Console, Group, RenderableType
from rich.text import Text

from neural_mp.core.hardware import Hardware
from neural_mp.core.plan import PrecisionPlan
from neural_mp.core.precision import CPU_PRECISIONS
from neural_mp.core.trial import Trials
from neural_mp.errors import NeuralMPError
from neural_mp.profiling.audit import Audit
from neural_mp.reporting import formatting
from neural_mp.reporting.page import page_of, report_cell, write_page
from neural_mp.reporting.tables import (
    build_audit_table,
    build_sensitivity_table,
    build_trial_table,
    report_tables,
    summarize_audit_lines,
)
from neural_mp.runs.report import Report
from neural_mp.tuning.measurement.comparison import EQUAL, Comparison, LayerDifference
from neural_mp.tuning.measurement.sensitivity import SensitivityReport
from neural_mp.tuning.measurement.sqnr import MIN_SQNR_DB
from neural_mp.util.html import create_notebook_table
from neural_mp.util.text import format_count, write_table

#: Default number of worst ops to mark.
MARKED = 5
_STYLES = {"first": "red", "worst": "yellow"}
_FIGURES = ("sqnr", "sqnr_drop", "introduced_nsr", "cosine", "max_abs_error")


def build_comparison_tables(comparison: Comparison, worst: int | None = None) -> RenderableType:
    """Return tables of the outputs, and of the ops in graph order with the worst marked.

    With `worst`, only the N ops that introduce the most quantization noise are shown.
    """
    chosen = comparison.worst(MARKED if worst is None else worst)
    marked = {layer.name for layer in chosen}
    shown = comparison.layers if worst is None else chosen
    batches = format_count(comparison.batches, "batch", "batches")
    title = f"Outputs: {format_count(comparison.samples, 'sample')} in {batches}"
    figures = ("SQNR", "SQNR drop", "cosine", "max. abs. error")
    headings = ("output", "SQNR", "cosine", "max. abs. error")
    outputs = formatting.create_table(title, *headings, right=figures)
    for output in comparison.outputs:
        outputs.add_row(
            output.name,
            formatting.format_decibels(output.sqnr),
            f"{output.cosine:.6f}",
            f"{output.max_abs_error:.3g}",
        )
    of_all = "" if worst is None else f"; {len(shown)} that introduce the most quantization noise"
    title = f"{format_count(len(comparison.layers), 'op')}{of_all}"
    layers = formatting.create_table(title, "op", "type", "A → B", *figures, "", right=figures)
    for layer in shown:
        mark = "worst" if layer.name in marked else ""
        if comparison.first is not None and layer.name == comparison.first.name:
            mark = "first"
        layers.add_row(*_format_layer_cells(layer), mark, style=_STYLES.get(mark, ""))
    parts: list[RenderableType] = [outputs] if comparison.outputs else []
    parts += [layers, Text(_describe_divergence(comparison))]
    parts += [
        Text(f"{format_count(len(names), 'op')} not compared: they {reason}", style="dim")
        for reason, names in comparison.left_out.items()
    ]
    return Group(*parts)


def format_comparison_csv(comparison: Comparison, worst: int | None = None) -> str:
    """Return CSV with a header and one line per op; the SQNR of equal values is `inf`."""
    text = io.StringIO()
    layers = comparison.layers if worst is None else comparison.worst(worst)
    rows = (
        (layer.name, layer.type, *layer.dtypes, *(getattr(layer, name) for name in _FIGURES))
        for layer in layers
    )
    write_table(text, [("name", "type", "dtype_a", "dtype_b", *_FIGURES), *rows])
    return text.getvalue()


def _format_layer_cells(layer: LayerDifference) -> tuple[str, ...]:
    first, second = layer.dtypes
    names, types = zip(*layer.fused_ops, (layer.name, layer.type), strict=True)
    return (
        ", ".join(names),
        ", ".join(types),
        first if first == second else f"{first} → {second}",
        formatting.format_decibels(layer.sqnr),
        _format_drop(layer),
        f"{layer.cosine:.6f}",
        f"{layer.max_abs_error:.3g}",
    )


def _describe_divergence(comparison: Comparison) -> str:
    first = comparison.first
    if first is None:
        return "No divergence: no op has an SQNR clearly below the SQNR of its inputs"
    low = first.sqnr < MIN_SQNR_DB
    why = f"first op below {MIN_SQNR_DB:.0f} dB" if low else "largest SQNR drop"
    below = "inputs equal" if _from_equal(first) else f"{_format_drop(first)} below its inputs"
    location = f"{first.name} ({first.type})"
    return (
        f"First divergence at {location}: {formatting.format_decibels(first.sqnr)}, {below}; {why}"
    )


def _format_drop(layer: LayerDifference) -> str:
    if layer.sqnr_drop <= 0:
        return "–"
    return "from equal" if _from_equal(layer) else f"{layer.sqnr_drop:.1f} dB"


def _from_equal(layer: LayerDifference) -> bool:
    return layer.sqnr_drop > 0 and layer.sqnr_drop + layer.sqnr >= EQUAL


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
