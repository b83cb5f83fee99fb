"""Audit of a model: planned and executed precision of each op."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from neural_mp.adaptors.loaded_model import AnyModel
from neural_mp.core import hardware
from neural_mp.core.enums import Approach
from neural_mp.core.op_timings import OpTrace
from neural_mp.core.precision import Precision
from neural_mp.space import EffectiveOp
from neural_mp.util.string_enum import StringEnum
from neural_mp.util.text import Printed


class Verdict(StringEnum):
    """Audit result of one op.

    The first three agree with the plan; the next four differ without numerical effect; the last
    three contradict the plan.
    """

    AS_PLANNED = "as planned"
    #: 16-bit precision without native kernels: FP32 on rounded values.
    EMULATED = "emulated"
    #: No kernel of its own: fused into another kernel, or not needed by the runtime.
    FUSED = "within another kernel"
    #: Planned as fused into an INT8 kernel with float output, but executed after it.
    UNFUSED = "ran unfused"
    #: Quantize-agnostic, planned above INT8, but moved INT8 data.
    PASSED_INT8 = "passed int8 through"
    #: Planned in FP32 between quantized tensors, but in an integer kernel with equal results.
    EQUAL_INT8 = "ran in int8, equal"
    #: Not executed on these inputs, e.g. in a branch not taken.
    NOT_REACHED = "not reached"
    LOWER = "ran lower than planned"
    HIGHER = "ran higher than planned"
    #: Planned with its own INT8 kernel, but no kernel ran.
    NO_KERNEL = "no kernel ran"


#: Verdicts that contradict the plan.
BROKEN = (Verdict.HIGHER, Verdict.NO_KERNEL, Verdict.LOWER)
#: Verdicts that differ from the plan, worst first.
_FOUND = (*BROKEN, Verdict.UNFUSED, Verdict.PASSED_INT8, Verdict.EQUAL_INT8, Verdict.NOT_REACHED)


@dataclass(frozen=True)
class AuditedOp:
    """Audited op of a model.

    Attributes:
        planned: effective configuration by the plan.
        ran: executed kernels; None if the op ran no kernel of its own.
    """

    name: str
    planned: EffectiveOp
    ran: OpTrace | None
    verdict: Verdict

    @property
    def ran_in(self) -> Precision | None:
        """Executed precision; None if no kernel ran or the kernels have no precision."""
        return self.ran.effective_precision if self.ran is not None else None

    @property
    def kernels(self) -> tuple[str, ...]:
        """Names of the executed kernels in the runtime, without repetition."""
        return tuple(dict.fromkeys(self.ran.kernels)) if self.ran is not None else ()

    def to_dict(self) -> dict[str, Any]:
        """Return a JSON-serializable dict."""
        return {
            "name": self.name,
            "type": self.planned.type,
            "planned": self.planned.precision.value,
            "approach": self.planned.approach and self.planned.approach.value,
            "ran_in": self.ran_in and self.ran_in.value,
            "kernels": list(self.kernels),
            "verdict": self.verdict.value,
        }


@dataclass(frozen=True)
class Audit(Printed):
    """Comparison of the executed precisions with the plan.

    Attributes:
        ops: all planned ops, in the graph's order.
        complete: whether these are all ops of the model; folders saved by earlier versions list
            only the ops named in the plan.
        row_scaled_types: types of ops whose dynamic INT8 has a scale for each row of the inputs.
    """

    ops: tuple[AuditedOp, ...]
    complete: bool = True
    row_scaled_types: frozenset[str] = frozenset()

    @property
    def input_scales(self) -> dict[str, str]:
        """Return op in dynamic INT8 → `row` or `tensor`, what its input scales are of."""
        return {
            op.name: "row" if op.planned.type in self.row_scaled_types else "tensor"
            for op in self.ops
            if op.planned.approach is Approach.DYNAMIC
        }

    @property
    def holds(self) -> bool:
        """Whether no op computed above or below its planned precision.

        16-bit precisions may be emulated, quantize-agnostic ops may move quantized tensors, and a
        runtime may compute ops between quantized tensors in integers with equal results.
        """
        return not any(op.verdict in BROKEN for op in self.ops)

    @property
    def findings(self) -> tuple[AuditedOp, ...]:
        """Ops that differ from the plan, contradictions first."""
        differing = [op for op in self.ops if op.verdict in _FOUND]
        return tuple(sorted(differing, key=lambda op: _FOUND.index(op.verdict)))

    @property
    def lowered(self) -> int:
        """Number of ops planned in INT8, BF16 or FP16."""
        return sum(op.planned.precision is not Precision.FP32 for op in self.ops)

    def counts(self) -> dict[Verdict, int]:
        """Return verdict → number of ops, for ops below FP32 and ops that differ from the plan."""
        verdicts = [
            op.verdict
            for op in self.ops
            if op.planned.precision is not Precision.FP32 or op.verdict in _FOUND
        ]
        return {verdict: verdicts.count(verdict) for verdict in Verdict if verdict in verdicts}


def audit_model(
    model: AnyModel, planned: Mapping[str, EffectiveOp], complete: bool = True
) -> Audit:
    """Run a model once on its example inputs and compare with the plan.

    Raises:
        ConversionError: the framework does not report the executed kernels.
    """
    ran = model.adaptor.trace_kernels(model.held, model.example_inputs())
    machine = replace(hardware.detect(), stored=model.adaptor.stored_precisions)
    audit = audit_ops(planned, ran, lambda precision: machine.support(precision).native, complete)
    return replace(audit, row_scaled_types=model.adaptor.row_scaled_types)


def audit_ops(
    planned: Mapping[str, EffectiveOp],
    ran: Mapping[str, OpTrace],
    is_native: Callable[[Precision], bool],
    complete: bool = True,
) -> Audit:
    """Return the audit of planned and executed kernels; `is_native` is for 16-bit precisions."""
    return Audit(
        tuple(
            AuditedOp(name, op, ran.get(name), _judge_op(op, ran.get(name), is_native))
            for name, op in planned.items()
        ),
        complete,
    )


def _judge_op(
    op: EffectiveOp, ran: OpTrace | None, is_native: Callable[[Precision], bool]
) -> Verdict:
    if ran is None:
        return Verdict.NO_KERNEL if op.approach is not None else Verdict.FUSED
    if not ran.was_executed:
        return Verdict.AS_PLANNED if op.precision is Precision.FP32 else Verdict.NOT_REACHED
    if op.precision.is_integer:
        if _ran_in_int8(op, ran):
            return Verdict.AS_PLANNED
        return Verdict.UNFUSED if op.may_run_unfused else Verdict.HIGHER
    if op.moves_data and ran.precision is None and ran.reads_int8:
        return Verdict.PASSED_INT8
    if op.precision is Precision.FP32:
        above = ran.precision in (Precision.FP32, None, op.source)
        # Integer ops of the original model, outside any plan, have kernels named like their type.
        own = set(ran.kernels) == {op.type}
        if above or own:
            return Verdict.AS_PLANNED
        return Verdict.EQUAL_INT8 if ran.equals_float else Verdict.LOWER
    return _judge_16_bits(op.precision, ran, is_native)


def _ran_in_int8(op: EffectiveOp, ran: OpTrace) -> bool:
    """Whether an op ran in INT8, or with a weight of integers, as planned."""
    if op.approach is Approach.WEIGHT_ONLY:
        return ran.reads_int8
    if op.approach is not None:
        return ran.precision is Precision.INT8
    # Fused and quantize-agnostic ops contain no INT8 products.
    return ran.effective_precision is Precision.INT8


def _judge_16_bits(
    planned: Precision, ran: OpTrace, is_native: Callable[[Precision], bool]
) -> Verdict:
    if ran.precision is Precision.INT8:
        return Verdict.LOWER
    if ran.precision in (planned, None):
        return Verdict.AS_PLANNED if is_native(planned) else Verdict.EMULATED
    return Verdict.EMULATED if ran.rounded_to is planned else Verdict.HIGHER
