"""What a plan comes down to: checked, filled in, and followed through the graph, once."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from neural_mp.amp import FourLists, Painting
from neural_mp.core.plan import PrecisionPlan
from neural_mp.core.precision import FP32, OpConfig, Precision
from neural_mp.core.quantization_flow import QuantizationFlow, trace_quantization
from neural_mp.core.words import Approach
from neural_mp.errors import PlanError, UnknownOperatorError, did_you_mean
from neural_mp.space.plan_painting import explain_plan, paint_plan

if TYPE_CHECKING:
    from neural_mp.space.space import TuningSpace


@dataclass(frozen=True)
class ResolvedPlan:
    """A plan that says all there is to say, with the flow of INT8 and 16 bits that follows.

    `TuningSpace.resolve` makes it. Two resolved plans are equal when their plans are.

    Attributes:
        plan: every decided op with its config; with ops in 16 bits, also those that follow them,
            and those that could follow and do not, so that the plan means the same under other
            lists.
        flow: what every op effectively runs in, and where INT8 flows.
    """

    plan: PrecisionPlan
    flow: QuantizationFlow = field(compare=False, repr=False)

    @property
    def effective(self) -> Mapping[str, Precision]:
        """Op → what it effectively runs in."""
        return self.flow.effective

    @property
    def lowers(self) -> bool:
        """Whether any op runs in a lower precision; if not, the model stays as it was."""
        return any(precision is not Precision.FP32 for precision in self.effective.values())


def resolved(space: TuningSpace, plan: PrecisionPlan) -> ResolvedPlan:
    """A plan, checked and filled in for a space, with its flow.

    Raises:
        UnknownOperatorError: the plan names an op the model does not have.
        PlanError: it asks for a precision that an op cannot run in here.
    """
    checked = _checked(space, plan)
    said = ResolvedPlan(checked, _followed(space, checked))
    meant = checked if said.lowers else PrecisionPlan()  # nothing comes of what it says
    return replace(said, plan=_filled_in(space, meant, said.effective))


def _filled_in(
    space: TuningSpace, checked: PrecisionPlan, effective: Mapping[str, Precision]
) -> PrecisionPlan:
    """A plan that also says what follows from it."""
    named = {*space.decided, *(op.name for op in space.graph if space.is_product(op))}
    sixteen = _occurring_16_bits(effective)
    configs = {}
    for op in space.graph:
        precision = effective[op.name]
        said = checked.get(op.name)
        if said is not None and (said.precision is precision or not sixteen):
            configs[op.name] = said
        elif precision.is_16_bit:
            configs[op.name] = OpConfig(precision)
        elif precision is Precision.FP32 and (
            op.name in named
            or any(space.capabilities[op.name].config(p) is not None for p in sixteen)
        ):
            configs[op.name] = FP32
    return PrecisionPlan(configs)


def _checked(space: TuningSpace, plan: PrecisionPlan) -> PrecisionPlan:
    """The plan, with what it says in shorthand written out."""
    configs: dict[str, OpConfig] = {}
    for name, config in plan.items():
        if name not in space.graph:
            names = [op.name for op in space.graph]
            raise UnknownOperatorError(
                f"the plan names {name!r}, which the model does not have{did_you_mean(name, names)}"
            )
        configs[name] = _written_out(space, name, config)
    return PrecisionPlan(configs)


def _written_out(space: TuningSpace, name: str, config: OpConfig) -> OpConfig:
    capability = space.capabilities[name]
    if capability.takes(config):
        return config
    best = capability.config(config.precision)
    op = space.graph[name]
    if best is None:
        if config.precision is Precision.INT8 and (op.fusion_group or op.quantize_agnostic):
            return config  # runs along with the INT8 ops around it
        reason = capability.reasons.get(config.precision, "your constraints exclude it")
        raise PlanError(
            f"op {name!r} ({op.type}) cannot run in {config.precision} here: {reason}; "
            f"it can run in {', '.join(map(str, capability.precisions))}"
        )
    if config.precision is not Precision.INT8:
        return OpConfig(config.precision)
    if config.weight is None and config.activation is None:
        return replace(best, repairs=config.repairs)
    filled = replace(config, weight=config.weight or best.weight)
    if not capability.takes(filled):
        raise PlanError(
            f"op {name!r} ({op.type}) has no INT8 form with {_words(filled)}; "
            f"the nearest is {_words(best)}"
        )
    return filled


def _words(config: OpConfig) -> str:
    words = f"weight '{config.weight}'"
    return f"{words}, activation '{config.activation}'" if config.activation else f"{words} only"


def _followed(space: TuningSpace, plan: PrecisionPlan) -> QuantizationFlow:
    """INT8 is decided first; then ops that the plan leaves open follow its 16-bit ops."""
    alone = frozenset(op for op, item in plan.items() if item.approach in _QUANTIZED_INSIDE)
    flow = trace_quantization(space.graph, plan.precisions, alone)
    for precision in _occurring_16_bits(flow.effective):
        painting = paint_plan(
            space.graph,
            space.lists.get(precision, FourLists()),
            precision,
            plan.precisions,
            flow.effective,
            _obstacles(space, precision),
        )
        followers = dict.fromkeys(painting.allowed, precision)
        flow = replace(flow, effective={**flow.effective, **followers})
    return flow


#: The ways of INT8 in which an op reads and writes real numbers.
_QUANTIZED_INSIDE = (Approach.DYNAMIC, Approach.WEIGHT_ONLY)


def painting_of(space: TuningSpace, plan: ResolvedPlan, precision: Precision) -> Painting:
    """Why every op runs in a 16-bit precision, or does not, under a plan."""
    return explain_plan(
        space.graph,
        space.lists.get(precision, FourLists()),
        precision,
        plan.effective,
        _obstacles(space, precision),
    )


def _occurring_16_bits(effective: Mapping[str, Precision]) -> list[Precision]:
    found = set(effective.values())
    return [precision for precision in Precision if precision.is_16_bit and precision in found]


def _obstacles(space: TuningSpace, precision: Precision) -> dict[str, str]:
    """Op → why it cannot run in a precision."""
    return {
        name: item.reasons.get(precision, "your constraints exclude it")
        for name, item in space.capabilities.items()
        if item.config(precision) is None
    }
