"""Resolution of plans: validation, completion and propagation through the graph, once per plan."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from neural_mp.amp import AmpList, FourLists, Painting, paint
from neural_mp.core.graph import Op, OpGraph
from neural_mp.core.plan import PrecisionPlan
from neural_mp.core.precision import FP32, OpConfig, Precision
from neural_mp.core.quantization_flow import QuantizationFlow, propagate_quantization
from neural_mp.errors import PlanError, UnknownOperatorError, did_you_mean
from neural_mp.space.capability import Capability

#: Reason for a decision that does not follow from the lists.
BY_PLAN = "set by the plan"


def paint_plan(
    graph: OpGraph,
    lists: FourLists,
    precision: Precision,
    named: Mapping[str, Precision],
    effective: Mapping[str, Precision],
    obstacles: Mapping[str, str],
) -> Painting:
    """Paint a graph in one 16-bit precision, starting at the ops that a plan puts there.

    Args:
        graph: the model.
        lists: the lists of the precision.
        precision: BF16 or FP16.
        named: op → its precision in the plan; ops in INT8 that cannot run in INT8 are left to the
            lists.
        effective: op → its effective precision, as far as settled: INT8 and the other 16-bit
            precision are boundaries.
        obstacles: op → reason why the op cannot run in the precision.
    """
    chosen, unable = {}, dict(obstacles)
    for op in graph:
        planned, begins = named.get(op.name), lists.of(op.type) is AmpList.ALLOW
        if planned is not None and planned.is_integer:
            continue  # Either a boundary, or left to the lists.
        if planned is precision and not begins:
            chosen[op.name] = BY_PLAN
        elif planned is Precision.FP32 or (begins and planned is not precision):
            unable.setdefault(op.name, BY_PLAN)
    boundaries = _explain_painting_boundaries(effective, precision)
    return paint(graph, lists, boundaries=boundaries, unable=unable, chosen=chosen)


def explain_plan(
    graph: OpGraph,
    lists: FourLists,
    precision: Precision,
    effective: Mapping[str, Precision],
    obstacles: Mapping[str, str],
) -> Painting:
    """Return the painting that reproduces given precisions, with a reason for every op.

    The lists explain as many ops as possible; `BY_PLAN` is the reason only for ops on which the
    lists would decide otherwise.
    """
    requested = {op for op, p in effective.items() if p is precision}
    unable, chosen = dict(obstacles), dict[str, str]()
    for op in graph:
        if lists.of(op.type) is AmpList.ALLOW and op.name not in requested:
            unable.setdefault(op.name, BY_PLAN)
    boundaries = _explain_painting_boundaries(effective, precision)
    while True:
        painting = paint(graph, lists, boundaries=boundaries, unable=unable, chosen=chosen)
        missing, extra = requested - painting.allowed, painting.allowed - requested
        if not missing and not extra:
            return painting
        chosen.update(dict.fromkeys(missing, BY_PLAN))
        unable.update(dict.fromkeys(extra, BY_PLAN))


def _explain_painting_boundaries(
    effective: Mapping[str, Precision], precision: Precision
) -> dict[str, str]:
    open_ = (precision, Precision.FP32)
    return {op: f"runs in {p}" for op, p in effective.items() if p not in open_}


@dataclass(frozen=True)
class ResolvedPlan:
    """A complete plan with its propagation of INT8 and 16 bits through the graph.

    `TuningSpace.resolve` creates instances. Two resolved plans are equal if their plans are equal.

    Attributes:
        plan: the config of every tunable op. If ops run in 16 bits, also of the ops that follow
            them, and of those that could follow and do not, so that the plan keeps its meaning
            under other lists.
        flow: the effective precision of every op, and the quantized tensors.
    """

    plan: PrecisionPlan
    flow: QuantizationFlow = field(compare=False, repr=False)

    @property
    def effective(self) -> Mapping[str, Precision]:
        """Op → its effective precision."""
        return self.flow.effective

    @property
    def has_low_precision(self) -> bool:
        """Whether any op runs in a lower precision."""
        return any(precision is not Precision.FP32 for precision in self.effective.values())

    @property
    def changes_model(self) -> bool:
        """Whether any op runs in a lower precision, or in another kernel than the framework's."""
        return self.has_low_precision or any(config.kernel for config in self.plan.values())


@dataclass(frozen=True)
class Resolver:
    """Resolves the plans of a model.

    Attributes:
        capabilities: op → its supported configurations.
        lists: 16-bit precision → the four lists that extend a plan's 16-bit ops to other ops.
        named: the ops that a resolved plan always names.
    """

    graph: OpGraph
    capabilities: Mapping[str, Capability]
    lists: Mapping[Precision, FourLists]
    named: frozenset[str]

    def resolve_plan(self, plan: PrecisionPlan) -> ResolvedPlan:
        """Return a plan validated and completed, with its flow.

        Raises:
            UnknownOperatorError: the plan names an op that the model does not have.
            PlanError: the plan requests a precision that an op does not support here.
        """
        checked = self._expand_plan(plan)
        resolved = ResolvedPlan(checked, self._propagate_precisions(checked))
        if not resolved.has_low_precision:
            # Only FP32 kernels have an effect.
            checked = PrecisionPlan({op: c for op, c in checked.items() if c.kernel})
        return replace(resolved, plan=self._name_implied_ops(checked, resolved.effective))

    def paint_plan(self, plan: ResolvedPlan, precision: Precision) -> Painting:
        """Return the reason for each op's 16-bit precision, or lack of one, under a plan."""
        return explain_plan(
            self.graph,
            self.lists.get(precision, FourLists()),
            precision,
            plan.effective,
            self._refusals_by_op(precision),
        )

    def _name_implied_ops(
        self, checked: PrecisionPlan, effective: Mapping[str, Precision]
    ) -> PrecisionPlan:
        sixteen = _occurring_16_bits(effective)
        configs = {}
        for op in self.graph:
            precision = effective[op.name]
            planned = checked.get(op.name)
            if planned is not None and planned.precision is precision:
                configs[op.name] = planned
            elif precision.is_16_bit:
                configs[op.name] = OpConfig(precision)
            elif precision is Precision.FP32 and (
                op.name in self.named
                or planned is not None
                or any(self.capabilities[op.name].config(p) is not None for p in sixteen)
            ):
                configs[op.name] = FP32
        return PrecisionPlan(configs, self.graph.source_precisions)

    def _expand_plan(self, plan: PrecisionPlan) -> PrecisionPlan:
        """Return the plan with abbreviated configs written out."""
        configs: dict[str, OpConfig] = {}
        for name, config in plan.items():
            if name not in self.graph:
                names = [op.name for op in self.graph]
                raise UnknownOperatorError(
                    f"the plan names op {name!r}, which does not exist in the model"
                    f"{did_you_mean(name, names)}"
                )
            configs[name] = _write_out_config(self.graph[name], self.capabilities[name], config)
        return PrecisionPlan(configs)

    def _propagate_precisions(self, plan: PrecisionPlan) -> QuantizationFlow:
        """Propagate INT8 first; ops that the plan leaves open then follow the plan's 16-bit ops."""
        flow = propagate_quantization(self.graph, plan.precisions, plan.internally_quantized)
        for precision in _occurring_16_bits(flow.effective):
            painting = paint_plan(
                self.graph,
                self.lists.get(precision, FourLists()),
                precision,
                plan.precisions,
                flow.effective,
                self._refusals_by_op(precision),
            )
            followers = dict.fromkeys(painting.allowed, precision)
            flow = replace(flow, effective={**flow.effective, **followers})
        return flow

    def _refusals_by_op(self, precision: Precision) -> dict[str, str]:
        refusals = {
            name: item.refusal_reason(precision) for name, item in self.capabilities.items()
        }
        return {name: why for name, why in refusals.items() if why is not None}


def _write_out_config(op: Op, capability: Capability, config: OpConfig) -> OpConfig:
    if capability.accepts_config(config):
        return config
    if config.kernel:
        raise PlanError(
            f"op {op.name!r} ({op.type}) has no FP32 kernel {config.kernel!r} here; remove the "
            f"kernel from the plan"
        )
    best = capability.config(config.precision)
    if best is None:
        if config.precision is Precision.INT8 and (op.fusion_group or op.quantize_agnostic):
            return config  # fused into INT8 ops
        raise PlanError(
            f"op {op.name!r} ({op.type}) cannot run in {config.precision} here: "
            f"{capability.refusal_reason(config.precision)}; "
            f"set one of {', '.join(map(str, capability.precisions))}"
        )
    if not config.precision.is_integer:
        return OpConfig(config.precision)
    if config.weight is None and config.activation is None:
        return replace(best, corrections=config.corrections)
    filled = replace(config, weight=config.weight or best.weight)
    if not capability.accepts_config(filled):
        raise PlanError(
            f"op {op.name!r} ({op.type}) does not support {config.precision.value.upper()} with "
            f"{_describe_config(filled)}; "
            f"set {_describe_config(best)}"
        )
    return filled


def _describe_config(config: OpConfig) -> str:
    text = f"weight '{config.weight}'"
    return f"{text}, activation '{config.activation}'" if config.activation else f"{text} only"


def _occurring_16_bits(effective: Mapping[str, Precision]) -> list[Precision]:
    precisions = set(effective.values())
    return [precision for precision in Precision if precision.is_16_bit and precision in precisions]
