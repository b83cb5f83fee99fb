"""Where quantized values flow under a plan: the same reasoning for every framework.

Quantization points belong to tensors, not to ops. A tensor is stored in INT8 when some INT8 op
reads it; the op that writes it can write INT8 directly if it runs in INT8 itself; quantize-agnostic
ops pass INT8 on. An adaptor reads from the flow what to insert where; a report reads from it what
every op really runs in.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from neural_mp.core.graph import Op, OpGraph
from neural_mp.core.precision import Precision


@dataclass(frozen=True)
class QuantizedTensor:
    """A tensor stored in INT8 if any of the ops that read it runs in INT8.

    Attributes:
        name: the op or graph input that the tensor is the result of. Tensors that are concatenated
            share their scale, and bear the name of the concatenation.
        producers: the ops whose INT8 kernels write it; none where it comes from a float op or
            input, several where it is concatenated.
        consumers: the tunable ops that read the tensor in INT8.
        quantizing_ops: the ops each of which, in INT8, has the tensor stored in INT8: the
            consumers, and the producers that can write INT8 only. The noise is gone when all run
            in a higher precision, and not before.
    """

    name: str
    producers: tuple[str, ...]
    consumers: tuple[str, ...]
    quantizing_ops: tuple[str, ...] = ()

    @property
    def ops(self) -> frozenset[str]:
        """The ops that share the tensor: putting one of them back to float may change nothing."""
        return frozenset(self.consumers) | frozenset(self.producers)


@dataclass(frozen=True)
class QuantizationFlow:
    """The consequences of a plan.

    Attributes:
        effective: op → what it effectively runs in, ops the plan does not name included.
        int8_reads: op → those of its inputs that it reads quantized.
        int8_outputs: ops whose kernel writes INT8.
        scale_owner: tensor read quantized → the tensor whose scale it carries (itself, unless
            quantize-agnostic ops lie between).
        scale_members: root → the tensors whose ranges its scale must hold: itself, and what it was
            concatenated from.
    """

    effective: Mapping[str, Precision]
    int8_reads: Mapping[str, frozenset[str]]
    int8_outputs: frozenset[str]
    scale_owner: Mapping[str, str]
    scale_members: Mapping[str, tuple[str, ...]]


class _ScaleUnionFind:
    """The tensors that have one scale in common; it grows as the graph is followed."""

    def __init__(self) -> None:
        self._above: dict[str, str] = {}
        self._covers: dict[str, dict[str, None]] = {}

    def add(self, tensor: str) -> None:
        """Give a tensor a scale of its own, unless it has a scale already."""
        if tensor not in self._above:
            self._above[tensor] = tensor
            self._covers[tensor] = {tensor: None}

    def share(self, tensor: str, sources: tuple[str, ...]) -> None:
        """Give a tensor the scale of its source; several sources get one scale with the tensor."""
        if len(sources) == 1:
            self._above[tensor] = self.scale_owner(sources[0])
            return
        self.add(tensor)
        for source in sources:
            root = self.scale_owner(source)
            if root != tensor:
                self._above[root] = tensor
                self._covers[tensor].update(self._covers.pop(root))

    def scale_owner(self, tensor: str) -> str:
        while self._above[tensor] != tensor:
            tensor = self._above[tensor]
        return tensor

    def roots(self) -> dict[str, str]:
        return {tensor: self.scale_owner(tensor) for tensor in self._above}

    def scale_members(self) -> dict[str, tuple[str, ...]]:
        return {root: tuple(tensors) for root, tensors in self._covers.items()}


def propagate_quantization(
    graph: OpGraph,
    chosen: Mapping[str, Precision],
    alone: frozenset[str] = frozenset(),
) -> QuantizationFlow:
    """Follow a plan through the graph.

    Args:
        graph: the model.
        chosen: op → precision, for the ops a plan names. An op it does not name runs along with
            its fusion group, or passes INT8 on; otherwise it runs in FP32.
        alone: INT8 ops that read and write real numbers and quantize inside: dynamic ranges, or
            INT8 weights only.
    """
    return _followed(graph, chosen, alone)[0]


def _followed(
    graph: OpGraph,
    chosen: Mapping[str, Precision],
    alone: frozenset[str] = frozenset(),
) -> tuple[QuantizationFlow, Mapping[str, str]]:
    """The flow, and for every op that an INT8 kernel runs, the op whose kernel that is."""
    members = _fusion_members(graph, chosen, alone)
    wanted, tails = _wanted_in_int8(graph, chosen, members)
    effective: dict[str, Precision] = {}
    int8_reads: dict[str, frozenset[str]] = {}
    int8_outputs: set[str] = set()
    scales = _ScaleUnionFind()

    def read_quantized(op: Op, source: str) -> None:
        int8_reads[op.name] = int8_reads.get(op.name, frozenset()) | {source}
        scales.add(source)

    for op in graph:
        if op.joins_int8 and op.name in members and int8_outputs.isdisjoint(op.inputs):
            _leave_int8(graph, members, op.name)
        if op.name in members:
            effective[op.name] = Precision.INT8
            if members[op.name] == op.name:
                for source in _read_by_head(op):
                    read_quantized(op, source)
            elif tails[members[op.name]] in wanted:
                for source in op.inputs:
                    if members.get(source) != members[op.name]:
                        read_quantized(op, source)
            if op.name == tails[members[op.name]] and op.name in wanted:
                int8_outputs.add(op.name)
                scales.add(op.name)
        elif (
            _passes_int8_on(op, chosen)
            and op.name in wanted
            and not int8_outputs.isdisjoint(op.inputs)
        ):
            effective[op.name] = Precision.INT8
            for source in op.inputs:
                read_quantized(op, source)
            int8_outputs.add(op.name)
            scales.share(op.name, op.inputs)
        else:
            effective[op.name] = chosen.get(op.name, Precision.FP32)
            if effective[op.name] is Precision.INT8 and op.name not in alone:
                effective[op.name] = Precision.FP32  # named so, but nothing INT8 runs it
    flow = QuantizationFlow(
        effective, int8_reads, frozenset(int8_outputs), scales.roots(), scales.scale_members()
    )
    return flow, members


def _read_by_head(op: Op) -> tuple[str, ...]:
    """What the first op of an INT8 kernel reads quantized."""
    return op.inputs if op.joins_int8 else op.inputs[:1]


def _leave_int8(graph: OpGraph, members: dict[str, str], head: str) -> None:
    waiting = [head]
    while waiting:
        name = waiting.pop()
        if members.get(name) == head:
            del members[name]
            waiting.extend(graph.consumer_names(name))


def quantized_tensors(graph: OpGraph, int8_ops: frozenset[str]) -> tuple[QuantizedTensor, ...]:
    """The tensors that would be stored in INT8 if all of `int8_ops` ran in INT8."""
    flow, members = _followed(graph, dict.fromkeys(int8_ops, Precision.INT8))
    readers: dict[str, list[str]] = {}
    for op in graph:
        if op.name in members and op.name in flow.int8_outputs:
            readers.setdefault(flow.scale_owner[op.name], [])
        for source in flow.int8_reads.get(op.name, ()):
            if op.name in members:
                readers.setdefault(flow.scale_owner[source], []).append(members[op.name])
    found = []
    for name, consumers in readers.items():
        producers = tuple(
            members[tensor] for tensor in flow.scale_members[name] if tensor in members
        )
        int8_only = (op for op in producers if graph[op].writes_int8)
        keepers = tuple(dict.fromkeys((*consumers, *int8_only)))
        found.append(QuantizedTensor(name, producers, tuple(dict.fromkeys(consumers)), keepers))
    return tuple(found)


def _fusion_members(
    graph: OpGraph, chosen: Mapping[str, Precision], alone: frozenset[str] = frozenset()
) -> dict[str, str]:
    """Op → the INT8 op that runs it: itself, or the head of its fusion group."""
    members: dict[str, str] = {}
    for op in graph:
        if op.fusion_group is None:
            runs = chosen.get(op.name) is Precision.INT8 and op.name not in alone
            if runs and op.inputs and not op.quantize_agnostic:
                members[op.name] = op.name
        elif chosen.get(op.name, Precision.INT8) is Precision.INT8 and any(
            members.get(source) == op.fusion_group for source in op.inputs
        ):
            members[op.name] = op.fusion_group
    return members


def _wanted_in_int8(
    graph: OpGraph, chosen: Mapping[str, Precision], members: dict[str, str]
) -> tuple[set[str], dict[str, str]]:
    """The tensors that are read or can only be written in INT8; every fusion group's last op.

    Taken out of `members` is what joins INT8 only where it is wanted, and is not.
    """
    tails: dict[str, str] = {}
    for name in (op.name for op in graph):
        if name in members:
            tails[members[name]] = name
    wanted = {tail for head, tail in tails.items() if graph[head].writes_int8}
    for op in graph:
        if op.joins_int8 and op.name in members and wanted.issuperset(op.inputs):
            wanted.add(tails[op.name])  # one tensor to dequantize behind it instead of several
    for op in reversed(list(graph)):
        head = members.get(op.name)
        if head == op.name and op.joins_int8 and tails[head] not in wanted:
            _leave_int8(graph, members, head)
        elif head == op.name:
            wanted.update(_read_by_head(op))
        elif head is not None:
            if tails[head] in wanted:
                wanted.update(source for source in op.inputs if members.get(source) != head)
        elif _passes_int8_on(op, chosen) and op.name in wanted:
            wanted.update(op.inputs)
    return wanted, tails


def _passes_int8_on(op: Op, chosen: Mapping[str, Precision]) -> bool:
    return op.quantize_agnostic and chosen.get(op.name, Precision.INT8) is Precision.INT8


def observable_tensors(graph: OpGraph, int8_ops: frozenset[str]) -> frozenset[str]:
    """Every tensor that may be stored in INT8 under some plan that uses only these INT8 ops.

    Fusion groups are taken whole: what lies within a group is never stored. An op that joins INT8
    nowhere when all of these ops run in INT8 does so under no plan.
    """
    found: set[str] = set()
    _, members = _followed(graph, dict.fromkeys(int8_ops, Precision.INT8))
    for op in graph:
        head = op.name if op.name in int8_ops else op.fusion_group
        if head not in int8_ops or (graph[head].joins_int8 and head not in members):
            continue
        if op.name == head:
            found.update(_read_by_head(op))
        else:
            found.update(s for s in op.inputs if s != head and not _in_fusion_group(graph, s, head))
        last = not any(reader.fusion_group == head for reader in graph.consumers(op.name))
        if last and (graph[head].writes_int8 or graph[head].joins_int8):
            found.add(op.name)
    for op in reversed(list(graph)):
        if op.quantize_agnostic and op.name in found:
            found.update(op.inputs)
    return frozenset(found)


def _in_fusion_group(graph: OpGraph, name: str, head: str) -> bool:
    return name in graph and graph[name].fusion_group == head
