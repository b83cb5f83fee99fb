"""The tuning space: every op of a model with its supported configurations.

Calibration reduces a space to what the samples reached: tensors with finite ranges. Rules name one
configuration for each op: by name, by type, or for all.
"""

from __future__ import annotations

import hashlib
import re
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, fields, replace
from functools import cached_property, lru_cache
from typing import Any

from neural_mp.amp import AmpList, FourLists, Painting
from neural_mp.core.enums import Approach, Objective
from neural_mp.core.graph import Op, OpGraph
from neural_mp.core.plan import PrecisionPlan
from neural_mp.core.precision import FP32, OpConfig, Precision
from neural_mp.core.quantization_flow import (
    QuantizedTensor,
    find_observable_tensors,
    find_quantized_tensors,
)
from neural_mp.errors import UnknownOperatorError, did_you_mean, error_path
from neural_mp.space.capability import FP32_ONLY, Capability, Constraints, OpConstraint
from neural_mp.space.resolution import ResolvedPlan, Resolver

#: Maximum number of cached resolved plans.
_MAX_CACHED_PLANS = 32
_EMULATED = "emulated on this machine, and slower than FP32"
_NO_NATIVE_OP = "no op that it could follow runs natively in this precision"
_NOT_REACHED = "not reached by calibration, so the ranges of its inputs are unknown"


@dataclass(frozen=True)
class TuningSpace:
    """Every op with its supported configurations, after hardware and user constraints.

    Attributes:
        graph: the model.
        capabilities: op → its supported configurations; every op of the graph has an entry.
        lists: 16-bit precision → the four lists that extend a plan's 16-bit ops to other ops; for a
            precision without lists, a plan decides every op individually.
        asked: pairs of an op and a 16-bit precision that a user constraint names in place of INT8.
    """

    graph: OpGraph
    capabilities: Mapping[str, Capability]
    lists: Mapping[Precision, FourLists] = field(default_factory=dict)
    asked: frozenset[tuple[str, Precision]] = frozenset()

    def choices(self, name: str) -> tuple[OpConfig, ...]:
        """Return the configs that a plan may choose for an op, best first.

        16-bit precisions are included only if their ALLOW list contains the op's type; otherwise,
        the op follows its neighbours, unless a plan names the precision.
        """
        return tuple(
            config
            for config in self.capabilities[name].configs
            if not config.precision.is_16_bit
            or config.precision not in self.lists
            or self.lists[config.precision].of(self.graph[name].type) is AmpList.ALLOW
        )

    def choice(self, name: str, precision: Precision) -> OpConfig | None:
        """Return the best of an op's choices in a precision; None if there is no such choice."""
        return next((c for c in self.choices(name) if c.precision is precision), None)

    @cached_property
    def contractions(self) -> tuple[Op, ...]:
        """Convolutions, matrix products and all other ops on an ALLOW list.

        A plan names contractions even if FP32 is their only choice.
        """
        return tuple(
            op
            for op in self.graph
            if any(lists.of(op.type) is AmpList.ALLOW for lists in self.lists.values())
        )

    @cached_property
    def tunable_ops(self) -> tuple[str, ...]:
        """The ops with more than one choice, which a plan decides; in the graph's order."""
        # Choices depend on no more than the capability, which many ops share, and the type.
        counts: dict[tuple[int, str], int] = {}
        keys = [(op.name, (id(self.capabilities[op.name]), op.type)) for op in self.graph]
        for name, key in keys:
            if key not in counts:
                counts[key] = len(self.choices(name))
        return tuple(name for name, key in keys if counts[key] > 1)

    @cached_property
    def digest(self) -> str:
        """Digest of all ops and their supported configurations; equal in all processes."""
        digest = hashlib.sha256()
        for op in self.graph:
            capability = self.capabilities[op.name]
            lists = [f"{p}: {self.lists[p].of(op.type)}" for p in sorted(self.lists)]
            emulated = sorted(capability.emulated)
            digest.update(
                f"{op}{capability.configs}{emulated}{capability.weights}{lists};".encode()
            )
        return digest.hexdigest()

    def fastest_plan(self) -> PrecisionPlan:
        """Return the plan with every op in its best choice: most strategies start here."""
        return PrecisionPlan({op: self.choices(op)[0] for op in self.tunable_ops})

    @cached_property
    def int8_ops(self) -> frozenset[str]:
        """The tunable ops that support static INT8: quantized inputs with calibrated ranges."""
        return self._find_ops_with(Approach.STATIC)

    @cached_property
    def dynamic_ops(self) -> frozenset[str]:
        """The tunable ops that support dynamic INT8: quantized inputs with ranges of every run."""
        return self._find_ops_with(Approach.DYNAMIC)

    def _find_ops_with(self, approach: Approach) -> frozenset[str]:
        return frozenset(
            op for op in self.tunable_ops if approach in self.capabilities[op].int8_approaches
        )

    @cached_property
    def tensors(self) -> tuple[QuantizedTensor, ...]:
        """The quantized tensors if every op that supports static INT8 runs in INT8."""
        return find_quantized_tensors(self.graph, self.int8_ops)

    @cached_property
    def tied_ops(self) -> tuple[frozenset[str], ...]:
        """Tunable ops that share a quantized tensor, one group per tensor.

        If one op of a group falls back while another keeps the tensor quantized, the noise of the
        tensor remains.
        """
        return tuple(dict.fromkeys(tensor.ops for tensor in self.tensors))

    @cached_property
    def decision_groups(self) -> tuple[tuple[str, ...], ...]:
        """The tunable ops, grouped by the quantized tensors that they read: one decision per group.

        Groups are in the graph's order, by their first op.
        """
        group: dict[str, list[str]] = {op: [op] for op in self.tunable_ops}
        for tensor in self.tensors:
            first, *remaining = tensor.consumers or ("",)
            for op in remaining:
                if group[op] is not group[first]:
                    group[first].extend(group[op])
                    for moved in group[op]:
                        group[moved] = group[first]
        position = {op: index for index, op in enumerate(self.tunable_ops)}
        groups = {id(ops): tuple(sorted(ops, key=position.__getitem__)) for ops in group.values()}
        return tuple(sorted(groups.values(), key=lambda ops: position[ops[0]]))

    @cached_property
    def usable_precisions(self) -> tuple[Precision, ...]:
        """All precisions that some tunable op supports."""
        precisions = {p for op in self.tunable_ops for p in self.capabilities[op].precisions}
        return tuple(precision for precision in Precision if precision in precisions)

    def fp32_plan(self) -> PrecisionPlan:
        """Return the plan with every op in FP32."""
        return self.resolve(PrecisionPlan()).plan

    def with_floats_in(self, plan: PrecisionPlan, precision: Precision) -> PrecisionPlan:
        """Return a plan whose ops in FP32 run in a 16-bit precision, but for denied types.

        Ops that are not layers follow the layers around them otherwise, and stay in FP32 between
        layers in INT8, although a runtime may compute all floats of a model in one type fastest.
        """
        lists, effective = self.lists.get(precision), self.resolve(plan).effective
        lowered = {
            op.name: config
            for op in self.graph
            if effective[op.name] is Precision.FP32
            and (lists is None or lists.of(op.type) is not AmpList.DENY)
            and (config := self.capabilities[op.name].config(precision)) is not None
        }
        return plan.replacing(lowered)

    def restricted_to(self, precisions: Iterable[Precision]) -> TuningSpace:
        """Return the space with these precisions only, and FP32, which is always kept."""
        retained = {*precisions, Precision.FP32}
        return self._filter_configs(lambda name, config: config.precision in retained)

    def without_emulated(self, retained: Collection[Precision]) -> TuningSpace:
        """Return the space without emulated 16-bit precisions, which are slower than FP32.

        A precision without any op left to choose it is removed entirely, since no op can follow.
        Precisions in `retained` stay, emulated or not.
        """

        def remove_emulated(name: str, capability: Capability) -> Capability:
            removed = {
                p for p in capability.emulated if p not in retained and (name, p) not in self.asked
            }
            return capability.without_precisions(removed, _EMULATED)

        space = replace(
            self, capabilities={n: remove_emulated(n, c) for n, c in self.capabilities.items()}
        )
        idle = {
            precision
            for precision in self.usable_precisions
            if precision.is_16_bit
            and not any(space.choice(op, precision) for op in space.tunable_ops)
        }
        capabilities = {
            n: c.without_precisions(idle, _NO_NATIVE_OP) for n, c in space.capabilities.items()
        }
        return replace(space, capabilities=capabilities)

    def with_int8(self, approaches: Iterable[Approach]) -> TuningSpace:
        """Return the space with these INT8 approaches only."""
        retained = {*approaches, None}
        return self._filter_configs(lambda name, config: config.approach in retained)

    def suited_to(self, objectives: Collection[Objective]) -> TuningSpace:
        """Return the space without choices that defeat the only objective.

        For the size of the model, these are integers for a weight that another op reads in float:
        the weight would be stored twice.
        """
        if set(objectives) != {Objective.MODELSIZE}:
            return self
        readers: dict[str, list[str]] = defaultdict(list)
        for reader in self.graph:
            for constant in reader.constants:
                readers[constant].append(reader.name)
        capabilities = dict(self.capabilities)
        waiting = list(readers)
        while waiting:
            ops = readers[waiting.pop()]
            integers = {op: {p for p in capabilities[op].precisions if p.is_integer} for op in ops}
            in_float = [op for op in ops if not integers[op]]
            for op in ops if in_float else ():
                capability, removed = capabilities[op], integers[op]
                if removed:
                    reason = f"its weight is also read by {in_float[0]!r} in float: stored twice"
                    capabilities[op] = capability.without_precisions(removed, reason)
                    waiting += self.graph[op].constants
        return replace(self, capabilities=capabilities)

    def without_data(self) -> TuningSpace:
        """Return the space without weights that are corrected with calibration data."""
        return self._filter_configs(lambda name, config: not config.needs_data)

    def without_int8(
        self, ops: Collection[str], approaches: Collection[Approach], reason: str
    ) -> TuningSpace:
        """Return the space without some INT8 approaches for ops, with a common reason."""
        if not ops:
            return self
        space = self._filter_configs(lambda op, c: op not in ops or c.approach not in approaches)
        refusing = {
            op: space.capabilities[op].refusing_int8(reason)
            for op in ops
            if Precision.INT8 not in space.capabilities[op].precisions
        }
        return replace(space, capabilities={**space.capabilities, **refusing})

    def apply_constraints(self, constraints: Constraints) -> TuningSpace:
        """Return the space reduced by user constraints; FP32 is always kept.

        Raises:
            UnknownOperatorError: a name or pattern matches no op and no layer, or no op or layer
                has a named type.
        """
        return self.apply_op_constraints(self.constraints_by_op(constraints))

    def constraints_by_op(self, constraints: Constraints) -> dict[str, tuple[OpConstraint, ...]]:
        """Return op → the constraints that apply to the op.

        Raises:
            UnknownOperatorError: as for `apply_constraints`.
        """
        types = {kind for op in self.graph for kind in op.types}
        for op_type in constraints.optype_wise:
            if op_type not in types:
                with error_path("optype_wise", op_type):
                    raise UnknownOperatorError(
                        f"optype_wise names {op_type!r}, which is not a type of any op or layer"
                        f"{did_you_mean(op_type, types)}"
                    )
        by_op: dict[str, list[OpConstraint]] = {name: [] for name in self.capabilities}
        for pattern, limit in constraints.op_wise.items():
            with error_path("op_wise", pattern):
                matching = self.match_ops(pattern)
            for name in matching:
                by_op[name].append(limit)
        for name, limits in by_op.items():
            own = self.graph[name].types
            limits += (limit for kind, limit in constraints.optype_wise.items() if kind in own)
            limits.append(constraints.model_wise)
        return {name: tuple(limits) for name, limits in by_op.items()}

    def apply_op_constraints(self, by_op: Mapping[str, Iterable[OpConstraint]]) -> TuningSpace:
        """Return the space reduced by constraints per op; FP32 is always kept."""
        constraints = {name: tuple(limits) for name, limits in by_op.items()}
        requested = {
            name: item.with_requested(
                [limit.fit_to_configs(item.offered_configs) for limit in constraints.get(name, ())]
            )
            for name, item in self.capabilities.items()
        }
        by_op = {
            name: tuple(limit.fit_to_configs(requested[name].configs) for limit in limits)
            for name, limits in constraints.items()
        }

        requests = {
            (name, precision)
            for name, limits in by_op.items()
            for limit in limits
            for precision in limit.requested_precisions
        }
        space = replace(self, capabilities=requested)._filter_configs(
            lambda name, config: all(limit.allows_config(config) for limit in by_op.get(name, ()))
        )
        return replace(space, asked=self.asked | requests)

    def match_ops(self, pattern: str, option: str = "op_wise") -> list[str]:
        """Return the ops matched by a name or pattern of an op, or of a layer and its contents.

        `option` holds the name, for messages.

        Raises:
            UnknownOperatorError: no op and no layer matches; the message lists the nearest names.
        """
        named = [
            op.name for op in self.graph if op.name == pattern or pattern in _list_layer_names(op)
        ]
        if named:
            return named
        try:
            matches = re.compile(pattern).fullmatch
        except re.error:
            matches = re.compile(re.escape(pattern)).fullmatch
        op_names = [op.name for op in self.graph if matches(op.name)]
        op_names = op_names or [
            op.name for op in self.graph if any(map(matches, _list_layer_names(op)))
        ]
        if not op_names:
            layers = (layer.name for layer in self.graph.layers)
            names = dict.fromkeys((*(op.name for op in self.graph), *layers))
            raise UnknownOperatorError(
                f"{option} names {pattern!r}, which matches no op or layer of the model"
                f"{did_you_mean(pattern, names)}"
            )
        return op_names

    def _filter_configs(self, keep: Callable[[str, OpConfig], bool]) -> TuningSpace:
        capabilities = {}
        for name, item in self.capabilities.items():
            configs = tuple(c for c in item.configs if c == FP32 or keep(name, c))
            capabilities[name] = replace(item, configs=configs)
        return replace(self, capabilities=capabilities)

    def resolve(self, plan: PrecisionPlan) -> ResolvedPlan:
        """See `Resolver.resolve_plan`; the latest plans are cached."""
        return self._cached_resolve(plan)

    @cached_property
    def _plan_resolver(self) -> Resolver:
        named = frozenset({*self.tunable_ops, *(op.name for op in self.contractions)})
        return Resolver(self.graph, self.capabilities, self.lists, named)

    @cached_property
    def _cached_resolve(self) -> Callable[[PrecisionPlan], ResolvedPlan]:
        # Strategies and the tuner resolve the same plans alternately.
        return lru_cache(maxsize=_MAX_CACHED_PLANS)(self._plan_resolver.resolve_plan)

    def __getstate__(self) -> dict[str, Any]:
        """Return the fields without cached properties, which another process recomputes."""
        return {item.name: getattr(self, item.name) for item in fields(self)}

    def painting(self, plan: ResolvedPlan, precision: Precision) -> Painting:
        """See `Resolver.paint_plan`."""
        return self._plan_resolver.paint_plan(plan, precision)

    def with_local_weight_ranges(self, plan: PrecisionPlan) -> PrecisionPlan:
        """Return a plan of another machine with weight ranges that are exact on this machine."""
        return plan.replacing(
            {
                op: self.capabilities[op].with_exact_weight(config)
                for op, config in plan.items()
                if op in self.capabilities
            }
        )


def _list_layer_names(op: Op) -> list[str]:
    return [layer.name for layer in op.layers]


def limit_to_reached(space: TuningSpace, observed: Collection[str]) -> TuningSpace:
    """Return a space without static INT8 for ops whose tensors calibration has not seen.

    INT8 approaches that need no calibrated range stay.
    """
    while unseen := find_observable_tensors(space.graph, space.int8_ops).difference(observed):
        needing = frozenset(_ops_needing_int8(space.graph, space.int8_ops, unseen))
        if not needing:
            break
        space = space.without_int8(needing, (Approach.STATIC,), _NOT_REACHED)
    return space


def without_non_finite(space: TuningSpace, held: Mapping[str, object]) -> TuningSpace:
    """Return a space in which tensors that held NaN or Inf in calibration stay float.

    Ops that read such a tensor in INT8, or can only write INT8, lose the INT8 with calibrated
    ranges and with those of every run. Ops that move the tensor no longer pass INT8 on. The values
    of `held` tell, as text, the value that the tensor held and its batch.
    """
    moving = {
        op.name: tensor
        for op in space.graph
        if op.quantize_agnostic
        for tensor in (op.name, *op.inputs)
        if tensor in held
    }
    if moving:
        space = _forbid_int8_moves(
            space, {op: _non_finite_reason(held, name) for op, name in moving.items()}
        )
    for tensor in held:
        needing = frozenset(
            _ops_needing_int8(space.graph, space.int8_ops | space.dynamic_ops, (tensor,))
        )
        approaches = (Approach.STATIC, Approach.DYNAMIC)
        space = space.without_int8(needing, approaches, _non_finite_reason(held, tensor))
    return space


def _non_finite_reason(held: Mapping[str, object], tensor: str) -> str:
    return f"tensor {tensor!r} held {held[tensor]}, and INT8 has neither NaN nor Inf"


def _forbid_int8_moves(space: TuningSpace, reasons: Mapping[str, str]) -> TuningSpace:
    """Return a space in which ops, given with their reasons, compute instead of moving INT8."""
    ops = (replace(op, quantize_agnostic=False) if op.name in reasons else op for op in space.graph)
    refusing = {op: space.capabilities[op].refusing_int8(reason) for op, reason in reasons.items()}
    graph = OpGraph(ops, space.graph.inputs, space.graph.outputs)
    return replace(space, graph=graph, capabilities={**space.capabilities, **refusing})


def _ops_needing_int8(
    graph: OpGraph, heads: Collection[str], tensors: Iterable[str]
) -> Iterator[str]:
    """Yield those of the INT8 ops `heads` that read, or can only write, some tensors in INT8."""

    def find_int8_head(op: Op) -> str | None:
        name = op.name if op.name in heads else op.fusion_group
        return name if name in heads else None

    for tensor in tensors:
        for op in graph.consumers(tensor):
            reader = find_int8_head(op)
            if reader is not None and (reader != op.name or tensor in op.read_in_int8):
                yield reader
        writer = find_int8_head(graph[tensor]) if tensor in graph else None
        if writer is not None and (graph[writer].writes_int8 or graph[writer].joins_int8):
            yield writer


@dataclass(frozen=True)
class ConversionRules:
    """The configuration of each op, as one constraint: the most specific rule counts.

    Names come before types, and types before the default. Among several names, the last one that
    matches counts.

    Attributes:
        defaults: pairs of op types or classes of layers, none for all, and the constraint of these
            ops; the last pair that matches an op counts. An op without rule stays in FP32.
        kept: patterns of names of ops that the defaults do not apply to.
        by_type: op type, or class of layers → constraint.
        by_name: pattern → constraint; the pattern must match the beginning of the name of an op or
            of one of its layers, or be one of its types.
    """

    defaults: tuple[tuple[frozenset[str], OpConstraint], ...] = ()
    kept: tuple[str, ...] = ()
    by_type: Mapping[str, OpConstraint] = field(default_factory=dict)
    by_name: Mapping[str, OpConstraint] = field(default_factory=dict)

    def constraint_for(self, op: Op) -> OpConstraint:
        """Return the constraint of an op."""
        named = [limit for pattern, limit in self.by_name.items() if _matches_op(pattern, op)]
        typed = [limit for kind, limit in self.by_type.items() if kind in op.types]
        usual = [limit for types, limit in self.defaults if not types or types & op.types]
        if any(_matches_op(pattern, op) for pattern in self.kept):
            usual = []
        return (named or typed or usual or [FP32_ONLY])[-1]

    def build_plan(self, space: TuningSpace) -> PrecisionPlan:
        """Return the plan with every op in the best configuration that its rule allows.

        An op without such a configuration stays in FP32.
        """
        limited = space.apply_op_constraints(
            {op.name: (self.constraint_for(op),) for op in space.graph}
        )
        return limited.fastest_plan()

    def find_unmatched(self, graph: OpGraph) -> tuple[str, ...]:
        """Return the names and types that match no op of a graph."""
        names = [p for p in self.by_name if not any(_matches_op(p, op) for op in graph)]
        types = {kind for op in graph for kind in op.types}
        return (*names, *(kind for kind in self.by_type if kind not in types))


def _matches_op(pattern: str, op: Op) -> bool:
    """Whether a pattern matches the beginning of a name of an op, or is one of its types."""
    names = (op.name, *(layer.name for layer in op.layers))
    return name_matches(pattern, names) or pattern in op.types


def name_matches(pattern: str, names: Iterable[str]) -> bool:
    """Whether a pattern, or text that is none, matches the beginning of one of several names."""
    try:
        regex = re.compile(pattern)
    except re.error:
        regex = re.compile(re.escape(pattern))
    return any(regex.match(name) for name in names)
