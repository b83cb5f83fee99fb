"""Propagation of quantization through a graph under a plan, for every framework.

Quantization points belong to tensors, not to ops. A tensor is quantized if an INT8 op reads the
tensor; a producer that runs in INT8 itself can write INT8 directly; quantize-agnostic ops pass INT8
on. Adaptors read from the flow the conversions to insert; reports read from the flow the effective
precision of every op.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from neural_mp.core.graph import Op, OpGraph
from neural_mp.core.precision import Precision
from neural_mp.util.json_fields import JsonFields


@dataclass(frozen=True)
class QuantizedTensor(JsonFields):
    """A tensor quantized if any of its consumers runs in INT8.

    Attributes:
        name: producing op or graph input. Concatenated tensors share a scale, and the name of the
            concatenation.
        producers: ops whose INT8 kernels write the tensor; empty for a float op or a graph input,
            several for a concatenation.
        consumers: tunable ops that read the tensor in INT8.
        quantizing_ops: ops that, in INT8, each cause the tensor to be quantized: the consumers, and
            producers that can write INT8 only. The quantization noise vanishes only when all of
            them run in a higher precision.
    """

    name: str
    producers: tuple[str, ...]
    consumers: tuple[str, ...]
    quantizing_ops: tuple[str, ...] = ()

    @property
    def ops(self) -> frozenset[str]:
        """Producers and consumers; fallback of a single op may have no effect."""
        return frozenset(self.consumers) | frozenset(self.producers)


@dataclass(frozen=True)
class QuantizationFlow:
    """Consequences of a plan.

    Attributes:
        effective: op → effective precision, including ops that the plan does not name.
        int8_reads: op → its inputs that are read quantized.
        int8_outputs: ops whose kernel writes INT8.
        scale_owner: quantized tensor → tensor that owns its scale (itself, unless quantize-agnostic
            ops lie between).
        scale_members: scale owner → tensors whose ranges the scale must cover: the owner, and
            concatenated tensors.
    """

    effective: Mapping[str, Precision]
    int8_reads: Mapping[str, frozenset[str]]
    int8_outputs: frozenset[str]
    scale_owner: Mapping[str, str]
    scale_members: Mapping[str, tuple[str, ...]]


class _ScaleUnionFind:
    """Sets of tensors with a common scale, merged during graph traversal."""

    def __init__(self) -> None:
        self._above: dict[str, str] = {}
        self._members: dict[str, dict[str, None]] = {}

    def add_tensor(self, tensor: str) -> None:
        """Add a tensor with its own scale, unless already present."""
        if tensor not in self._above:
            self._above[tensor] = tensor
            self._members[tensor] = {tensor: None}

    def share_scale(self, tensor: str, sources: tuple[str, ...]) -> None:
        """Give a tensor the scale of its source; merge several sources and the tensor into one."""
        if len(sources) == 1:
            self._above[tensor] = self.scale_owner(sources[0])
            return
        self.add_tensor(tensor)
        for source in sources:
            root = self.scale_owner(source)
            if root != tensor:
                self._above[root] = tensor
                self._members[tensor].update(self._members.pop(root))

    def scale_owner(self, tensor: str) -> str:
        while self._above[tensor] != tensor:
            tensor = self._above[tensor]
        return tensor

    @property
    def scale_owners(self) -> dict[str, str]:
        return {tensor: self.scale_owner(tensor) for tensor in self._above}

    @property
    def members_by_owner(self) -> dict[str, tuple[str, ...]]:
        return {root: tuple(tensors) for root, tensors in self._members.items()}


def propagate_quantization(
    graph: OpGraph, chosen: Mapping[str, Precision], internal: frozenset[str] = frozenset()
) -> QuantizationFlow:
    """Propagate a plan through the graph.

    Args:
        graph: the model.
        chosen: op → precision, for the ops in a plan. Other ops are fused into their fusion group,
            or pass INT8 on; otherwise they run in FP32.
        internal: INT8 ops with float inputs and outputs (see `PrecisionPlan.internally_quantized`).
    """
    return _propagate_int8(graph, chosen, internal)[0]


def _propagate_int8(
    graph: OpGraph, chosen: Mapping[str, Precision], internal: frozenset[str] = frozenset()
) -> tuple[QuantizationFlow, Mapping[str, str]]:
    """Return the flow, and op → head of its INT8 kernel, for ops in INT8 kernels."""
    members = _find_kernel_members(graph, chosen, internal)
    requested, tails = _wanted_in_int8(graph, chosen, members)
    effective: dict[str, Precision] = {}
    int8_reads: dict[str, frozenset[str]] = {}
    int8_outputs: set[str] = set()
    scales = _ScaleUnionFind()

    def read_quantized(op: Op, source: str) -> None:
        int8_reads[op.name] = int8_reads.get(op.name, frozenset()) | {source}
        scales.add_tensor(source)

    for op in graph:
        if op.joins_int8 and op.name in members and int8_outputs.isdisjoint(op.read_in_int8):
            _remove_from_kernel(graph, members, op.name)
        if op.name in members:
            effective[op.name] = Precision.INT8
            if members[op.name] == op.name:
                for source in op.read_in_int8:
                    read_quantized(op, source)
            elif tails[members[op.name]] in requested:
                for source in op.inputs:
                    if members.get(source) != members[op.name]:
                        read_quantized(op, source)
                    elif op.quantizes_terms:
                        scales.add_tensor(source)
            if op.name == tails[members[op.name]] and op.name in requested:
                int8_outputs.add(op.name)
                scales.add_tensor(op.name)
        elif (
            _passes_int8_on(op, chosen)
            and op.name in requested
            and not int8_outputs.isdisjoint(op.inputs)
        ):
            effective[op.name] = Precision.INT8
            for source in op.inputs:
                read_quantized(op, source)
            int8_outputs.add(op.name)
            scales.share_scale(op.name, op.inputs)
        else:
            effective[op.name] = chosen.get(op.name, Precision.FP32)
            if effective[op.name] is Precision.INT8 and op.name not in internal:
                effective[op.name] = Precision.FP32  # INT8 in the plan, but without an INT8 kernel
    outputs = frozenset(int8_outputs)
    return QuantizationFlow(
        effective, int8_reads, outputs, scales.scale_owners, scales.members_by_owner
    ), members


def _remove_from_kernel(graph: OpGraph, members: dict[str, str], head: str) -> None:
    waiting = [head]
    while waiting:
        name = waiting.pop()
        if members.get(name) == head:
            del members[name]
            waiting.extend(graph.consumer_names(name))


def find_quantized_tensors(graph: OpGraph, int8_ops: frozenset[str]) -> tuple[QuantizedTensor, ...]:
    """Return the tensors that are quantized if all of `int8_ops` run in INT8."""
    flow, members = _propagate_int8(graph, dict.fromkeys(int8_ops, Precision.INT8))
    readers: dict[str, list[str]] = {}
    for op in graph:
        if op.name in members and op.name in flow.int8_outputs:
            readers.setdefault(flow.scale_owner[op.name], [])
        for source in flow.int8_reads.get(op.name, ()):
            if op.name in members:
                readers.setdefault(flow.scale_owner[source], []).append(members[op.name])
    tensors = []
    for name, consumers in readers.items():
        producers = tuple(members[t] for t in flow.scale_members[name] if t in members)
        int8_only = (op for op in producers if graph[op].writes_int8 or not consumers)
        quantizing = tuple(dict.fromkeys((*consumers, *int8_only)))
        tensors.append(
            QuantizedTensor(name, producers, tuple(dict.fromkeys(consumers)), quantizing)
        )
    return tuple(tensors)


def _find_kernel_members(
    graph: OpGraph, chosen: Mapping[str, Precision], internal: frozenset[str]
) -> dict[str, str]:
    """Return op → the INT8 op whose kernel runs the op: itself, or the head of its fusion group."""
    members: dict[str, str] = {}
    for op in graph:
        if op.fusion_group is None:
            runs = chosen.get(op.name) is Precision.INT8 and op.name not in internal
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
    """Return the tensors read in INT8 or writable in INT8 only, and the last op per fusion group.

    Ops that join INT8 only between INT8 ops are removed from `members` if their result is not among
    these tensors.
    """
    tails = {members[op.name]: op.name for op in graph if op.name in members}
    requested = {tail for head, tail in tails.items() if graph[head].writes_int8}
    _request_read_tensors(graph, chosen, members, tails, requested)
    _request_joined_tensors(graph, chosen, members, tails, requested)
    _request_read_tensors(graph, chosen, members, tails, requested)
    for head, tail in tails.items():
        if graph[head].joins_int8 and tail not in requested:
            _remove_from_kernel(graph, members, head)
    return requested, tails


def _request_read_tensors(
    graph: OpGraph,
    chosen: Mapping[str, Precision],
    members: Mapping[str, str],
    tails: Mapping[str, str],
    requested: set[str],
) -> None:
    """Add the tensors that INT8 kernels read, from the readers to the producers."""
    for op in reversed(list(graph)):
        head = members.get(op.name)
        if head == op.name:
            if not op.joins_int8 or tails[head] in requested:
                requested.update(op.read_in_int8)
        elif head is not None:
            if tails[head] in requested:
                requested.update(source for source in op.inputs if members.get(source) != head)
        elif _passes_int8_on(op, chosen) and op.name in requested:
            requested.update(op.inputs)


def _request_joined_tensors(
    graph: OpGraph,
    chosen: Mapping[str, Precision],
    members: Mapping[str, str],
    tails: Mapping[str, str],
    requested: set[str],
) -> None:
    """Add the results of ops that join INT8 if kernels write all inputs in INT8.

    Instead of several inputs, the result is dequantized then.
    """
    written: set[str] = set()
    in_float: set[str] = set()
    for op in graph:
        head = members.get(op.name)
        if head == op.name and op.joins_int8:
            if written.issuperset(op.read_in_int8):
                requested.add(tails[head])
            elif written.isdisjoint(op.read_in_int8):
                in_float.add(head)
        if head is None:
            in_int8 = _passes_int8_on(op, chosen) and written.issuperset(op.inputs)
        else:
            may_write = op.name in requested or graph[head].may_write_int8
            in_int8 = tails[head] == op.name and head not in in_float and may_write
        if in_int8:
            written.add(op.name)


def _passes_int8_on(op: Op, chosen: Mapping[str, Precision]) -> bool:
    return op.quantize_agnostic and chosen.get(op.name, Precision.INT8) is Precision.INT8


def find_observable_tensors(graph: OpGraph, int8_ops: frozenset[str]) -> frozenset[str]:
    """Return every tensor that is quantized under some plan using only these INT8 ops.

    Tensors within a fusion group are not quantized, except for the terms of a sum that rounds them
    (`Op.quantizes_terms`). An op that joins INT8 nowhere when all of these ops run in INT8 joins
    under no plan.
    """
    tensors: set[str] = set()
    _, members = _propagate_int8(graph, dict.fromkeys(int8_ops, Precision.INT8))
    for op in graph:
        head = op.name if op.name in int8_ops else op.fusion_group
        if head not in int8_ops or (graph[head].joins_int8 and head not in members):
            continue
        if op.name == head:
            tensors.update(op.read_in_int8)
        else:
            tensors.update(
                source
                for source in op.inputs
                if op.quantizes_terms
                or (source != head and (source not in graph or graph[source].fusion_group != head))
            )
        last = not any(reader.fusion_group == head for reader in graph.consumers(op.name))
        if last and (graph[head].writes_int8 or graph[head].joins_int8):
            tensors.add(op.name)
    for op in reversed(list(graph)):
        if op.quantize_agnostic and op.name in tensors:
            tensors.update(op.inputs)
    return frozenset(tensors)
