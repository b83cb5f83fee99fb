"""Tables of hardware, models, trials, results, noise and executed kernels."""

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
from neural_mp.core.precision import CPU_PRECISIONS, Precision
from neural_mp.core.trial import Outcome, Trial
from neural_mp.profiling import KernelChange, KernelKey, KernelLog, Ratio, RowPair
from neural_mp.profiling.audit import BROKEN, Audit, AuditedOp, Verdict
from neural_mp.reporting import formatting
from neural_mp.reporting.capabilities import build_reasons_table
from neural_mp.runs.report import (
    STAGE_WORDS,
    MetricFigures,
    Report,
    RuntimeFigures,
    Stage,
    StageNoise,
)
from neural_mp.tuning.measurement.sensitivity import Sensitivity
from neural_mp.util.noise import nsr_to_decibels
from neural_mp.util.text import format_count

#: Environment variables that limit the instruction sets of oneDNN.
_LIMITS = ("ONEDNN_MAX_CPU_ISA", "DNNL_MAX_CPU_ISA")
_OUTCOME_STYLE = {Outcome.MET: "green", Outcome.FAILED: "red"}
_OUTCOME_STYLE |= dict.fromkeys(set(Outcome) - set(_OUTCOME_STYLE), "yellow")


_SUPPORT_STYLES = {"natively": "green", "weights": "green", "emulated": "yellow", "no": "red"}


def build_hardware_table(
    hardware: Hardware, accumulation: Mapping[str, Mapping[KernelKind, Int8Accumulation]]
) -> RenderableType:
    """Return a table of native precisions with reasons, and INT8 accumulation by framework."""
    title = f"{hardware.name}, {format_count(hardware.cores, 'core')}"
    table = formatting.create_table(title, "device", "precision", "support", "reason")
    for device in ("cpu", "gpu") if hardware.gpus else ("cpu",):
        for precision in CPU_PRECISIONS:
            support = hardware.support(precision, device)
            mode = Text(support.execution_mode, _SUPPORT_STYLES[support.execution_mode])
            table.add_row(device, precision.value, mode, support.reason)
    flags = [flag for group in NATIVE_FLAGS.values() for flag in group if flag in hardware.flags]
    notes = [f"Relevant CPU flags: {', '.join(flags) or 'none'}"]
    limits = (f"{name}={os.environ[name]}" for name in _LIMITS if name in os.environ)
    notes.extend(f"{limit} limits the instruction sets of oneDNN" for limit in limits)
    parts: list[RenderableType] = [table]
    if accumulation:
        parts.append(_build_accumulation_table(accumulation))
    return Group(*parts, *(Text(note, style="dim") for note in notes))


def _build_accumulation_table(
    accumulation: Mapping[str, Mapping[KernelKind, Int8Accumulation]],
) -> Table:
    title = "INT8 accumulation by kernel type"
    table = formatting.create_table(title, "framework", *(kernel.value for kernel in KernelKind))
    styles = {Int8Accumulation.EXACT: "green", Int8Accumulation.SATURATING: "yellow"}
    for framework, by_kernel in accumulation.items():
        kinds = (by_kernel[kernel] for kernel in KernelKind)
        table.add_row(framework, *(Text(kind.value, styles[kind]) for kind in kinds))
    return table


def plan_table(plan: PrecisionPlan, exact_on: str) -> RenderableType:
    """Return a table of the ops of a plan, and the CPUs on which the model is exact."""
    title = f"{format_count(len(plan), 'op')} of the plan"
    rows = ((op, str(config), str(config.weight or "")) for op, config in plan.items())
    table = formatting.create_table(title, "op", "configuration", "weight", rows=rows)
    return Group(table, Text(f"exact on {exact_on}"))


def build_explanation_table(
    op: Op, rows: Mapping[Precision, tuple[AmpList | None, Precision, str]]
) -> Table:
    """Return a table that explains the precisions of one op.

    A row consists of the list of the op type, the effective precision and the reason.
    """
    title = f"{op.name} ({op.type})"
    table = formatting.create_table(title, "precision", "list", "decision", "reason")
    for precision, (stands_on, runs_in, reason) in rows.items():
        amp_list = "–" if not precision.is_16_bit else stands_on.name if stands_on else "none"
        table.add_row(precision.value, amp_list, runs_in.value, reason)
    return table


def build_widths_table(op: Op, rows: Mapping[str, tuple[str, str]]) -> Table:
    """Return a table that explains the widths of one op, from width → decision and reason."""
    table = formatting.create_table(f"{op.name} ({op.type})", "widths", "decision", "reason")
    for widths, (decision, reason) in rows.items():
        table.add_row(widths, decision, reason)
    return table


def build_sensitivity_table(rows: Iterable[Sensitivity]) -> Table:
    """Return a table of sensitivities, highest degradation first."""
    figures = ("quantization noise", "corrected", "output noise", "corrected", "time saved")
    headings = ("tensor or op", *figures, "precision", "reason")
    table = formatting.create_table("Sensitivity of decisions", *headings, right=figures)
    for row in rows:
        table.add_row(
            row.name,
            formatting.format_fraction(row.noise),
            formatting.format_fraction(row.corrected_noise)
            + (f" ({row.correction})" if row.correction else ""),
            formatting.format_fraction(row.output_noise),
            formatting.format_fraction(row.corrected_output_noise),
            _format_saved_seconds(row),
            row.runs_in,
            row.reason,
        )
    return table


def _format_saved_seconds(row: Sensitivity) -> str:
    low, high = row.seconds_gained_low, row.seconds_gained_high
    if row.seconds_gained is None or low is None or high is None:
        return formatting.format_seconds(row.seconds_gained)
    bounds = f"{formatting.format_seconds(low)} to {formatting.format_seconds(high)}"
    return f"{formatting.format_seconds(row.seconds_gained)} ({bounds})"


def build_trial_table(rows: Sequence[tuple[Trial, float | None]], title: str = "") -> Table:
    """Return a table of trials with their speedup over FP32, if measured."""
    names = list(dict.fromkeys(name for trial, _ in rows for name in trial.metrics))
    first = ("trial", *names, "score") if names else ("trial", "accuracy")
    figures = (*first, "loss", "speed", "seconds")
    table = formatting.create_table(title, *figures, "outcome", "plan", right=figures)
    for trial, speedup in rows:
        loss, bound = formatting.format_number(trial.loss), trial.loss_bound
        counts = " ".join(f"{count} {p}" for p, count in trial.plan.counts().items())
        table.add_row(
            str(trial.number + 1),
            *(formatting.format_number(trial.metrics.get(name)) for name in names),
            formatting.format_number(trial.accuracy),
            loss if bound is None else f"{loss} (at most {formatting.format_number(bound)})",
            _format_speedup(trial, speedup),
            f"{trial.seconds:.1f}",
            Text(trial.outcome.value, _OUTCOME_STYLE[trial.outcome]),
            counts if trial.error is None else f"{counts}: {trial.error}",
        )
    if any(speedup is not None for _, speedup in rows):
        table.caption = _RULE
        table.caption_justify = "left"
    return table


#: Rule by which a measured trial is met or slow.
_RULE = (
    "met: within the accuracy target; slow: within the target, but the lower bound of the speed "
    "is below min_speedup, which is required if latency alone is the objective"
)


def _format_speedup(trial: Trial, speedup: float | None) -> str:
    if speedup is None or trial.speedup_interval is None:
        return formatting.format_ratio(speedup)
    low, high = trial.speedup_interval
    return f"{formatting.format_ratio(speedup)} ({low:.2f} to {high:.2f})"


def result_tables(report: Report, met: bool | None) -> RenderableType:
    """Return the summary of a run: before and after, op counts, warnings."""
    return report_tables(report, verdict_line(report, met))


def report_tables(report: Report, title: str) -> RenderableType:
    """Return the tables of a report under a title."""
    figures = (report.source_name, "result", "change")
    parts: list[RenderableType] = [
        formatting.create_table(title, "", *figures, right=figures, rows=before_and_after(report)),
        op_counts_table(report.op_counts),
    ]
    if report.runtimes:
        rows = make_runtime_rows(report.runtimes)
        parts.append(
            formatting.create_table(
                "Runtimes", *RUNTIME_HEADINGS, right=_RUNTIME_FIGURES, rows=rows
            )
        )
    if report.hint is not None:
        parts.append(Text(str(report.hint)))
    if report.stage_noise is not None:
        parts.append(stage_noise_table(report.stage_noise))
    if report.ineligible:
        parts.append(build_reasons_table("Ineligible contractions", report.ineligible))
    parts.extend(Text(line) for line in report.converted)
    parts.extend(Text(f"auto mixed precision, {line}", style="dim") for line in report.amp)
    conversions = report.conversions
    parts.append(
        Text(
            f"{format_count(conversions.casts, 'cast')}, {conversions.quantize} quantize and "
            f"{format_count(conversions.dequantize, 'dequantize op')} per inference; "
            f"{format_count(report.evaluations, 'evaluation')}; "
            + ", ".join(f"{phase} {seconds:.1f} s" for phase, seconds in report.seconds.items())
            + formatting.format_effort_suffix(report),
            style="dim",
        )
    )
    if report.cache_hits:
        hits = ", ".join(report.cache_hits)
        parts.append(Text(f"from the measurement cache: {hits}", style="dim"))
    parts.extend(Text(f"warning: {warning}", style="yellow") for warning in report.warnings)
    return Group(*parts)


_RUNTIME_FIGURES = (
    "FP32",
    "all eligible ops in INT8",
    "all in BF16 or FP16",
    "SQNR of FP32",
    "result over FP32",
)
RUNTIME_HEADINGS = ("runtime", *_RUNTIME_FIGURES, "chosen", "reason")


def make_runtime_rows(runtimes: Sequence[RuntimeFigures]) -> list[tuple[str, ...]]:
    """Return the cells of the compared runtimes, as in `RUNTIME_HEADINGS`."""
    return [
        (
            runtime.framework,
            formatting.format_seconds(runtime.latency),
            formatting.format_seconds(runtime.int8_latency),
            formatting.format_seconds(runtime.low_float_latency),
            "" if runtime.sqnr_db is None else f"{runtime.sqnr_db:.1f} dB",
            formatting.format_ratio(runtime.result_speedup),
            "yes" if runtime.chosen else "",
            runtime.reason,
        )
        for runtime in runtimes
    ]


def verdict_line(report: Report, met: bool | None) -> str:
    """Return the verdict on a run in one line."""
    if report.only_slower:
        which = "No plan" if met is None else "No plan that meets the target"
        better = "faster" if report.accelerator is None else "cheaper"
        return f"{which} is {better}; the result is the {report.source_name} model"
    return {
        True: "The accuracy target is met",
        False: f"The accuracy target is NOT met; the result is the {report.source_name} model",
        None: "Accuracy was not checked",
    }[met]


def before_and_after(report: Report) -> list[tuple[str, str, str, str]]:
    """Return rows of name, value of the given model, result value and change, as text."""
    rows = [
        *_make_accuracy_rows(report),
        (*formatting.time_of(report), formatting.format_speedup(report)),
        *_make_cpu_rows(report),
    ]
    if report.output_sqnr_db is not None:
        name = f"output SQNR, compared with {report.source_name}"
        rows.append((name, "", "", f"{report.output_sqnr_db:.1f} dB"))
    for name, baseline, result in (
        ("size of weights", report.baseline_size, report.size),
        ("memory footprint", report.baseline_footprint, report.footprint),
    ):
        if result is not None:
            fraction = f"{result / baseline:.0%}" if baseline else "–"
            rows.append(
                (name, formatting.format_size(baseline), formatting.format_size(result), fraction)
            )
    return rows


def _make_cpu_rows(report: Report) -> list[tuple[str, str, str, str]]:
    """Return the row of the CPU seconds, which other processes hardly affect, if counted."""
    if report.cpu_seconds is None:
        return []
    batch = f", batch of {report.batch_size}" if report.batch_size else ""
    seconds = report.baseline_cpu_seconds, report.cpu_seconds
    before, after = map(formatting.format_seconds, seconds)
    return [(f"CPU time{batch}", before, after, formatting.format_ratio(report.cpu_speedup))]


def _make_accuracy_rows(report: Report) -> list[tuple[str, str, str, str]]:
    """Return the accuracy rows; one per metric if each has a target."""
    baseline, value = report.baseline_accuracy, report.accuracy
    rows = [_make_accuracy_row(report.metric or "accuracy", baseline, value, report.target, report)]
    parts = [
        _make_accuracy_row(n, m.baseline, m.value, m.target, m) for n, m in report.metrics.items()
    ]
    has_targets = any(metric.target is not None for metric in report.metrics.values())
    return parts if has_targets else rows + parts


def _make_accuracy_row(
    name: str,
    baseline: float | None,
    value: float | None,
    target: float | None,
    judged: Report | MetricFigures,
) -> tuple[str, str, str, str]:
    """Return the row of a metric: name with target, both values, difference."""
    notes = [f"target {formatting.format_number(target)}"] if target is not None else []
    if not judged.higher_is_better:
        notes.append("lower is better")
    change = f"{value - baseline:+.5g}" if value is not None and baseline is not None else "–"
    title = name + (f" ({', '.join(notes)})" if notes else "")
    return title, formatting.format_number(baseline), formatting.format_number(value), change


def op_counts_table(counts: Mapping[str, Mapping[str, int]]) -> Table:
    """Return a table of op counts by type and precision."""
    shown = [p.value for p in Precision if any(p.value in by for by in counts.values())]
    table = formatting.create_table("Ops by type and precision", "op type", *shown, right=shown)
    for op_type, by in sorted(counts.items()):
        table.add_row(op_type, *(str(by.get(precision, "")) for precision in shown))
    totals = (str(sum(by.get(precision, 0) for by in counts.values())) for precision in shown)
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


def build_benchmark_table(rows: Sequence[BenchmarkRow]) -> Table:
    """Return a table of models; the first is the reference of the others."""
    figures = ("latency per batch", "samples/s", "size of weights", "speed")
    title = "Latency in interleaved rounds (lower decile)"
    table = formatting.create_table(title, "model", *figures, right=figures)
    for row in rows:
        table.add_row(
            row.name,
            formatting.format_seconds(row.latency),
            f"{row.samples / row.latency:.4g}",
            formatting.format_size(row.size),
            formatting.format_ratio(1.0) if row is rows[0] else str(row.speed),
        )
    return table


_STYLES = {
    **dict.fromkeys(Verdict, "yellow"),
    **dict.fromkeys((Verdict.AS_PLANNED, Verdict.FUSED), ""),
    **dict.fromkeys(BROKEN, "red"),
}


def build_audit_table(ops: Iterable[AuditedOp]) -> Table:
    """Return a table of ops with planned and executed precision."""
    headings = ("op", "type", "planned", "executed", "verdict", "kernels")
    table = formatting.create_table("Planned and executed precisions", *headings)
    for op in ops:
        along = f" ({op.planned.fused_into})" if op.ran is None and op.planned.fused_into else ""
        table.add_row(
            op.name,
            op.planned.type,
            op.planned.config_text,
            op.ran_in.value if op.ran_in is not None else "",
            Text(f"{op.verdict}{along}", _STYLES[op.verdict]),
            ", ".join(op.kernels),
        )
    return table


def target_audit_tables(
    title: str,
    findings: Sequence[tuple[str, str, str, str]],
    kernels: Sequence[tuple[str, str, str]],
    notes: Iterable[str],
) -> RenderableType:
    """Return the tables of an audit for an accelerator.

    Args:
        title: the name of the target.
        findings: op, its type, rule and message of each violation.
        kernels: count, kind and types of the kernels of the target's compiler.
        notes: lines below the tables.
    """
    parts: list[RenderableType] = []
    if findings:
        headings = ("op", "type", "rule", "finding")
        parts.append(formatting.create_table(f"Findings, {title}", *headings, rows=findings))
    if kernels:
        parts.append(
            formatting.create_table(f"Kernels, {title}", "count", "kernel", "types", rows=kernels)
        )
    return Group(*parts, *map(Text, notes))


def summarize_audit_lines(audit: Audit) -> str:
    """Summarize an audit in a few lines."""
    verdicts = ", ".join(f"{count} {verdict}" for verdict, count in audit.counts().items())
    summary = f"{audit.lowered} of {format_count(len(audit.ops), 'op')} planned below fp32"
    summary += f": {verdicts}" if verdicts else ""
    if not audit.complete:
        summary += "\nsaved by an earlier version: only ops named in the plan are listed"
    scales = list(audit.input_scales.values())
    for kind in dict.fromkeys(scales):
        count = format_count(scales.count(kind), "op")
        summary += f"\n{count} in dynamic int8: a scale for each {kind} of the inputs"
    equal = audit.counts().get(Verdict.EQUAL_INT8, 0)
    if equal:
        summary += (
            f"\nbetween tensors in int8, the runtime computes {format_count(equal, 'op')} planned "
            "in fp32 with an integer kernel, with equal numbers but for rounding"
        )
    broken = sum(op.verdict in BROKEN for op in audit.ops)
    if not broken:
        return f"{summary}\nthe plan holds"
    return f"{summary}\nthe plan does NOT hold: {format_count(broken, 'op')} not as planned"


#: Ops in the table of the noise.
_MOST_NOISY = 12


def stage_noise_table(noise: StageNoise) -> Table:
    """Return the SQNR of the noisiest ops and of the outputs at each stage."""
    remaining = len(noise.ops) - _MOST_NOISY
    more = f", {_MOST_NOISY} noisiest of {len(noise.ops)} ops" if remaining > 0 else ""
    headings = [STAGE_WORDS[stage] for stage in noise.measured_stages]
    title, rows = f"SQNR of results against FP32{more}", make_stage_rows(noise, _MOST_NOISY)
    return formatting.create_table(title, "op", *headings, right=headings, rows=rows)


def make_stage_rows(noise: StageNoise, count: int) -> list[list[str]]:
    """Return the cells of the ops noisiest when rounded to nearest, in the order of the model.

    The last row is that of the outputs.
    """
    ranked = sorted(noise.ops, key=lambda op: -noise.ops[op].get(Stage.NEAREST.value, 0.0))
    shown = set(ranked[:count])
    rows = [
        [op, *_format_stage_cells(by, noise.measured_stages)]
        for op, by in noise.ops.items()
        if op in shown
    ]
    return [*rows, ["outputs", *_format_stage_cells(noise.outputs, noise.measured_stages)]]


def _format_stage_cells(by_stage: Mapping[str, float], stages: tuple[Stage, ...]) -> list[str]:
    values = (by_stage.get(stage.value) for stage in stages)
    return [
        "–" if nsr is None else formatting.format_decibels(nsr_to_decibels(nsr)) for nsr in values
    ]


def format_stage_levels(noise: StageNoise, op: str) -> str:
    """Return the SQNR of an op at each stage as text; empty if the op was not measured."""
    if op not in noise.ops:
        return ""
    cells = zip(
        noise.measured_stages,
        _format_stage_cells(noise.ops[op], noise.measured_stages),
        strict=True,
    )
    return ", ".join(f"{cell} {STAGE_WORDS[stage]}" for stage, cell in cells)


_KERNEL_HEADINGS = {
    KernelKey.IMPLEMENTATION: "jit kernel",
    KernelKey.PRIMITIVE: "primitive",
    KernelKey.ISA: "instructions",
    KernelKey.PRECISION: "precision",
    KernelKey.PROBLEM: "problem",
}


def build_kernel_table(log: KernelLog, key: str = KernelKey.IMPLEMENTATION) -> RenderableType:
    """Return a table of the time per kernel: calls, total time, fraction.

    Raises:
        ConfigurationError: the key is unknown; see `KernelLog.by`.
    """
    figures = ("calls", "elapsed time", "share")
    title, heading = summarize_log(log), _KERNEL_HEADINGS[KernelKey(key)]
    table = formatting.create_table(title, heading, *figures, right=figures)
    for row in log.by(key):
        table.add_row(
            row.name, str(row.calls), _format_milliseconds(row.milliseconds), f"{row.share:.1%}"
        )
    table.add_section()
    table.add_row(
        "all", str(len(log.calls)), _format_milliseconds(log.total), "100.0%" if log.total else "–"
    )
    return Group(table, *(Text(note, style="yellow") for note in log.notes))


def kernel_pairs_table(pairs: Sequence[RowPair], key: str, logs: Sequence[KernelLog]) -> Table:
    """Return a table that compares two logs by the rows that `side_by_side` paired by `key`."""
    figures = ("calls", "calls after", "time", "time after", "speed")
    heading = _KERNEL_HEADINGS[KernelKey(key)]
    table = formatting.create_table("Comparison of both logs", heading, *figures, right=figures)
    for pair in pairs:
        rows = pair.before, pair.after
        counts = [str(row.calls) if row else "–" for row in rows]
        times = [row.milliseconds if row else None for row in rows]
        # Different numbers of calls mean different work, so a speedup is undefined.
        speed = _format_ratio(*times) if counts[0] == counts[1] else "–"
        table.add_row(pair.name, *counts, *map(_format_milliseconds, times), speed)
    table.add_section()
    totals = [log.total for log in logs]
    table.add_row(
        "all",
        *(str(len(log.calls)) for log in logs),
        *map(_format_milliseconds, totals),
        _format_ratio(*totals),
    )
    return table


def kernel_changes_table(changes: Sequence[KernelChange]) -> RenderableType:
    """Return a table of the work that other kernels compute in the second log."""
    if not changes:
        return Text("no changed kernels: both logs use the same kernels for the same work")
    figures = ("sizes", "time", "time after", "speed")
    headings = ("work", "kernels → kernels after", *figures)
    table = formatting.create_table("Changed kernels", *headings, right=figures)
    for change in changes:
        counts = change.calls_before, change.calls_after
        durations = change.milliseconds_before, change.milliseconds_after
        times = [time if count else None for time, count in zip(durations, counts, strict=True)]
        kernels = (f"→ {name}" for name in change.after or ("–",))
        table.add_row(
            change.work,
            "\n".join((*(change.before or ("–",)), *kernels)),
            str(change.problems),
            *map(_format_milliseconds, times),
            _format_ratio(*times) if counts[0] == counts[1] else "–",
        )
    return table


def summarize_log(log: KernelLog) -> str:
    """Summarize a log in one line: calls, time, library, instruction set."""
    calls = f"{format_count(len(log.calls), 'kernel call')}, {_format_milliseconds(log.total)}"
    return "; ".join(part for part in (calls, log.library.split(" (")[0], log.isa) if part)


def _format_milliseconds(milliseconds: float | None) -> str:
    return "–" if milliseconds is None else f"{milliseconds:,.3f} ms"


def _format_ratio(previous: float | None, current: float | None) -> str:
    return formatting.format_ratio(previous / current if previous and current else None)
