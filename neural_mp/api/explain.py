"""Explanation of the precision of each op, and log files for readers and Netron."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from neural_mp.adaptors.loaded_model import AnyModel, AnyTunableModel
from neural_mp.amp import AmpList, Colour
from neural_mp.api.constraints import apply_force_all, edit_lists, gather_amp
from neural_mp.core import hardware
from neural_mp.core.graph import Op
from neural_mp.core.plan import PrecisionPlan, load_plan_file
from neural_mp.core.precision import Precision
from neural_mp.errors import NeuralMPError, UnsupportedPrecisionError
from neural_mp.reporting.formatting import format_number, format_seconds
from neural_mp.runs.report import RunRecord
from neural_mp.space import ResolvedPlan, TuningSpace, explain_int8_choice, without_non_finite
from neural_mp.space.resolution import BY_PLAN
from neural_mp.tuning.measurement.sensitivity import sensitivity_report
from neural_mp.util.text import write_table

#: Reason without a plan, in place of `BY_PLAN`.
_WITHOUT_PLAN = "supported here; no plan was given"


def write_log(
    folder: Path, before: AnyTunableModel, after: AnyModel, plan: PrecisionPlan
) -> tuple[str, ...]:
    """Write the graph before and after conversion, and a table of ops per 16-bit precision.

    Returns:
        A warning for each file that could not be written.
    """
    warnings = []
    for name, model in (("before", before), ("after", after)):
        try:
            model.adaptor.dump_graph(model.held, folder / name)
        except (OSError, NeuralMPError) as error:
            warnings.append(f"the graph {name} was not written to {str(folder)!r}: {error}")
    space, resolved = before.space, before.space.resolve(plan)
    for precision in (p for p in space.usable_precisions if p.is_16_bit):
        try:
            _write_table(folder / f"paint_{precision}.tsv", space, resolved, precision)
        except OSError as error:
            warnings.append(f"the reasons were not written to {str(folder)!r}: {error}")
    return tuple(warnings)


def _write_table(path: Path, space: TuningSpace, plan: ResolvedPlan, precision: Precision) -> None:
    paints = space.painting(plan, precision).paints
    rows: list[Sequence[object]] = [("op", "type", "list", "colour", "runs in", "reason")]
    for op in space.graph:
        paint = paints[op.name]
        stands_on = paint.list.value if paint.list else ""
        cells = stands_on, paint.colour.value, plan.effective[op.name], paint.reason
        rows.append((op.name, op.type, *cells))
    with path.open("w", encoding="utf-8", newline="") as file:
        write_table(file, rows, delimiter="\t")


@dataclass(frozen=True)
class Explanation:
    """Reason for or against a precision of an op.

    Attributes:
        list: the list that contains the op type, for 16-bit precisions; else None.
        runs_in: effective precision.
        reason: explanation as text.
    """

    list: AmpList | None
    runs_in: Precision
    reason: str

    @property
    def is_choice(self) -> bool:
        """Whether the plan alone keeps the op in float, which could run in the precision."""
        return self.runs_in is Precision.FP32 and self.reason.endswith("by the plan")


def explain_op(
    model: AnyModel,
    op: str,
    precisions: tuple[Precision, ...],
    plan: PrecisionPlan | str | Path | None = None,
    target: str = hardware.HOST_TARGET,
) -> tuple[Op, Mapping[Precision, Explanation]]:
    """Explain for each precision whether an op runs in it on a CPU.

    Args:
        model: the model.
        op: name or pattern of an op or layer, as in `op_wise`; of a layer, its first contraction.
        precisions: any of INT8, BF16 and FP16.
        plan: plan to explain, or the file of a plan, whose observations apply as well; default:
            every op that supports the precision runs in it.
        target: the CPU, a name in `neural_mp.core.hardware.TARGETS`; accelerators have widths, see
            `explain_widths`.

    Returns:
        The op, and precision → explanation.

    Raises:
        UnknownOperatorError: the model lacks the op, or an edit names an unknown op type.
        UnsupportedPrecisionError: FP32 is among the precisions.
    """
    if Precision.FP32 in precisions:
        raise UnsupportedPrecisionError(
            "precisions must be int8, bf16 or fp16, got fp32, in which every op can run"
        )
    amp = gather_amp(None, None)
    sixteen = tuple(precision for precision in precisions if precision.is_16_bit)
    host = hardware.detect().for_target(target)
    machine = replace(host, forced=frozenset(sixteen))
    lists, _ = edit_lists(model.adaptor, amp, sixteen)
    space = apply_force_all(model.adaptor.space(model.held, machine, lists), amp)
    parsed, observations = load_plan_file(plan) if isinstance(plan, str | Path) else (plan, None)
    if observations is not None:
        space = without_non_finite(space, observations.non_finite)
    ops = [space.graph[name] for name in space.match_ops(op, "the op argument")]
    node = next((op for op in ops if op in space.contractions), ops[0])
    explanations = {p: _explain_precision(space, node.name, p, parsed) for p in precisions}
    return node, {
        p: _adapt_to_hardware(host, p, explanation) for p, explanation in explanations.items()
    }


def describe_run_evidence(record: RunRecord, op: str) -> str:
    """Return what a run measured of an op that its plan keeps in float; empty without figures.

    These are the time that a lower precision of the op saves, the noise at the outputs, and the
    latest trial with the op in integers.
    """
    evidence = []
    rows = [row for row in sensitivity_report(record).rows if op in row.ops]
    for row in rows[:1]:
        if row.seconds_gained is not None:
            saved = format_seconds(row.seconds_gained)
            evidence.append(f"a lower precision saves {saved} per run of the timed batch")
        if row.output_noise is not None:
            evidence.append(f"its noise at the outputs is {row.output_noise:.2g} (NSR)")
    lowered = [t for t in record.trials if op in t.plan and t.plan[op].precision.is_integer]
    for trial in lowered[-1:]:
        loss = "" if trial.loss is None else f", loss {format_number(trial.loss)}"
        evidence.append(
            f"trial {trial.number + 1} with the op in {trial.plan[op].precision}: "
            f"{trial.outcome}{loss}"
        )
    return "; ".join(evidence)


def _adapt_to_hardware(
    machine: hardware.Hardware, precision: Precision, explanation: Explanation
) -> Explanation:
    support = machine.support(precision)
    if support.available or explanation.runs_in is not precision:
        return explanation
    reason = f"{support.reason}; on hardware with {precision}: {explanation.reason}"
    return replace(explanation, runs_in=Precision.FP32, reason=reason)


def _explain_precision(
    space: TuningSpace, op: str, precision: Precision, plan: PrecisionPlan | None
) -> Explanation:
    narrowed = space.restricted_to([precision]) if plan is None else space
    resolved = narrowed.resolve(plan or narrowed.fastest_plan())
    if precision.is_16_bit:
        paint = narrowed.painting(resolved, precision).paints[op]
        why = paint.reason if plan is not None else paint.reason.replace(BY_PLAN, _WITHOUT_PLAN)
        runs_in = precision if paint.colour is Colour.ALLOWED else Precision.FP32
        return Explanation(paint.list, runs_in, why)
    reason = explain_int8_choice(space.graph, space.capabilities, resolved.plan, resolved.flow, op)
    if plan is None:
        reason = reason.replace(BY_PLAN, _WITHOUT_PLAN)
    return Explanation(None, resolved.effective[op], reason)
