"""What every op of a model may run in here: the room a strategy searches."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property

from neural_mp.amp import AmpList, FourLists, Painting
from neural_mp.core.graph import Op, OpGraph
from neural_mp.core.plan import PrecisionPlan
from neural_mp.core.precision import FP32, OpConfig, Precision, QuantSpec
from neural_mp.core.quantization_flow import Flow, QuantizedTensor, quantized_tensors, trace
from neural_mp.errors import PlanError, UnknownOperatorError, did_you_mean
from neural_mp.space.constraints import Constraints, OpConstraint
from neural_mp.space.plan_painting import explain_plan, paint_plan

#: Plans whose resolved form is kept.
_KEPT = 32


@dataclass(frozen=True)
class Capability:
    """What one op can run in.

    Attributes:
        configs: best first; FP32 is always among them and last.
        reasons: precision it cannot run in → why.
        emulated: 16-bit precisions that are computed in FP32 here, and rounded.
        weights: how its INT8 weight may be stored beside what `configs` say, where a plan asks.
    """

    configs: tuple[OpConfig, ...] = (FP32,)
    reasons: Mapping[Precision, str] = field(default_factory=dict)
    emulated: frozenset[Precision] = frozenset()
    weights: tuple[QuantSpec, ...] = ()

    @property
    def precisions(self) -> tuple[Precision, ...]:
        """The precisions the op can run in, best first."""
        return tuple(dict.fromkeys(config.precision for config in self.configs))

    @property
    def approaches(self) -> tuple[str, ...]:
        """The ways of INT8 that the op has, best first; none if it cannot run in INT8."""
        found = [config.approach for config in self.configs]
        return tuple(dict.fromkeys(approach for approach in found if approach is not None))

    def config(self, precision: Precision) -> OpConfig | None:
        """The best config of a precision; None if the op cannot run in it."""
        return next((c for c in self.configs if c.precision == precision), None)

    def takes(self, config: OpConfig) -> bool:
        """Whether a plan may ask for a config, repairs aside."""
        bare = replace(config, repairs=())
        if bare in self.configs:
            return True
        usual = (replace(bare, weight=c.weight) for c in self.configs if c.weight is not None)
        return bare.weight in self.weights and any(other in self.configs for other in usual)

    def with_right_weight(self, config: OpConfig) -> OpConfig:
        """A config whose weight is stored in a range that is right here; itself where it is."""
        if config.weight is None or self.takes(config):
            return config
        usual = (c.weight for c in self.configs if c.approach == config.approach)
        fixed = (replace(config, weight=weight) for weight in usual)
        return next((other for other in fixed if self.takes(other)), config)


@dataclass(frozen=True)
class TuningSpace:
    """Every op with what it may run in, after hardware and user constraints.

    Attributes:
        graph: the model.
        capabilities: op → what it can run in; every op of the graph has an entry.
        lists: 16-bit precision → the four lists by which ops follow those that a plan has in it;
            of a precision without lists, a plan decides every op by itself.
    """

    graph: OpGraph
    capabilities: Mapping[str, Capability]
    lists: Mapping[Precision, FourLists] = field(default_factory=dict)

    def choices(self, name: str) -> tuple[OpConfig, ...]:
        """What a plan may say of an op, best first.

        Of the 16-bit precisions, those that have its type on the ALLOW list; in the others it
        follows the ops around it, unless a plan says otherwise.
        """
        return tuple(
            config
            for config in self.capabilities[name].configs
            if not config.precision.is_16_bit or self._begins(name, config.precision)
        )

    def choice(self, name: str, precision: Precision) -> OpConfig | None:
        """The best of an op's choices in a precision; None if it has none there."""
        return next((c for c in self.choices(name) if c.precision is precision), None)

    def _is_product(self, op: Op) -> bool:
        """Whether an op is worth a word even if it cannot but run in FP32."""
        return any(lists.of(op.type) is AmpList.ALLOW for lists in self.lists.values())

    def _begins(self, name: str, precision: Precision) -> bool:
        lists = self.lists.get(precision)
        return lists is None or lists.of(self.graph[name].type) is AmpList.ALLOW

    @cached_property
    def decided(self) -> tuple[str, ...]:
        """The ops a plan has to decide, in the graph's order: those that have a choice."""
        return tuple(op.name for op in self.graph if len(self.choices(op.name)) > 1)

    def fastest_plan(self) -> PrecisionPlan:
        """Every op in the best of its choices: the first guess of most strategies."""
        return PrecisionPlan({op: self.choices(op)[0] for op in self.decided})

    @cached_property
    def int8_ops(self) -> frozenset[str]:
        """The decided ops that can read their inputs in INT8, with ranges from calibration."""
        return frozenset(op for op in self.decided if "static" in self.capabilities[op].approaches)

    @cached_property
    def tensors(self) -> tuple[QuantizedTensor, ...]:
        """The tensors that are stored in INT8 when every op that can runs in INT8."""
        return quantized_tensors(self.graph, self.int8_ops)

    @cached_property
    def bound_together(self) -> tuple[frozenset[str], ...]:
        """Decided ops that share a quantized tensor, one group a tensor.

        Putting one of them back to float while another keeps the tensor quantized does not take
        away the noise of that tensor.
        """
        return tuple(dict.fromkeys(tensor.ops for tensor in self.tensors))

    def stored_by(self, tensor: QuantizedTensor) -> tuple[str, ...]:
        """The ops any of which in INT8 has a tensor stored so: readers, and writers of INT8 only.

        Its noise is gone when all of them are in a higher precision, and not before.
        """
        bound = (op for op in tensor.producers if self.graph[op].writes_int8)
        return tuple(dict.fromkeys((*tensor.consumers, *bound)))

    @cached_property
    def decisions(self) -> tuple[tuple[str, ...], ...]:
        """The decided ops, those together that read one quantized tensor: one decision each.

        In the graph's order, by the first of each.
        """
        group: dict[str, list[str]] = {op: [op] for op in self.decided}
        for tensor in self.tensors:
            first, *others = tensor.consumers or ("",)
            for op in others:
                if group[op] is not group[first]:
                    group[first].extend(group[op])
                    for moved in group[op]:
                        group[moved] = group[first]
        position = {op: index for index, op in enumerate(self.decided)}
        groups = {id(ops): tuple(sorted(ops, key=position.__getitem__)) for ops in group.values()}
        return tuple(sorted(groups.values(), key=lambda ops: position[ops[0]]))

    def precisions(self) -> tuple[Precision, ...]:
        """All precisions that some decided op can run in."""
        found = {p for op in self.decided for p in self.capabilities[op].precisions}
        return tuple(precision for precision in Precision if precision in found)

    def fp32_plan(self) -> PrecisionPlan:
        """Every op in FP32."""
        return self.resolve(PrecisionPlan())

    def restricted_to(self, precisions: Iterable[Precision]) -> TuningSpace:
        """The space with only these precisions, and FP32, which always stays."""
        kept = {*precisions, Precision.FP32}
        return self._filtered(lambda name, config: config.precision in kept)

    def with_int8(self, approaches: Iterable[str]) -> TuningSpace:
        """The space with INT8 in these of its ways only: `static`, `dynamic`, `weight_only`."""
        kept = {*approaches, None}
        return self._filtered(lambda name, config: config.approach in kept)

    def constrained(self, constraints: Constraints) -> TuningSpace:
        """The space cut down by the user's limits; FP32 is never taken away.

        Raises:
            UnknownOperatorError: a name or pattern matches no op, or an op type does not occur.
        """
        for op_type in constraints.optype_wise:
            if op_type not in self.graph.types:
                raise UnknownOperatorError(
                    f"optype_wise names {op_type!r}, which no op of the model has"
                    f"{did_you_mean(op_type, self.graph.types)}"
                )
        by_op: dict[str, list[OpConstraint]] = {}
        for pattern, limit in constraints.op_wise.items():
            for name in self._matching(pattern):
                by_op.setdefault(name, []).append(limit)

        def allowed(name: str, config: OpConfig) -> bool:
            limits = [constraints.model_wise, *by_op.get(name, ())]
            by_type = constraints.optype_wise.get(self.graph[name].type)
            if by_type is not None:
                limits.append(by_type)
            return all(limit.allows(config) for limit in limits)

        return self._filtered(allowed)

    def _matching(self, pattern: str) -> list[str]:
        if pattern in self.graph:
            return [pattern]
        try:
            found = [op.name for op in self.graph if re.fullmatch(pattern, op.name)]
        except re.error:
            found = []
        if not found:
            names = [op.name for op in self.graph]
            raise UnknownOperatorError(
                f"op_wise names {pattern!r}, which matches no op of the model"
                f"{did_you_mean(pattern, names)}"
            )
        return found

    def _filtered(self, keep: object) -> TuningSpace:
        def kept(name: str, capability: Capability) -> Capability:
            configs = tuple(
                config
                for config in capability.configs
                if config == FP32 or keep(name, config)  # type: ignore[operator]
            )
            return replace(capability, configs=configs)

        capabilities = {name: kept(name, item) for name, item in self.capabilities.items()}
        return replace(self, capabilities=capabilities)

    def resolve(self, plan: PrecisionPlan) -> PrecisionPlan:
        """A plan that says all there is to say: checked, filled in, every op decided.

        With ops in 16 bits, it also names those that follow them and those that could and do not,
        so that it means the same under other lists.

        Raises:
            UnknownOperatorError: the plan names an op the model does not have.
            PlanError: it asks for a precision that an op cannot run in here.
        """
        if plan not in self._resolved:
            while len(self._resolved) >= _KEPT:
                self._resolved.pop(next(iter(self._resolved)))
            self._resolved[plan] = self._resolve(plan)
        return self._resolved[plan]

    @cached_property
    def _resolved(self) -> dict[PrecisionPlan, PrecisionPlan]:
        return {}  # the last ones: strategies and the tuner ask for the same in turn

    def _resolve(self, plan: PrecisionPlan) -> PrecisionPlan:
        checked = self._checked(plan)
        effective = self._flow(checked).precisions
        if set(effective.values()) <= {Precision.FP32}:
            checked = PrecisionPlan()  # nothing comes of what it says
        begin = {*self.decided, *(op.name for op in self.graph if self._is_product(op))}
        sixteen = self._sixteen(effective)
        configs = {}
        for op in self.graph:
            precision = effective[op.name]
            said = checked.get(op.name)
            holds = said is not None and (said.precision is precision or not sixteen)
            if said is not None and holds:
                configs[op.name] = said
            elif precision.is_16_bit:
                configs[op.name] = OpConfig(precision)
            elif precision is Precision.FP32 and (
                op.name in begin
                or any(self.capabilities[op.name].config(p) is not None for p in sixteen)
            ):
                configs[op.name] = FP32
        return PrecisionPlan(configs)

    def _checked(self, plan: PrecisionPlan) -> PrecisionPlan:
        """The plan, with what it says in shorthand filled in."""
        configs: dict[str, OpConfig] = {}
        for name, config in plan.items():
            if name not in self.graph:
                names = [op.name for op in self.graph]
                raise UnknownOperatorError(
                    f"the plan names {name!r}, which the model does not have"
                    f"{did_you_mean(name, names)}"
                )
            configs[name] = self._filled(name, config)
        return PrecisionPlan(configs)

    def _filled(self, name: str, config: OpConfig) -> OpConfig:
        capability = self.capabilities[name]
        if capability.takes(config):
            return config
        best = capability.config(config.precision)
        op = self.graph[name]
        if best is None:
            if config.precision is Precision.INT8 and (op.cluster or op.carries_int8):
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

    def with_right_weights(self, plan: PrecisionPlan) -> PrecisionPlan:
        """A plan of another machine, its weights in the ranges that are right on this one."""
        known = {op: self.capabilities[op] for op in plan if op in self.capabilities}
        return plan.replacing({op: c.with_right_weight(plan[op]) for op, c in known.items()})

    def flow(self, plan: PrecisionPlan) -> Flow:
        """What every op effectively runs in under a plan, and where INT8 flows.

        INT8 is decided first; then what the plan does not name follows, by the four lists, the ops
        that it has in 16 bits.
        """
        return self._flow(self._checked(plan))

    def _flow(self, plan: PrecisionPlan) -> Flow:
        alone = frozenset(
            op for op, item in plan.items() if item.approach in ("dynamic", "weight_only")
        )
        flow = trace(self.graph, plan.precisions, alone)
        for precision in self._sixteen(flow.precisions):
            painting = paint_plan(
                self.graph,
                self._lists(precision),
                precision,
                plan.precisions,
                flow.precisions,
                self._obstacles(precision),
            )
            followers = dict.fromkeys(painting.allowed, precision)
            flow = replace(flow, precisions={**flow.precisions, **followers})
        return flow

    def painting(self, plan: PrecisionPlan, precision: Precision) -> Painting:
        """Why every op runs in a 16-bit precision, or does not, under a plan."""
        return explain_plan(
            self.graph,
            self._lists(precision),
            precision,
            self.flow(plan).precisions,
            self._obstacles(precision),
        )

    def _sixteen(self, effective: Mapping[str, Precision]) -> list[Precision]:
        """The 16-bit precisions that occur."""
        found = set(effective.values())
        return [precision for precision in Precision if precision.is_16_bit and precision in found]

    def _lists(self, precision: Precision) -> FourLists:
        return self.lists.get(precision, FourLists())

    def _obstacles(self, precision: Precision) -> dict[str, str]:
        """Op → why it cannot run in a precision."""
        return {
            name: item.reasons.get(precision, "your constraints exclude it")
            for name, item in self.capabilities.items()
            if item.config(precision) is None
        }


def _words(config: OpConfig) -> str:
    words = f"weight '{config.weight}'"
    return f"{words}, activation '{config.activation}'" if config.activation else f"{words} only"
