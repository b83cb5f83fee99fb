"""Shape inference: the sizes that do not depend on the sizes of the inputs."""

from __future__ import annotations

import logging
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import cycle

import tensorflow as tf

from neural_mp.adaptors.common.signature import Shape
from neural_mp.adaptors.tensorflow.runtime import imported
from neural_mp.adaptors.tensorflow.tensor_graph import (
    CONTROL_FLOW,
    PLACEHOLDERS,
    GraphDef,
    NodeDef,
    TensorGraph,
    dtype_attribute,
    known_sizes,
    make_node,
    node_of,
    output_of,
    without_large,
)

logger = logging.getLogger(__name__)

#: Constants with more bytes are not used for shape inference.
_LARGE = 256
#: Values of unknown sizes, of the batch and of other axes, one set per turn. Small and large to
#: reveal limits on sizes, and distinct even after division by strides.
_BATCHES = (1, 3, 101, 1009)
_OTHERS = ((2, 1), (17, 11), (211, 157), (1511, 1237))
#: Minimum number of successful turns if a model refuses some sizes.
_LEAST_TURNS = 2


@dataclass(frozen=True)
class Shapes:
    """Shapes of the results of every node.

    Attributes:
        fixed: shapes with only the sizes that do not depend on the inputs.
        turns: shapes inferred with each set of sizes.
    """

    fixed: Mapping[str, list[Shape]]
    turns: tuple[Mapping[str, list[Shape]], ...]

    def __getitem__(self, tensor: str) -> Shape:
        return self.fixed[node_of(tensor)][output_of(tensor)]

    def alike(self, one: str, other: str) -> bool:
        """Whether the first results of two nodes have equal, known shapes in every turn."""
        pairs = [(turn[one][0], turn[other][0]) for turn in self.turns or (self.fixed,)]
        return all(a is not None and a == b and None not in a for a, b in pairs)


def shapes(graph: TensorGraph) -> Shapes:
    """Infer the shapes of a graph.

    From unknown sizes the runtime infers little (e.g. for the `Prod` of a `Shape`), from known
    sizes everything. Therefore the unknown sizes of the inputs are set to several sets of values;
    the sizes that never change do not depend on them.
    """
    if not any(_unknown(node) for node in graph.nodes.values()):
        return Shapes(_inferred(graph, None), ())
    turns = []
    for turn in range(len(_BATCHES)):
        try:
            turns.append(_inferred(graph, turn))
        except (ValueError, tf.errors.OpError):
            logger.debug("the graph rejects the sizes of turn %d", turn, exc_info=True)
    if len(turns) < _LEAST_TURNS:
        return Shapes(_inferred(graph, None), ())
    fixed = {
        name: [_common(shapes) for shapes in zip(*(turn[name] for turn in turns), strict=True)]
        for name in turns[0]
    }
    return Shapes(fixed, tuple(turns))


def _common(shapes: Sequence[Shape]) -> Shape:
    known = [shape for shape in shapes if shape is not None]
    if len(known) < len(shapes) or len({len(shape) for shape in known}) != 1:
        return None
    return tuple(sizes[0] if len(set(sizes)) == 1 else None for sizes in zip(*known, strict=True))


def _unknown(node: NodeDef) -> bool:
    if node.op not in PLACEHOLDERS or "shape" not in node.attr:
        return False
    proto = node.attr["shape"].shape
    return not proto.unknown_rank and any(dimension.size < 0 for dimension in proto.dim)


def _inferred(graph: TensorGraph, turn: int | None) -> dict[str, list[Shape]]:
    """Infer the shapes of a graph with one set of sizes.

    The runtime infers nothing about loop variables. Most keep their initial shape, which is
    assumed, except for sizes that turn out to differ in the next iteration.
    """
    following = {
        name: node.input[1]
        for name, node in graph.nodes.items()
        if node.op == "Merge" and [graph[t].op for t in node.input] == ["Enter", "NextIteration"]
    }
    begun: dict[str, Shape] = {}  # loop variables → the part of their shape that is constant
    while True:
        found = _inferred_with(graph, turn, following, begun)
        changed = {
            name: _common((found[name][0], found[after][0]))
            for name, after in following.items()
            if found[name][0] != found[after][0]
        }
        if all(name in begun and begun[name] == shape for name, shape in changed.items()):
            return found
        begun |= changed


def _inferred_with(
    graph: TensorGraph, turn: int | None, variables: Collection[str], begun: Mapping[str, Shape]
) -> dict[str, list[Shape]]:
    """Infer shapes with given shapes of loop variables at the start of every iteration."""
    small = without_large(graph, _LARGE)
    for node in small.node:
        if node.name in begun:
            types = {"dtype": dtype_attribute(node), "shape": tf.TensorShape(begun[node.name])}
            node.CopyFrom(make_node("Placeholder", node.name, **types))
        elif node.name in variables:
            node.op = "Identity"
            del node.input[1], node.attr["N"]
        elif node.op == "Enter":  # the runtime infers nothing here
            node.op = "Identity"
            for key in ("frame_name", "is_constant", "parallel_iterations"):
                del node.attr[key]
    if turn is not None:
        sizes = cycle(_OTHERS[turn])
        for node in filter(_unknown, (n for n in small.node if n.name not in begun)):
            for axis, dimension in enumerate(node.attr["shape"].shape.dim):
                if dimension.size < 0:
                    # The first axis is the batch, common to all inputs.
                    dimension.size = _BATCHES[turn] if axis == 0 else next(sizes)
    found = {name: [*known] for name, known in _imported_shapes(_bytes_of(small)).items()}
    for name in variables:
        found[name].append(())  # second result of a Merge: index of the input
    return found


def _bytes_of(graph: GraphDef) -> bytes:
    serialized: bytes = graph.SerializeToString(deterministic=True)
    return serialized


@lru_cache(maxsize=32)
def _imported_shapes(serialized: bytes) -> Mapping[str, tuple[Shape, ...]]:
    """Return node → shapes as the runtime infers them; a graph is asked for many times in a row."""
    operations = imported(GraphDef.FromString(serialized)).get_operations()
    return {
        operation.name: tuple(known_sizes(tensor.shape) for tensor in operation.outputs)
        for operation in operations
    }


def with_sizes(graph: TensorGraph, sizes: Mapping[str, tuple[int, ...]]) -> tf.Graph | None:
    """Return a graph imported with known sizes of its inputs, given tensor → shape.

    None for a graph with branches or loops, whose sizes depend on values, and for inputs in the
    middle of the graph.
    """
    named = {node_of(tensor): shape for tensor, shape in sizes.items()}
    if any(node.op in CONTROL_FLOW for node in graph.nodes.values()):
        return None
    if any(graph[name].op not in PLACEHOLDERS for name in named):
        return None
    small = without_large(graph, _LARGE)
    for node in small.node:
        if node.name in named:
            node.attr["shape"].shape.CopyFrom(tf.TensorShape(named[node.name]).as_proto())
    try:
        return imported(small)
    except (ValueError, tf.errors.OpError):
        logger.debug("the graph rejects the sizes of its inputs", exc_info=True)
        return None
