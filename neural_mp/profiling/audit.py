"""Whether a model runs as its plan says: what every op was to run in, beside what ran."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from neural_mp.adaptors.common.optional import needed
from neural_mp.adaptors.loaded_model import AnyModel
from neural_mp.core import hardware
from neural_mp.core.enums import Approach
from neural_mp.core.kernel_trace import OpTrace
from neural_mp.core.precision import Precision
from neural_mp.space import EffectiveOp
from neural_mp.util.string_enum import StringEnum


class Verdict(StringEnum):
    """What an audit says of one op.

    The first three are well; the next three differ in no number that the model computes. The last
    three contradict the plan.
    """

    AS_PLANNED = "as planned"
    #: 16 bits on a machine, or in a runtime, without such kernels: FP32, on rounded numbers.
    EMULATED = "emulated"
    #: Nothing ran by itself: the kernel of another op ran it along, or the runtime needed none.
    ALONG = "within another kernel"
    #: It was to run along in an INT8 kernel that hands on real numbers, and ran behind it.
    BEHIND = "ran behind its kernel"
    #: It only moves values, was planned above INT8, and moved them as integers.
    PASSED_ON = "passed int8 on"
    #: The model did not come to it on these inputs, as to a branch that is not taken.
    NOT_REACHED = "not reached"
    LOWER = "ran lower than planned"
    HIGHER = "ran higher than planned"
    #: An op that has an INT8 kernel of its own by the plan, and of which nothing ran.
    UNSEEN = "nothing of it ran"


#: Verdicts by which a plan is not true.
BROKEN = (Verdict.HIGHER, Verdict.UNSEEN, Verdict.LOWER)
#: Verdicts that say that something ran otherwise, the worst first.
_FOUND = (*BROKEN, Verdict.BEHIND, Verdict.PASSED_ON, Verdict.NOT_REACHED)


@dataclass(frozen=True)
class AuditedOp:
    """One op of an audited model.

    Attributes:
        name: its name.
        planned: what the plan comes down to for it.
        ran: what ran for it; None where nothing ran by itself.
        verdict: how the two compare.
    """

    name: str
    planned: EffectiveOp
    ran: OpTrace | None
    verdict: Verdict

    @property
    def ran_in(self) -> Precision | None:
        """What it ran in; None where nothing ran, or nothing that has a precision."""
        return self.ran.effective_precision if self.ran is not None else None

    @property
    def kernels(self) -> tuple[str, ...]:
        """What the runtime calls the kernels that ran for it, each once."""
        return tuple(dict.fromkeys(self.ran.kernels)) if self.ran is not None else ()

    def to_dict(self) -> dict[str, Any]:
        """Plain words."""
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
class Audit:
    """What a model ran in, beside what its plan says.

    Attributes:
        ops: every op that the plan says something of, in the graph's order.
        complete: whether that is every op of the model; of folders that earlier versions saved,
            only the ops that the plan names are known.
    """

    ops: tuple[AuditedOp, ...]
    complete: bool = True

    @property
    def holds(self) -> bool:
        """Whether no finding contradicts the plan: nothing computed above or below its precision.

        16 bits may be emulated; and what only moves values may move them stored.
        """
        return not any(op.verdict in BROKEN for op in self.ops)

    @property
    def findings(self) -> tuple[AuditedOp, ...]:
        """The ops that ran otherwise than planned: those that break the promise first."""
        found = [op for op in self.ops if op.verdict in _FOUND]
        return tuple(sorted(found, key=lambda op: _FOUND.index(op.verdict)))

    @property
    def lowered(self) -> int:
        """How many ops the plan has in INT8, BF16 or FP16."""
        return sum(op.planned.precision is not Precision.FP32 for op in self.ops)

    def counts(self) -> dict[Verdict, int]:
        """Verdict → how many ops it is of: those that the plan lowers, and those that differ."""
        found = [
            op.verdict
            for op in self.ops
            if op.planned.precision is not Precision.FP32 or op.verdict in _FOUND
        ]
        return {verdict: found.count(verdict) for verdict in Verdict if verdict in found}


def audited(model: AnyModel, planned: Mapping[str, EffectiveOp], complete: bool = True) -> Audit:
    """A model, run once on the inputs it was captured with, beside what was planned.

    Args:
        model: the model as it was converted.
        planned: op → what the plan comes down to for it.
        complete: as in `Audit`.

    Raises:
        ConversionError: the framework does not say which kernels ran.
    """
    adaptor = model.adaptor
    offered = needed(adaptor.kernel_trace, adaptor.framework, "account of the kernels that ran")
    ran = offered.trace(model.held, model.example_inputs())
    here = hardware.detect()
    return judged(planned, ran, lambda precision: here.support(precision).native, complete)


def judged(
    planned: Mapping[str, EffectiveOp],
    ran: Mapping[str, OpTrace],
    is_native: Callable[[Precision], bool],
    complete: bool = True,
) -> Audit:
    """An audit, from what was planned and what ran.

    Args:
        planned: op → what the plan comes down to for it.
        ran: op → what ran for it in a run.
        is_native: whether this machine computes in a 16-bit precision by itself.
        complete: as in `Audit`.
    """
    return Audit(
        tuple(
            AuditedOp(name, op, ran.get(name), _verdict(op, ran.get(name), is_native))
            for name, op in planned.items()
        ),
        complete,
    )


def _verdict(
    op: EffectiveOp, ran: OpTrace | None, is_native: Callable[[Precision], bool]
) -> Verdict:
    if ran is None:
        return Verdict.UNSEEN if op.approach is not None else Verdict.ALONG
    if not ran.executed:
        return Verdict.AS_PLANNED if op.precision is Precision.FP32 else Verdict.NOT_REACHED
    if op.precision is Precision.INT8:
        if _in_int8(op, ran):
            return Verdict.AS_PLANNED
        return Verdict.BEHIND if op.may_run_unfused else Verdict.HIGHER
    if op.moves_data and ran.precision is None and ran.reads_int8:
        return Verdict.PASSED_ON
    if op.precision is Precision.FP32:
        above = ran.precision in (Precision.FP32, None, op.source)
        # A model's own integer ops, which no plan touches, are run by kernels of their own name.
        own = set(ran.kernels) == {op.type}
        return Verdict.AS_PLANNED if above or own else Verdict.LOWER
    return _of_16_bits(op.precision, ran, is_native)


def _in_int8(op: EffectiveOp, ran: OpTrace) -> bool:
    """Whether an op ran in INT8 in the way that it was to."""
    if op.approach is Approach.WEIGHT_ONLY:
        return ran.reads_int8
    if op.approach is not None:
        return ran.precision is Precision.INT8
    # What runs along, or moves stored numbers, multiplies nothing.
    return ran.effective_precision is Precision.INT8


def _of_16_bits(
    planned: Precision, ran: OpTrace, is_native: Callable[[Precision], bool]
) -> Verdict:
    if ran.precision is Precision.INT8:
        return Verdict.LOWER
    if ran.precision in (planned, None):
        return Verdict.AS_PLANNED if is_native(planned) else Verdict.EMULATED
    return Verdict.EMULATED if ran.rounded_to is planned else Verdict.HIGHER
