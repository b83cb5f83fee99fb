"""What a plan comes down to: checked, filled in, and followed through the graph, once."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from neural_mp.amp import AmpList, FourLists, Painting, paint
from neural_mp.core.enums import Approach
from neural_mp.core.graph import Op, OpGraph
from neural_mp.core.plan import PrecisionPlan
from neural_mp.core.precision import FP32, OpConfig, Precision
from neural_mp.core.quantization_flow import QuantizationFlow, propagate_quantization
from neural_mp.errors import PlanError, UnknownOperatorError, did_you_mean
from neural_mp.space.capability import Capability

#: Why an op is in 16 bits, or is not, where that does not follow from the lists.
BY_PLAN = "the plan says so"


def paint_plan(
    graph: OpGraph,
    lists: FourLists,
    precision: Precision,
    named: Mapping[str, Precision],
    effective: Mapping[str, Precision],
    obstacles: Mapping[str, str],
) -> Painting:
    """Paint a graph in one 16-bit precision, from the ops that a plan has in it.

    Args:
        graph: the model.
        lists: the lists of the precision.
        precision: BF16 or FP16.
        named: op → what the plan says of it; what it has in INT8, and is not, is left open.
        effective: op → what it runs in, as far as that is settled: INT8 and the other 16-bit
            precision are boundaries.
        obstacles: op → why it cannot run in the precision.
    """
    chosen, unable = {}, dict(obstacles)
    for op in graph:
        says, begins = named.get(op.name), lists.of(op.type) is AmpList.ALLOW
        if says is Precision.INT8:
            continue  # in effect, and so a boundary; or not, and then for the lists to decide
        if says is precision and not begins:
            chosen[op.name] = BY_PLAN
        elif says is Precision.FP32 or (begins and says is not precision):
            unable.setdefault(op.name, BY_PLAN)
    boundaries = _boundaries(effective, precision)
    return paint(graph, lists, boundaries=boundaries, unable=unable, chosen=chosen)


def explain_plan(
    graph: OpGraph,
    lists: FourLists,
    precision: Precision,
    effective: Mapping[str, Precision],
    obstacles: Mapping[str, str],
) -> Painting:
    """The painting that gives just these precisions, with a reason for every op.

    The lists explain as much as they can; only where they would decide otherwise is an op said to
    be as it is because the plan says so.
    """
    wanted = {op for op, p in effective.items() if p is precision}
    unable, chosen = dict(obstacles), dict[str, str]()
    for op in graph:
        if lists.of(op.type) is AmpList.ALLOW and op.name not in wanted:
            unable.setdefault(op.name, BY_PLAN)
    boundaries = _boundaries(effective, precision)
    while True:
        painting = paint(graph, lists, boundaries=boundaries, unable=unable, chosen=chosen)
        missing, extra = wanted - painting.allowed, painting.allowed - wanted
        if not missing and not extra:
            return painting
        chosen.update(dict.fromkeys(missing, BY_PLAN))
        unable.update(dict.fromkeys(extra, BY_PLAN))


def _boundaries(effective: Mapping[str, Precision], precision: Precision) -> dict[str, str]:
    settled = (Precision.INT8, *(p for p in Precision if p.is_16_bit and p is not precision))
    return {op: f"it runs in {p}" for op, p in effective.items() if p in settled}


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
    def has_low_precision(self) -> bool:
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
        meant = (
            checked if said.has_low_precision else PrecisionPlan()
        )  # nothing comes of what it says
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
        flow = propagate_quantization(self.graph, plan.precisions, alone)
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
        found = {name: item.refusal(precision) for name, item in self.capabilities.items()}
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
            f"{capability.refusal(config.precision)}; "
            f"it can run in {', '.join(map(str, capability.precisions))}"
        )
    if config.precision is not Precision.INT8:
        return OpConfig(config.precision)
    if config.weight is None and config.activation is None:
        return replace(best, corrections=config.corrections)
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
