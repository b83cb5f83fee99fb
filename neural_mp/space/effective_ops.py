"""What follows from a plan for every op: small enough to be kept with a saved model."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from neural_mp.core.enums import Approach
from neural_mp.core.plan import PrecisionPlan
from neural_mp.core.precision import Precision
from neural_mp.space.resolution import ResolvedPlan
from neural_mp.space.space import TuningSpace
from neural_mp.util.validators import boolean, enum_of, record, string


@dataclass(frozen=True)
class EffectiveOp:
    """What a plan comes down to for one op.

    Attributes:
        type: the framework's word for what it does; empty where that is not known.
        precision: what it effectively runs in.
        approach: how ranges are found, where it has an INT8 kernel of its own.
        fused_into: the op whose INT8 kernel runs the op, if another op's kernel does.
        may_run_unfused: whether that kernel returns floats, so that running the op behind the
            kernel changes no result.
        moves_data: whether it only moves or selects values (see `Op.quantize_agnostic`).
        source: precision of the op in the model as given (see `Op.source_precision`).
    """

    type: str
    precision: Precision
    approach: Approach | None = None
    fused_into: str | None = None
    may_run_unfused: bool = False
    moves_data: bool = False
    source: Precision = Precision.FP32

    @property
    def words(self) -> str:
        """What the plan says of it, in words."""
        if self.approach in (None, Approach.STATIC):
            return str(self.precision)
        return f"{self.precision} ({str(self.approach).replace('_', ' ')})"

    def to_dict(self) -> dict[str, Any]:
        """Plain words, of what is not as usual."""
        found = {"type": self.type, "precision": self.precision.value}
        if self.approach is not None:
            found["approach"] = self.approach.value
        if self.fused_into is not None:
            found["fused_into"] = self.fused_into
        flags = {name: True for name in ("may_run_unfused", "moves_data") if getattr(self, name)}
        if self.source is not Precision.FP32:
            found["source"] = self.source.value
        return {**found, **flags}

    @classmethod
    def from_dict(cls, data: object) -> EffectiveOp:
        """Read back what `to_dict` wrote.

        Raises:
            NeuralMPError: it was not written so.
        """
        return cls(**_PLANNED(data))


_PLANNED = record(
    {"type": string, "precision": enum_of(Precision)},
    {
        "approach": enum_of(Approach),
        "fused_into": string,
        "may_run_unfused": boolean,
        "moves_data": boolean,
        "source": enum_of(Precision),
    },
)


def planned_ops(space: TuningSpace, plan: ResolvedPlan) -> dict[str, EffectiveOp]:
    """Op → what a plan comes down to for it, in the graph's order."""
    found = {}
    storing = {space.graph[op].fusion_group or op for op in plan.flow.int8_outputs}
    for op in space.graph:
        precision, approach, along = plan.effective[op.name], None, None
        if precision is Precision.INT8 and not op.quantize_agnostic:
            if op.fusion_group is not None:
                along = op.fusion_group
            elif op.name in plan.plan:
                approach = plan.plan[op.name].approach
        or_behind = along is not None and along not in storing
        found[op.name] = EffectiveOp(
            op.type,
            precision,
            approach,
            along,
            or_behind,
            op.quantize_agnostic,
            op.source_precision,
        )
    return found


def planned_by_name(plan: PrecisionPlan) -> dict[str, EffectiveOp]:
    """The same of a plan alone, without its model: only of the ops that it names."""
    return {op: EffectiveOp("", said.precision, said.approach) for op, said in plan.items()}
