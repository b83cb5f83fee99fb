"""What a plan comes down to: checked, filled in, and followed through the graph, once."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from neural_mp.amp import FourLists, Painting
from neural_mp.core.enums import Approach
from neural_mp.core.graph import Op, OpGraph
from neural_mp.core.plan import PrecisionPlan
from neural_mp.core.precision import FP32, OpConfig, Precision
from neural_mp.core.quantization_flow import QuantizationFlow, trace_quantization
from neural_mp.errors import PlanError, UnknownOperatorError, did_you_mean
from neural_mp.space.capability import Capability
from neural_mp.space.plan_painting import explain_plan, paint_plan

#: The ways of INT8 in which an op reads and writes real numbers.
_QUANTIZED_INSIDE = (Approach.DYNAMIC, Approach.WEIGHT_ONLY)


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


@dataclass(frozen=True)
class Resolver:
    """What plans of a model are resolved by.

    Attributes:
        graph: the model.
        capabilities: op → what it can run in.
        lists: 16-bit precision → the four lists by which ops follow those that a plan has in it.
        named: the ops that a resolved plan always names.
    """

    graph: OpGraph
    capabilities: Mapping[str, Capability]
    lists: Mapping[Precision, FourLists]
    named: frozenset[str]

    def resolve(self, plan: PrecisionPlan) -> ResolvedPlan:
        """A plan, checked and filled in, with its flow.

        Raises:
            UnknownOperatorError: the plan names an op the model does not have.
            PlanError: it asks for a precision that an op cannot run in here.
        """
        checked = self._checked(plan)
        said = ResolvedPlan(checked, self._followed(checked))
        meant = checked if said.lowers else PrecisionPlan()  # nothing comes of what it says
        return replace(said, plan=self._filled_in(meant, said.effective))

    def painting(self, plan: ResolvedPlan, precision: Precision) -> Painting:
        """Why every op runs in a 16-bit precision, or does not, under a plan."""
        return explain_plan(
            self.graph,
            self.lists.get(precision, FourLists()),
            precision,
            plan.effective,
            self._obstacles(precision),
        )

    def _filled_in(
        self, checked: PrecisionPlan, effective: Mapping[str, Precision]
    ) -> PrecisionPlan:
        """A plan that also says what follows from it."""
        sixteen = _occurring_16_bits(effective)
        configs = {}
        for op in self.graph:
            precision = effective[op.name]
            said = checked.get(op.name)
            if said is not None and said.precision is precision:
                configs[op.name] = said
            elif precision.is_16_bit:
                configs[op.name] = OpConfig(precision)
            elif precision is Precision.FP32 and (
                op.name in self.named
                or said is not None
                or any(self.capabilities[op.name].config(p) is not None for p in sixteen)
            ):
                configs[op.name] = FP32
        return PrecisionPlan(configs)

    def _checked(self, plan: PrecisionPlan) -> PrecisionPlan:
        """The plan, with what it says in shorthand written out."""
        configs: dict[str, OpConfig] = {}
        for name, config in plan.items():
            if name not in self.graph:
                names = [op.name for op in self.graph]
                raise UnknownOperatorError(
                    f"the plan names {name!r}, which the model does not have"
                    f"{did_you_mean(name, names)}"
                )
            configs[name] = _written_out(self.graph[name], self.capabilities[name], config)
        return PrecisionPlan(configs)

    def _followed(self, plan: PrecisionPlan) -> QuantizationFlow:
        """INT8 is decided first; then ops that the plan leaves open follow its 16-bit ops."""
        alone = frozenset(op for op, item in plan.items() if item.approach in _QUANTIZED_INSIDE)
        flow = trace_quantization(self.graph, plan.precisions, alone)
        for precision in _occurring_16_bits(flow.effective):
            painting = paint_plan(
                self.graph,
                self.lists.get(precision, FourLists()),
                precision,
                plan.precisions,
                flow.effective,
                self._obstacles(precision),
            )
            followers = dict.fromkeys(painting.allowed, precision)
            flow = replace(flow, effective={**flow.effective, **followers})
        return flow

    def _obstacles(self, precision: Precision) -> dict[str, str]:
        """Op → why it cannot run in a precision."""
        found = {name: item.why_not(precision) for name, item in self.capabilities.items()}
        return {name: why for name, why in found.items() if why is not None}


def _written_out(op: Op, capability: Capability, config: OpConfig) -> OpConfig:
    if capability.takes(config):
        return config
    best = capability.config(config.precision)
    if best is None:
        if config.precision is Precision.INT8 and (op.fusion_group or op.quantize_agnostic):
            return config  # runs along with the INT8 ops around it
        raise PlanError(
            f"op {op.name!r} ({op.type}) cannot run in {config.precision} here: "
            f"{capability.why_not(config.precision)}; "
            f"it can run in {', '.join(map(str, capability.precisions))}"
        )
    if config.precision is not Precision.INT8:
        return OpConfig(config.precision)
    if config.weight is None and config.activation is None:
        return replace(best, repairs=config.repairs)
    filled = replace(config, weight=config.weight or best.weight)
    if not capability.takes(filled):
        raise PlanError(
            f"op {op.name!r} ({op.type}) has no INT8 form with {_words(filled)}; "
            f"the nearest is {_words(best)}"
        )
    return filled


def _words(config: OpConfig) -> str:
    words = f"weight '{config.weight}'"
    return f"{words}, activation '{config.activation}'" if config.activation else f"{words} only"


def _occurring_16_bits(effective: Mapping[str, Precision]) -> list[Precision]:
    found = set(effective.values())
    return [precision for precision in Precision if precision.is_16_bit and precision in found]
