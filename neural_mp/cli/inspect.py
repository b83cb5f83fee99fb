"""`neural-mp inspect`."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Sequence
from typing import TYPE_CHECKING, Annotated, Any

import typer

from neural_mp.cli.errors import epilog
from neural_mp.cli.options import ModelArgument, ModelOptions, TargetOption
from neural_mp.cli.output import Output
from neural_mp.errors import ConfigurationError, UnknownOperatorError, did_you_mean

if TYPE_CHECKING:
    from neural_mp.core.graph import Op
    from neural_mp.space import TuningSpace

EPILOG = epilog("inspect model.onnx --type Conv --match 'layer4.*'", "inspect model.pt2 --summary")


def inspect(
    model: ModelArgument,
    op_type: Annotated[
        list[str] | None,
        typer.Option("--type", help="Show only ops of this type; repeatable."),
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
        _inspect_saved(out, model, pattern, summary)
        return
    loaded = options.load(model, out)
    from neural_mp.api.portability import exact_targets
    from neural_mp.core import hardware
    from neural_mp.reporting import CapabilitySummary, capability_table, summary_table

    machine = hardware.detect().for_target(target or hardware.HOST_TARGET)
    with out.working(f"Reading the capabilities of {model}"):
        space = loaded.adaptor.space(loaded.held, machine)
    ops = _select_ops(list(space.graph), op_type or (), pattern)
    if summary:
        counts = CapabilitySummary.of(space, ops)
        out.show(summary_table(counts))
    else:
        out.show(capability_table(space, ops, each=per_op))
        if loaded.full_range_kernels:
            out.line(f"exact on {exact_targets(loaded)}")
    if out.as_json:
        out.document(counts.to_dict() if summary else [_op_document(space, op) for op in ops])


def _inspect_saved(
    out: Output, folder: str, pattern: re.Pattern[str] | None, summary: bool
) -> None:
    from neural_mp.api.optimized_model import load
    from neural_mp.core.plan import PrecisionPlan
    from neural_mp.reporting import plan_table
    from neural_mp.reporting.tables import op_counts_table

    with out.working(f"Loading {folder}"):
        saved = load(folder)
    names = _match_names(list(saved.plan), pattern, "the plan has no op that matches --match")
    plan = PrecisionPlan({name: saved.plan[name] for name in names})
    if summary:
        counts = saved.report.op_counts
        out.show(op_counts_table(counts))
        document: Any = {"types": {kind: dict(by) for kind, by in counts.items()}}
    else:
        out.show(plan_table(plan, saved.exact_on))
        document = {"plan": plan.to_dict()}
    if out.as_json:
        out.document({**document, "exact_on": saved.exact_on})


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


def _op_document(space: TuningSpace, op: Op) -> dict[str, Any]:
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
