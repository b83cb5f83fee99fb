"""Tables of hardware, models, trials and results."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from neural_mp.amp import AmpList
from neural_mp.core.graph import Op
from neural_mp.core.hardware import NATIVE_FLAGS, Hardware
from neural_mp.core.int8_accumulation import Int8Accumulation, KernelKind
from neural_mp.core.plan import PrecisionPlan
from neural_mp.core.precision import Precision
from neural_mp.core.trial import Outcome, Trial
from neural_mp.profiling import Ratio
from neural_mp.profiling.audit import BROKEN, Audit, AuditedOp, Verdict
from neural_mp.reporting import formatting
from neural_mp.reporting.capabilities import reasons_table
from neural_mp.runs.report import MetricFigures, Report
from neural_mp.tuning.sensitivity import Sensitivity
from neural_mp.util.text import counted

#: Environment variables that limit the instruction sets of oneDNN.
_LIMITS = ("ONEDNN_MAX_CPU_ISA", "DNNL_MAX_CPU_ISA")
_OUTCOME_STYLE = {Outcome.MET: "green", Outcome.FAILED: "red"}
_OUTCOME_STYLE |= dict.fromkeys((Outcome.MISSED, Outcome.PRUNED, Outcome.SLOW), "yellow")


def hardware_table(
    hardware: Hardware, products: Mapping[str, Mapping[KernelKind, Int8Accumulation]]
) -> RenderableType:
    """Return a table of native precisions with reasons, and of INT8 accumulation.

    Args:
        hardware: the hardware.
        products: framework → kind of kernel → INT8 accumulation on this machine.
    """
    table = Table(title=f"{hardware.name}, {counted(hardware.cores, 'core')}", title_justify="left")
    for heading in ("device", "precision", "support", "reason"):
        table.add_column(heading)
    for device in ("cpu", "gpu") if hardware.gpus else ("cpu",):
        for precision in Precision:
            support = hardware.support(precision, device)
            style = {"natively": "green", "emulated": "yellow", "no": "red"}[support.runs]
            table.add_row(device, precision.value, Text(support.runs, style), support.reason)
    flags = [flag for group in NATIVE_FLAGS.values() for flag in group if flag in hardware.flags]
    notes = [f"Relevant CPU flags: {', '.join(flags) or 'none'}"]
    limits = (f"{name}={os.environ[name]}" for name in _LIMITS if name in os.environ)
    notes.extend(f"{limit} limits the instruction sets of oneDNN" for limit in limits)
    parts: list[RenderableType] = [table]
    if products:
        parts.append(_products_table(products))
    return Group(*parts, *(Text(note, style="dim") for note in notes))


def _products_table(products: Mapping[str, Mapping[KernelKind, Int8Accumulation]]) -> Table:
    table = Table(title="INT8 accumulation by kernel type", title_justify="left")
    table.add_column("framework")
    for kernel in KernelKind:
        table.add_column(kernel.value)
    for framework, found in products.items():
        words = (found[kernel].value for kernel in KernelKind)
        styles = {
            Int8Accumulation.EXACT.value: "green",
            Int8Accumulation.SATURATING.value: "yellow",
        }
        table.add_row(framework, *(Text(word, styles[word]) for word in words))
    return table


def plan_table(plan: PrecisionPlan, exact_on: str) -> RenderableType:
    """Return a table of the ops of a plan, and the CPUs on which the model is exact."""
    table = Table(title=f"{counted(len(plan), 'op')} of the plan", title_justify="left")
    for heading in ("op", "configuration", "weight"):
        table.add_column(heading, overflow="fold")
    for op, config in plan.items():
        table.add_row(op, str(config), str(config.weight or ""))
    return Group(table, Text(f"right on {exact_on}"))


def explanation_table(
    op: Op, rows: Mapping[Precision, tuple[AmpList | None, Precision, str]]
) -> Table:
    """Return a table that explains the precisions of one op.

    Args:
        op: the op.
        rows: precision → the list of the op type, effective precision, reason.
    """
    table = Table(title=f"{op.name} ({op.type})", title_justify="left")
    for heading in ("precision", "list", "decision", "reason"):
        table.add_column(heading, overflow="fold")
    for precision, (stands_on, runs_in, reason) in rows.items():
        word = "–" if not precision.is_16_bit else stands_on.name if stands_on else "none"
        table.add_row(precision.value, word, runs_in.value, reason)
    return table


def sensitivity_table(rows: Iterable[Sensitivity]) -> Table:
    """Return a table of sensitivities, highest degradation first."""
    table = Table(title="Sensitivity of decisions", title_justify="left")
    table.add_column("tensor or op", overflow="fold")
    for heading in ("quantization noise", "corrected", "output noise", "corrected", "time saved"):
        table.add_column(heading, justify="right")
    table.add_column("precision")
    table.add_column("reason", overflow="fold")
    for row in rows:
        table.add_row(
            row.name,
            formatting.share(row.noise),
            formatting.share(row.repaired_noise) + (f" ({row.repair})" if row.repair else ""),
            formatting.share(row.output_noise),
            formatting.share(row.repaired_output_noise),
            formatting.seconds(row.seconds_gained),
            row.runs_in,
            row.reason,
        )
    return table


def trial_table(rows: Sequence[tuple[Trial, float | None]], title: str = "") -> Table:
    """Return a table of trials with their speedup over FP32, if measured."""
    table = Table(title=title or None, title_justify="left")
    names = list(dict.fromkeys(name for trial, _ in rows for name in trial.metrics))
    first = ("trial", *names, "score") if names else ("trial", "accuracy")
    for heading in (*first, "loss", "speed", "seconds", "outcome", "plan"):
        table.add_column(heading, justify="left" if heading in ("outcome", "plan") else "right")
    for index, (trial, speedup) in enumerate(rows, start=1):
        counts = " ".join(f"{count} {p}" for p, count in trial.plan.counts().items())
        table.add_row(
            str(index),
            *(formatting.number(trial.metrics.get(name)) for name in names),
            formatting.number(trial.accuracy),
            formatting.number(trial.loss),
            formatting.times(speedup),
            f"{trial.seconds:.1f}",
            Text(trial.outcome.value, _OUTCOME_STYLE[trial.outcome]),
            counts if trial.error is None else f"{counts}: {trial.error}",
        )
    return table


def result_tables(report: Report, met: bool | None) -> RenderableType:
    """Return the summary of a run: before and after, op counts, warnings."""
    parts: list[RenderableType] = [
        _before_and_after(report, met),
        op_counts_table(report.op_counts),
    ]
    if report.ineligible:
        parts.append(reasons_table("Ineligible contractions", report.ineligible))
    parts.extend(Text(line) for line in report.converted)
    parts.extend(Text(f"auto mixed precision, {line}", style="dim") for line in report.amp)
    conversions = report.conversions
    parts.append(
        Text(
            f"{counted(conversions.casts, 'cast')}, {conversions.quantize} quantize and "
            f"{counted(conversions.dequantize, 'dequantize op')} per inference; "
            f"{counted(report.evaluations, 'evaluation')}; "
            + ", ".join(f"{phase} {seconds:.1f} s" for phase, seconds in report.seconds.items()),
            style="dim",
        )
    )
    if report.cache_hits:
        words_of = f"from the measurement cache: {', '.join(report.cache_hits)}"
        parts.append(Text(words_of, style="dim"))
    parts.extend(Text(f"warning: {warning}", style="yellow") for warning in report.warnings)
    return Group(*parts)


def verdict(report: Report, met: bool | None) -> str:
    """Return the verdict on a run in one line."""
    titles = {
        True: "The accuracy target is met",
        False: "The accuracy target is NOT met; the result is the FP32 model",
        None: "Accuracy was not checked",
    }
    rejected = report.best_rejected
    slow = rejected is not None and rejected.outcome is Outcome.SLOW
    if slow:
        return "No plan that meets the target is faster; the result is the FP32 model"
    return titles[met]


def _before_and_after(report: Report, met: bool | None) -> Table:
    title = verdict(report, met)
    table = Table(title=title, title_justify="left")
    for heading in ("", "FP32", "result", "change"):
        table.add_column(heading, justify="left" if not heading else "right")
    for row in before_and_after(report):
        table.add_row(*row)
    return table


def before_and_after(report: Report) -> list[tuple[str, str, str, str]]:
    """Return rows of name, FP32 value, result value and change, as text."""
    latency = f"latency, batch of {report.batch_size}" if report.batch_size else "latency"
    taken = formatting.seconds(report.baseline_latency), formatting.seconds(report.latency)
    rows = [*_accuracy_rows(report), (latency, *taken, formatting.speed(report))]
    if report.output_sqnr_db is not None:
        rows.append(("output SQNR, compared with FP32", "", "", f"{report.output_sqnr_db:.1f} dB"))
    for name, before, after in (
        ("size of weights", report.baseline_size, report.size),
        ("memory footprint", report.baseline_footprint, report.footprint),
    ):
        if after is not None:
            share = f"{after / before:.0%}" if before else "–"
            rows.append((name, formatting.size(before), formatting.size(after), share))
    return rows


def _accuracy_rows(report: Report) -> list[tuple[str, str, str, str]]:
    """Return the accuracy rows; one per metric if each has a target."""
    baseline, value = report.baseline_accuracy, report.accuracy
    rows = [_accuracy_row(report.metric or "accuracy", baseline, value, report.target, report)]
    parts = [
        _accuracy_row(name, found.baseline, found.value, found.target, found)
        for name, found in report.metrics.items()
    ]
    has_targets = any(found.target is not None for found in report.metrics.values())
    return parts if has_targets else rows + parts


def _accuracy_row(
    name: str,
    baseline: float | None,
    value: float | None,
    target: float | None,
    judged: Report | MetricFigures,
) -> tuple[str, str, str, str]:
    """Return the row of a metric: name with target, both values, difference."""
    notes = [f"target {formatting.number(target)}"] if target is not None else []
    if not judged.higher_is_better:
        notes.append("lower is better")
    change = f"{value - baseline:+.5g}" if value is not None and baseline is not None else "–"
    words_of_it = name + (f" ({', '.join(notes)})" if notes else "")
    return words_of_it, formatting.number(baseline), formatting.number(value), change


def op_counts_table(counts: Mapping[str, Mapping[str, int]]) -> Table:
    """Return a table of op counts by type and precision.

    Args:
        counts: op type → precision → number of ops.
    """
    table = Table(title="Ops by type and precision", title_justify="left")
    table.add_column("op type")
    shown = [p for p in Precision if any(p.value in by for by in counts.values())]
    for precision in shown:
        table.add_column(precision.value, justify="right")
    for op_type, by in sorted(counts.items()):
        table.add_row(op_type, *(str(by.get(p.value, "")) for p in shown))
    totals = (str(sum(by.get(p.value, 0) for by in counts.values())) for p in shown)
    table.add_section()
    table.add_row("all", *totals)
    return table


@dataclass(frozen=True)
class BenchmarkRow:
    """Model in a benchmark.

    Attributes:
        name: display name.
        latency: seconds per batch.
        samples: samples per batch.
        size: weight size in bytes.
        speed: speedup over the first model.
    """

    name: str
    latency: float
    samples: int
    size: int
    speed: Ratio


def benchmark_table(rows: Sequence[BenchmarkRow]) -> Table:
    """Return a table of models; the first is the reference of the others."""
    table = Table(title="Latency in interleaved rounds (lower decile)", title_justify="left")
    for heading in ("model", "latency per batch", "samples/s", "size of weights", "speed"):
        table.add_column(heading, justify="left" if heading == "model" else "right")
    for row in rows:
        table.add_row(
            row.name,
            formatting.seconds(row.latency),
            f"{row.samples / row.latency:.4g}",
            formatting.size(row.size),
            formatting.times(1.0) if row is rows[0] else str(row.speed),
        )
    return table


_YELLOW = (Verdict.EMULATED, Verdict.BEHIND, Verdict.PASSED_ON, Verdict.NOT_REACHED)
_STYLES = {**dict.fromkeys(_YELLOW, "yellow"), **dict.fromkeys(BROKEN, "red")}


def audit_table(ops: Iterable[AuditedOp]) -> Table:
    """Return a table of ops with planned and executed precision."""
    table = Table(title="Planned and executed precisions", title_justify="left")
    for heading in ("op", "type", "planned", "executed", "verdict", "kernels"):
        table.add_column(heading, overflow="fold")
    for op in ops:
        along = f" ({op.planned.fused_into})" if op.ran is None and op.planned.fused_into else ""
        table.add_row(
            op.name,
            op.planned.type,
            op.planned.words,
            op.ran_in.value if op.ran_in is not None else "",
            Text(f"{op.verdict}{along}", _STYLES.get(op.verdict, "")),
            ", ".join(op.kernels),
        )
    return table


def audit_words(audit: Audit) -> str:
    """Summarize an audit in one or two lines."""
    each = ", ".join(f"{count} {verdict}" for verdict, count in audit.counts().items())
    words = f"{audit.lowered} of {counted(len(audit.ops), 'op')} planned below fp32"
    words += f": {each}" if each else ""
    if not audit.complete:
        words += "\nsaved by an earlier version: only the ops that the plan names are listed"
    broken = sum(op.verdict in BROKEN for op in audit.ops)
    if not broken:
        return f"{words}\nthe plan holds"
    return f"{words}\nthe plan does NOT hold: {counted(broken, 'op')} not as planned"
