"""Copies that protect residual summands from in-place integer convolutions.

The kernel adds in place: the result overwrites the summand. If any other op still holds the memory
of the summand, the kernel crashes the process instead of copying. Therefore a summand is copied
unless all its other consumers are certain to run before the kernel.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
import tensorflow as tf

from neural_mp.adaptors.tensorflow.graph.control_flow import closure
from neural_mp.adaptors.tensorflow.graph.ops import INTEGER_KERNELS, Trait, has_trait
from neural_mp.adaptors.tensorflow.graph.tensor_graph import (
    Array,
    Consumers,
    TensorGraph,
    is_control,
    node_of,
)
from neural_mp.adaptors.tensorflow.kernels.integer_kernels import U8
from neural_mp.core.int8_accumulation import KernelKind

#: Input position of the summand, after input, weight and bias.
_SUMMAND = 3

#: A copy: ops, each with its constant operand, applied in sequence.
_Copy = Sequence[tuple[str, Array]]


def protect_summands(graph: TensorGraph, outputs: frozenset[str]) -> None:
    """Insert copies before kernels whose summand another op may still read."""
    consumers = graph.consumers()
    copies: dict[str, Iterator[_Copy]] = {}
    for name, node in list(graph.nodes.items()):
        kind = INTEGER_KERNELS.get(node.op)
        if kind is not KernelKind.CONVOLUTION or b"Sum" not in node.attr["fused_ops"].list.s:
            continue
        summand = node_of(node.input[_SUMMAND])
        if not _is_safe(graph, consumers, outputs, name, summand):
            variants = copies.setdefault(summand, _ways_to_copy())
            _copy_before(graph, name, summand, next(variants))


def _is_safe(
    graph: TensorGraph,
    consumers: Consumers,
    outputs: frozenset[str],
    kernel: str,
    summand: str,
) -> bool:
    """Whether all other readers of the summand's memory have run before the kernel does."""
    sharing = _sharing_memory(graph, consumers, summand)
    if not sharing.isdisjoint(outputs) or any(not graph.nodes[n].input for n in sharing):
        return False
    ancestors = set(graph.pruned([kernel]).nodes) - {kernel}
    readers = {edge for name in sharing for edge in consumers[name]} - {(kernel, _SUMMAND)}
    # An alias that is no ancestor of the kernel would be read, or kept, later.
    return sharing <= ancestors and all(reader in ancestors for reader, _ in readers)


def _sharing_memory(graph: TensorGraph, consumers: Consumers, start: str) -> set[str]:
    def near(name: str) -> Iterator[str]:
        node = graph.nodes[name]
        yield from (r for r, _ in consumers[name] if has_trait(graph.nodes[r], Trait.SHARES_MEMORY))
        if has_trait(node, Trait.SHARES_MEMORY):
            yield from (node_of(t) for t in node.input[:1] if not is_control(t))

    return closure([start], graph.nodes, near)


def _ways_to_copy() -> Iterator[_Copy]:
    """Yield distinct op sequences that leave a uint8 tensor unchanged.

    The runtime's optimizer would merge identical copies of a tensor, so that they share memory.
    """
    for op, neutral in (("BitwiseOr", 0), ("BitwiseXor", 0), ("BitwiseAnd", 255)):
        for axes in range(5):
            yield [(op, np.full([1] * axes, neutral, np.uint8))]
    for first in range(1, 256):
        for second in range(first, 256):
            yield [("BitwiseXor", np.asarray(k, np.uint8)) for k in (first, second, first ^ second)]


def _copy_before(graph: TensorGraph, kernel: str, summand: str, steps: _Copy) -> None:
    stem = graph.unused(f"{kernel}/summand")
    last = graph.put("Bitcast", f"{stem}/bits", [summand], T=U8, type=tf.uint8)
    for number, (op, operand) in enumerate(steps):
        constant = graph.put_constant(f"{stem}/neutral_{number}", operand)
        last = graph.put(op, f"{stem}/copied_{number}", [last, constant], T=tf.uint8)
    graph.edit(kernel).input[_SUMMAND] = graph.put("Bitcast", stem, [last], T=tf.uint8, type=U8)
