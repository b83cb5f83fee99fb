"""Effective precision of every op under a plan, in a form that a saved model can store."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from neural_mp.core.enums import Approach
from neural_mp.core.plan import PrecisionPlan
from neural_mp.core.precision import Precision
from neural_mp.space.resolution import ResolvedPlan
from neural_mp.space.space import TuningSpace
from neural_mp.util.json_fields import JsonFields


@dataclass(frozen=True)
class EffectiveOp(JsonFields):
    """The effective configuration of one op under a plan.

    Attributes:
        type: the framework's op type; empty if unknown.
        precision: the effective precision.
        approach: the approach to quantization, if the op has its own kernel with integers.
        fused_into: the op whose INT8 kernel also runs this op, if any.
        may_run_unfused: whether that kernel returns floats, so that running the op after the kernel
            changes no result.
        moves_data: whether the op only moves or selects values (see `Op.quantize_agnostic`).
        source: precision of the op in the given model (see `Op.source_precision`).
    """

    omits_defaults: ClassVar[bool] = True

    type: str
    precision: Precision
    approach: Approach | None = None
    fused_into: str | None = None
    may_run_unfused: bool = False
    moves_data: bool = False
    source: Precision = Precision.FP32

    @property
    def words(self) -> str:
        """The effective configuration as text."""
        if self.approach in (None, Approach.STATIC):
            return str(self.precision)
        return f"{self.precision} ({str(self.approach).replace('_', ' ')})"


def planned_ops(space: TuningSpace, plan: ResolvedPlan) -> dict[str, EffectiveOp]:
    """Return op → its effective configuration under a plan, in the graph's order."""
    result = {}
    writing_int8 = {space.graph[op].fusion_group or op for op in plan.flow.int8_outputs}
    for op in space.graph:
        precision = plan.effective[op.name]
        has_kernel = precision.is_integer and not op.quantize_agnostic
        head = op.fusion_group if has_kernel else None
        own = plan.plan.get(op.name) if has_kernel and head is None else None
        result[op.name] = EffectiveOp(
            op.type,
            precision,
            approach=None if own is None else own.approach,
            fused_into=head,
            may_run_unfused=head is not None and head not in writing_int8,
            moves_data=op.quantize_agnostic,
            source=op.source_precision,
        )
    return result


def planned_by_name(plan: PrecisionPlan) -> dict[str, EffectiveOp]:
    """Return op → its effective configuration, from a plan without a model: named ops only."""
    return {op: EffectiveOp("", c.precision, c.approach) for op, c in plan.items()}
