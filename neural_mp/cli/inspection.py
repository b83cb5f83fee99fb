"""`neural-mp inspect`, `explain` and `audit`."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from neural_mp.cli.errors import ExitCode
from neural_mp.cli.options import (
    DataOption,
    ModelArgument,
    ModelOptions,
    SamplesOption,
    TargetOption,
)
from neural_mp.cli.output import Output
from neural_mp.cli.report import read_run
from neural_mp.errors import ConfigurationError, UnknownOperatorError, did_you_mean
from neural_mp.util.system.memory import pause_garbage_collection

if TYPE_CHECKING:
    from neural_mp.adaptors.loaded_model import AnyModel
    from neural_mp.adaptors.onnxrt.targets.audit.file_audit import FileAudit
    from neural_mp.api.explain import Explanation
    from neural_mp.api.optimized_model import OptimizedModel
    from neural_mp.core.graph import Op
    from neural_mp.core.plan import PrecisionPlan
    from neural_mp.core.precision import Precision
    from neural_mp.profiling.audit import Audit
    from neural_mp.runs.report import RunRecord, StageNoise
    from neural_mp.space import TuningSpace


def inspect(
    model: ModelArgument,
    op_type: Annotated[
        list[str] | None, typer.Option("--type", help="Show only ops of this type; repeatable.")
    ] = None,
    match: Annotated[
        str | None,
        typer.Option(help="Show only ops whose full name matches this regular expression."),
    ] = None,
    summary: Annotated[
        bool, typer.Option("--summary", help="Show counts by op type, precision and reason.")
    ] = False,
    per_op: Annotated[
        bool, typer.Option("--all", help="One row per op instead of one row per layer.")
    ] = False,
    target: TargetOption = None,
    *,
    options: ModelOptions,
    out: Output,
) -> None:
    """Show the precisions each op supports here, or the plan of a saved result."""
    from neural_mp.api.saved_model import is_saved_model

    pattern = _compile_match(match)
    if is_saved_model(model):
        if op_type:
            raise ConfigurationError(
                f"--type requires a model, got the saved result {model!r}; give --match or "
                f"--summary"
            )
        _inspect_saved_result(out, model, pattern, summary)
        return
    loaded = options.load_model(model, out)
    from neural_mp.api.portability import describe_exact_targets
    from neural_mp.api.targets import seen_by_target
    from neural_mp.core import hardware
    from neural_mp.reporting import CapabilitySummary, build_capability_table, build_summary_table

    # Ops of a graph are very many objects, none of which becomes garbage.
    options.enter_context(pause_garbage_collection())
    with out.show_progress(f"Reading the capabilities of {model}"):
        loaded, cpu = seen_by_target(loaded, target or hardware.HOST_TARGET)
        machine = hardware.detect().for_target(cpu)
        space = loaded.adaptor.space(loaded.held, machine)
    ops = _select_ops(list(space.graph), op_type or (), pattern)
    if summary:
        counts = CapabilitySummary.from_ops(space, ops)
        out.show_table(build_summary_table(counts))
    else:
        out.show_table(build_capability_table(space, ops, each=per_op))
        if loaded.full_range_kernels:
            out.show_line(f"exact on {describe_exact_targets(loaded)}")
    if out.as_json:
        out.show_document(
            counts.to_dict() if summary else [_make_op_document(space, op) for op in ops]
        )


def _inspect_saved_result(
    out: Output, folder: str, pattern: re.Pattern[str] | None, summary: bool
) -> None:
    from neural_mp.api.optimized_model import load
    from neural_mp.core.plan import PrecisionPlan
    from neural_mp.reporting import plan_table
    from neural_mp.reporting.tables import op_counts_table

    with out.show_progress(f"Loading {folder}"):
        saved = load(folder)
    names = _match_names(list(saved.plan), pattern, "the plan has no op that matches --match")
    plan = PrecisionPlan({name: saved.plan[name] for name in names})
    if summary:
        counts = saved.report.op_counts
        out.show_table(op_counts_table(counts))
        document: Any = {"types": {kind: dict(by) for kind, by in counts.items()}}
    else:
        out.show_table(plan_table(plan, saved.exact_on))
        document = {"plan": plan.to_dict()}
    if out.as_json:
        out.show_document({**document, "exact_on": saved.exact_on})


def _compile_match(match: str | None) -> re.Pattern[str] | None:
    try:
        return None if match is None else re.compile(match)
    except re.error as error:
        raise ConfigurationError(
            f"--match {match!r} is not a regular expression: {error}; write .* for any characters"
        ) from None


def _select_ops(
    ops: Sequence[Op], types: Iterable[str], pattern: re.Pattern[str] | None
) -> list[Op]:
    """Return the ops of the given types whose names match, in their order.

    Raises:
        UnknownOperatorError: no op matches.
    """
    op_types = sorted({op.type for op in ops})
    requested = {_find_op_type(name, op_types) for name in types}
    remaining = [op for op in ops if not requested or op.type in requested]
    missing = f"no op{' of these types' if requested else ''} matches --match"
    names = set(_match_names([op.name for op in remaining], pattern, missing))
    return [op for op in remaining if op.name in names]


def _find_op_type(name: str, known: Collection[str]) -> str:
    for op_type in known:
        if op_type.lower() == name.lower():
            return op_type
    raise UnknownOperatorError(
        f"--type {name!r}: the model has no op of this type{did_you_mean(name, known)}"
    )


def _match_names(names: list[str], pattern: re.Pattern[str] | None, missing: str) -> list[str]:
    if pattern is None:
        return names
    matching = [name for name in names if pattern.fullmatch(name)]
    if not matching:
        raise UnknownOperatorError(
            f"{missing} {pattern.pattern!r}, which must match a whole name"
            f"{did_you_mean(pattern.pattern, names)}"
        )
    return matching


def _make_op_document(space: TuningSpace, op: Op) -> dict[str, Any]:
    capability = space.capabilities[op.name]
    return {
        "name": op.name,
        "type": op.type,
        "inputs": list(op.inputs),
        "source_precision": op.source_precision.value,
        "precisions": [p.value for p in capability.precisions],
        "emulated": sorted(p.value for p in capability.emulated),
        "reasons": {p.value: why for p, why in capability.reasons.items()},
    }


def explain(
    model: ModelArgument,
    op: Annotated[str, typer.Argument(help="Name or pattern of an op or layer, as for op_wise.")],
    precision: Annotated[
        list[str] | None, typer.Option(help="int8, bf16 or fp16; default: all. Of CPUs only.")
    ] = None,
    plan: Annotated[Path | None, typer.Option(help="Plan file to explain.")] = None,
    workspace: Annotated[
        Path | None,
        typer.Option(help="Workspace of a run, or a saved result, to explain with its noise."),
    ] = None,
    target: TargetOption = None,
    *,
    options: ModelOptions,
    out: Output,
) -> None:
    """Explain the precision of an op, or its widths on an accelerator, and why."""
    from neural_mp.api.explain import describe_run_evidence, explain_op
    from neural_mp.core import hardware
    from neural_mp.core.precision import parse_precisions
    from neural_mp.reporting import build_explanation_table
    from neural_mp.reporting.tables import format_stage_levels

    if plan is not None and workspace is not None:
        raise ConfigurationError("explain takes --plan or --workspace, got both; remove one")
    record = None if workspace is None else read_run(workspace)
    target = target or _find_run_target(record)
    if target not in hardware.TARGETS:
        if precision:
            raise ConfigurationError(
                f"--precision is for CPUs, which {target!r} is not; remove --precision"
            )
        _explain_for_accelerator(out, options.load_model(model, out), op, target, plan, record)
        return
    precisions = parse_precisions(",".join(precision or ["int8", "bf16", "fp16"]))
    loaded = options.load_model(model, out)
    explained_op, explanations = explain_op(
        loaded, op, precisions, plan or _plan_of_noise(record), target
    )
    if record is not None and (evidence := describe_run_evidence(record, explained_op.name)):
        explanations = {
            p: replace(item, reason=f"{item.reason} ({evidence})") if item.is_choice else item
            for p, item in explanations.items()
        }
    rows = {p: (item.list, item.runs_in, item.reason) for p, item in explanations.items()}
    out.show_table(build_explanation_table(explained_op, rows))
    ending = None if record is None else record.ending
    noise = None if ending is None else ending.report.stage_noise
    text = "" if noise is None else format_stage_levels(noise, explained_op.name)
    if text:
        out.show_line(f"SQNR of its result against FP32: {text}")
    if out.as_json:
        out.show_document(_make_explanation_document(explained_op, explanations, noise))


def _find_run_target(record: RunRecord | None) -> str:
    """Return the accelerator that a run was for; this CPU for any other run, and without one."""
    from neural_mp.core import hardware

    if record is None:
        return hardware.HOST_TARGET
    setting = record.setup.settings.get("target")
    if setting is not None and setting.value not in hardware.TARGETS:
        return setting.value  # the path of a profile, whose name alone would not be found
    figures = None if record.ending is None else record.ending.report.accelerator
    return hardware.HOST_TARGET if figures is None else figures.name


def _explain_for_accelerator(
    out: Output, loaded: AnyModel, op: str, target: str, plan: Path | None, record: RunRecord | None
) -> None:
    from neural_mp.api.explain_widths import explain_widths
    from neural_mp.reporting.tables import build_widths_table

    ending = None if record is None else record.ending
    report = None if ending is None else ending.report
    with out.show_progress(f"Reading the widths of {target}"):
        explained_op, rows = explain_widths(
            loaded, op, target, plan or _plan_of_noise(record), report
        )
    out.show_table(
        build_widths_table(
            explained_op, {name: (row.decision.value, row.reason) for name, row in rows.items()}
        )
    )
    if out.as_json:
        widths = {name: {**vars(row), "decision": row.decision.value} for name, row in rows.items()}
        out.show_document(
            {
                "op": explained_op.name,
                "type": explained_op.type,
                "target": target,
                "widths": widths,
            }
        )


def _plan_of_noise(record: RunRecord | None) -> PrecisionPlan | None:
    if record is None or record.ending is None:
        return None
    trained = [trial for trial in record.trials if trial.trained]
    return trained[-1].plan if trained else record.ending.plan


def _make_explanation_document(
    op: Op, explanations: Mapping[Precision, Explanation], noise: StageNoise | None
) -> dict[str, Any]:
    precisions = {
        precision.value: {
            "list": explanation.list.name if explanation.list else None,
            "decision": explanation.runs_in.value,
            "reason": explanation.reason,
        }
        for precision, explanation in explanations.items()
    }
    by_stage = None if noise is None else noise.ops.get(op.name)
    noises = None if by_stage is None else dict(by_stage)
    return {"op": op.name, "type": op.type, "precisions": precisions, "stage_noise": noises}


def audit(
    model: Annotated[str, typer.Argument(help="Saved result, or a model together with --plan.")],
    plan: Annotated[
        Path | None, typer.Option(help="Plan file, required unless the model is a saved result.")
    ] = None,
    show_all: Annotated[
        bool, typer.Option("--all", help="Show all ops, not only those that differ from the plan.")
    ] = False,
    target: Annotated[
        str | None,
        typer.Option(help="Accelerator that an ONNX file is for: a name, or a profile's file."),
    ] = None,
    data: DataOption = None,
    samples: SamplesOption = 4,
    *,
    options: ModelOptions,
    out: Output,
) -> None:
    """Verify the plan against the kernels that run; exit code 1 if they differ.

    With a target, verify an ONNX file by the target's rules, and by its compiler if that runs here.
    """
    if target is not None:
        _audit_for_target(out, model, target, data, samples)
        return
    from neural_mp.reporting import build_audit_table, summarize_audit_lines

    result = _load_or_convert_model(out, model, plan, options)
    with out.show_progress(f"Running {model}"):
        report = result.audit()
    shown = report.ops if show_all else report.findings
    if shown:
        out.show_table(build_audit_table(shown))
    out.show_line(summarize_audit_lines(report))
    if out.as_json:
        out.show_document(_make_audit_document(result, report, show_all))
    if not report.holds:
        raise typer.Exit(ExitCode.PLAN_BROKEN)


def _audit_for_target(
    out: Output, model: str, target: str, data: Path | None, samples: int
) -> None:
    from neural_mp.api.targets import audit_file
    from neural_mp.reporting import target_audit_tables

    with out.show_progress(f"Auditing {model} for {target}"):
        audit = audit_file(model, target, data, samples)
    findings = [(f.op or "–", f.op_type or "–", f.rule.value, f.message) for f in audit.findings]
    rows = [] if audit.compiled is None else audit.compiled.kernels
    kernels = [(str(row.count), row.kind, row.types) for row in rows]
    out.show_table(target_audit_tables(audit.profile.title, findings, kernels, audit.notes))
    if out.as_json:
        out.show_document(_file_audit_document(audit))
    if not audit.holds:
        raise typer.Exit(ExitCode.PLAN_BROKEN)


def _file_audit_document(audit: FileAudit) -> dict[str, Any]:
    compiled = audit.compiled
    kernels = [] if compiled is None else [vars(row) for row in compiled.kernels]
    return {
        "target": audit.profile.name,
        "evidence": audit.profile.evidence,
        "holds": audit.holds,
        "findings": [{**vars(item), "rule": item.rule.value} for item in audit.findings],
        "compiled": compiled is not None,
        "not_compiled": audit.not_compiled,
        "taken": None if compiled is None else len(compiled.taken),
        "refused": None if compiled is None else [list(node) for node in compiled.refused],
        "kernels": kernels,
        "sqnr_db": None if compiled is None else compiled.sqnr_db,
    }


def _load_or_convert_model(
    out: Output, model: str, plan: Path | None, options: ModelOptions
) -> OptimizedModel:
    from neural_mp.api.optimized_model import load
    from neural_mp.api.replay import convert_with_plan
    from neural_mp.api.saved_model import is_saved_model

    if is_saved_model(model):
        if plan is not None:
            raise ConfigurationError(
                f"--plan requires a model, got the saved result {model!r}, which has its own plan; "
                f"remove --plan"
            )
        with out.show_progress(f"Loading {model}"):
            return load(model)
    if plan is None:
        raise ConfigurationError(
            f"nothing to audit: {model!r} is not a saved result and has no plan; give the folder "
            f"of a saved result, or --plan"
        )
    with out.show_progress(f"Converting {model}"):
        return convert_with_plan(
            model, plan, framework=options.framework, inputs=options.random_inputs
        )


def _make_audit_document(result: OptimizedModel, report: Audit, show_all: bool) -> dict[str, Any]:
    return {
        "framework": result.framework,
        "holds": report.holds,
        "complete": report.complete,
        "planned": {"ops": len(report.ops), "lowered": report.lowered},
        "verdicts": {verdict.value: count for verdict, count in report.counts().items()},
        "ops": [op.to_dict() for op in (report.ops if show_all else report.findings)],
    }
