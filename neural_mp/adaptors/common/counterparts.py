"""Ops of one model in two frameworks, for runtimes that do not keep the names of a file."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from functools import cached_property

from neural_mp.core.graph import Op, OpGraph

#: Kinds of op that only move values, which runtimes add and remove.
_MOVERS = ("identity", "reshape", "transpose")
#: Kinds of op that runtimes fold into the one before, e.g. those of a batch norm.
_FOLDED = ("add", "batch_norm", "div", "mul", "sub")


@dataclass(frozen=True)
class KnownKinds:
    """Graph with the kind of each op.

    Attributes:
        kinds: kind of op (see `neural_mp.amp.KINDS`) → op types of the framework.
    """

    graph: OpGraph
    kinds: Mapping[str, Collection[str]]

    @cached_property
    def _kind_of_type(self) -> dict[str, str]:
        return {op_type: kind for kind, types in self.kinds.items() for op_type in types}

    def kind_of(self, op: Op) -> str:
        """Return the kind of an op, or else its type."""
        return self._kind_of_type.get(op.type, op.type)

    def producer_of(self, tensor: str) -> Op | None:
        """Return the op that writes a tensor; None for an input of the model."""
        name = tensor if tensor in self.graph else tensor.rpartition(":")[0]
        if name not in self.graph:
            return None
        return self.graph[name]

    def first_op_before(self, op: Op | None, kinds: Collection[str]) -> Op | None:
        """Return the first op at or before an op that is not of these kinds with one input."""
        while op is not None and self.kind_of(op) in kinds and len(op.inputs) == 1:
            op = self.producer_of(op.inputs[0])
        return op


@dataclass
class _Pairing:
    """Ops of the target paired with ops of the source, from later to earlier ops."""

    source: KnownKinds
    target: KnownKinds
    found: dict[str, str] = field(default_factory=dict)
    conflicts: set[str] = field(default_factory=set)

    def pair_ops(self, inner: Op | None, outer: Op | None) -> None:
        """Pair two ops, or the next ones before them of one kind, and all that these read."""
        waiting = [(inner, outer)]
        while waiting:
            inner, outer = self._of_one_kind(*waiting.pop())
            if inner is None or outer is None or self.found.get(inner.name) == outer.name:
                continue
            if inner.name in self.source.graph and inner.name != outer.name:
                continue
            if inner.name in self.found:
                self.conflicts.add(inner.name)
                continue
            self.found[inner.name] = outer.name
            if len(inner.inputs) == len(outer.inputs):
                pairs = zip(inner.inputs, outer.inputs, strict=True)
                waiting += [
                    (self.target.producer_of(i), self.source.producer_of(o)) for i, o in pairs
                ]

    def _of_one_kind(self, inner: Op | None, outer: Op | None) -> tuple[Op | None, Op | None]:
        inner, outer = (
            self.target.first_op_before(inner, _MOVERS),
            self.source.first_op_before(outer, _MOVERS),
        )
        while inner is not None and outer is not None:
            kind = self.source.kind_of(outer)
            if kind == self.target.kind_of(inner):
                return inner, outer
            if kind not in _FOLDED or len(outer.inputs) != 1:
                break
            outer = self.source.first_op_before(self.source.producer_of(outer.inputs[0]), _MOVERS)
        return None, None


def match_ops(source: KnownKinds, target: KnownKinds) -> dict[str, str]:
    """Return op of the target → op of the source, for ops whose name the source does not have.

    From outputs and ops with equal names, both graphs are read backwards: ops of one kind whose
    results are read alike are paired. An op with two pairs has none.
    """
    if all(op.name in source.graph for op in target.graph):
        return {}
    pairing = _Pairing(source, target)
    for op in target.graph:
        if op.name in source.graph:
            pairing.pair_ops(op, source.graph[op.name])
    if len(target.graph.outputs) == len(source.graph.outputs):
        for inner, outer in zip(target.graph.outputs, source.graph.outputs, strict=True):
            pairing.pair_ops(target.producer_of(inner), source.producer_of(outer))
    pairs = {
        op: name
        for op, name in pairing.found.items()
        if op not in source.graph and name not in target.graph and op not in pairing.conflicts
    }
    uses = Counter(pairs.values())
    return {op: name for op, name in pairs.items() if uses[name] == 1}
