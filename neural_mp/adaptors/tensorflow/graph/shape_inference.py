"""Shape inference with symbolic sizes: a size is constant, or two are equal, only if derived.

TensorFlow's own inference derives constants from constants, but does not relate unknown sizes, and
stops at sizes that a graph computes (e.g. the `Prod` of a `Shape`). Rules for the usual op types
carry expressions of the sizes of the inputs through the graph; results of other ops have sizes of
TensorFlow's inference, and new unknowns.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from math import prod
from typing import TypeVar

import tensorflow as tf

from neural_mp.adaptors.common.signatures.signature import Shape
from neural_mp.adaptors.common.symbolic_sizes import Size, mark_as_size, unknown_size
from neural_mp.adaptors.tensorflow.graph.ops import (
    CONTROL_FLOW,
    PLACEHOLDERS,
    Role,
    get_op_properties,
    get_op_role,
)
from neural_mp.adaptors.tensorflow.graph.runtime import import_graph
from neural_mp.adaptors.tensorflow.graph.shape_elements import MAX_ELEMENTS, Elements, to_elements
from neural_mp.adaptors.tensorflow.graph.shape_rules import Facts, Sizes
from neural_mp.adaptors.tensorflow.graph.tensor_graph import (
    CONSTANT,
    GraphDef,
    NodeDef,
    TensorGraph,
    copy_node,
    count_constant_elements,
    get_node_name,
    get_output_index,
    list_data_inputs,
    list_known_sizes,
    list_result_dtypes,
    make_constant,
    make_node,
    without_large,
)
from neural_mp.util.text import format_count

logger = logging.getLogger(__name__)

_Result = TypeVar("_Result")
#: Constants with more bytes are not used for shape inference.
_LARGE = 256
#: Types of tensors that hold sizes.
_INTEGERS = (tf.int32, tf.int64)
_NOTHING = Facts(None)
#: Passes over a graph. Each gives up sizes that a loop changes; a chain of loop variables, each of
#: which takes the value of the one before, would take as many passes as it has variables.
MAX_PASSES = 16
#: Roles of the ops that feed the Merge of a loop variable: its first value, and the next.
_LOOP_VARIABLE = [Role.ENTER, Role.NEXT_ITERATION]
#: No size, and no number that sizes are computed from, is larger.
_MAX_SIZE = (1 << 63) - 1


@dataclass(frozen=True)
class Shapes:
    """Shapes of the results of every node.

    Attributes:
        fixed: shapes with only the sizes that are the same in every run.
        symbolic: shapes with expressions for other sizes.
    """

    fixed: Mapping[str, list[Shape]]
    symbolic: Mapping[str, list[tuple[Size, ...] | None]]

    def __getitem__(self, tensor: str) -> Shape:
        return self.fixed[get_node_name(tensor)][get_output_index(tensor)]

    def are_equal(self, lhs: str, rhs: str) -> bool:
        """Whether the first results of two nodes are certain to have equal shapes in every run."""
        first, second = self.symbolic[lhs][0], self.symbolic[rhs][0]
        return first is not None and first == second


def infer_shapes(graph: TensorGraph) -> Shapes:
    """Infer the shapes of a graph."""
    serialized: bytes = without_large(graph, _LARGE).SerializeToString(deterministic=True)
    return _infer_shapes(serialized)


@lru_cache(maxsize=32)
def _infer_shapes(serialized: bytes) -> Shapes:
    """Infer the shapes of a serialized graph; a graph is asked for many times in a row."""
    graph = TensorGraph.from_graph_def(GraphDef.FromString(serialized))
    static = _infer_static_shapes(graph)
    symbolic = _Inference(graph, static).infer_symbolic_shapes()
    fixed = {
        name: [
            None if shape is None else tuple(n if isinstance(n, int) else None for n in shape)
            for shape in results
        ]
        for name, results in symbolic.items()
    }
    return Shapes(fixed, symbolic)


def _infer_static_shapes(graph: TensorGraph) -> dict[str, list[Shape]]:
    """Return node → shapes as TensorFlow infers them."""
    return {
        operation.name: [list_known_sizes(tensor.shape) for tensor in operation.outputs]
        for operation in import_graph(graph.to_graph_def()).get_operations()
    }


class _Inference:
    """Inference of symbolic sizes in one graph."""

    def __init__(self, graph: TensorGraph, static: Mapping[str, list[Shape]]) -> None:
        self.graph, self.static = graph, static
        #: Loop variable, the Merge of [Enter, NextIteration] → the next value.
        self.following = {
            name: node.input[1]
            for name, node in graph.nodes.items()
            if get_op_role(node) is Role.MERGE
            and [get_op_role(graph[t]) for t in node.input] == _LOOP_VARIABLE
        }
        #: Loop variable → sizes that are the same in all iterations, None for others.
        self.invariant: dict[str, Sizes] = {}
        self.facts: dict[str, list[Facts]] = {}

    def infer_symbolic_shapes(self) -> dict[str, list[tuple[Size, ...] | None]]:
        """Return node → shapes of its results.

        Most loop variables keep the shape that they start with, which is assumed, except for sizes
        that turn out to differ in the next iteration. After `MAX_PASSES`, only ranks are assumed.
        """
        order = self.graph.prune_unused(self.graph.nodes).nodes
        for _ in range(MAX_PASSES):
            self._derive_facts(order)
            changed = {
                name: _keep_equal_sizes(
                    self._get_tensor_facts(name).shape, self._get_tensor_facts(successor).shape
                )
                for name, successor in self.following.items()
                if self._get_tensor_facts(name).shape != self._get_tensor_facts(successor).shape
            }
            if all(self.invariant.get(name, ()) == sizes for name, sizes in changed.items()):
                break
            self.invariant |= changed
        else:
            logger.warning(
                "the sizes of %s are unknown: loops changed some in each of %d passes over the "
                "graph",
                format_count(len(self.following), "loop variable"),
                MAX_PASSES,
            )
            self._assume_ranks(order)
        return {name: [f.shape for f in results] for name, results in self.facts.items()}

    def _assume_ranks(self, order: Mapping[str, NodeDef]) -> None:
        """Derive the facts from the ranks of loop variables, or from nothing if one changes."""
        shapes = {name: self._get_tensor_facts(name).shape for name in self.following}
        ranks: dict[str, Sizes] = {
            name: None if shape is None else (None,) * len(shape) for name, shape in shapes.items()
        }
        for assumed in (ranks, dict.fromkeys(self.following)):
            self.invariant = assumed
            self._derive_facts(order)
            pairs = (map(self._get_tensor_facts, pair) for pair in self.following.items())
            if all(
                _keep_equal_sizes(a.shape, b.shape) is not None or a.shape is None for a, b in pairs
            ):
                return

    def _derive_facts(self, order: Mapping[str, NodeDef]) -> None:
        self.facts = {}
        for name, node in order.items():
            self.facts[name] = self._infer_node_facts(node)

    def _get_tensor_facts(self, tensor: str) -> Facts:
        """Return the facts about a tensor; nothing for one of a later iteration of a loop."""
        results = self.facts.get(get_node_name(tensor))
        return results[get_output_index(tensor)] if results else _NOTHING

    def _infer_node_facts(self, node: NodeDef) -> list[Facts]:
        inputs = [self._get_tensor_facts(tensor) for tensor in list_data_inputs(node)]
        static = self.static[node.name]
        derived = self._derive_shapes(node, inputs)
        if len(derived) < len(static) and self._exceeds_static(node, inputs):
            static = self._infer_with_facts(node, inputs)
        merged = [
            _complete_sizes(
                f"{node.name}:{index}", shape, derived[index] if index < len(derived) else None
            )
            for index, shape in enumerate(static)
        ]
        values = self._infer_elements(node, inputs, merged)
        return [Facts(*pair) for pair in zip(merged, values, strict=True)]

    def _derive_shapes(self, node: NodeDef, inputs: Sequence[Facts]) -> Sequence[Sizes]:
        """Return shapes of the first results; empty if nothing can be derived."""
        if get_op_role(node) is Role.SWITCH:
            return [inputs[0].shape] * len(self.static[node.name])
        if get_op_role(node) is Role.MERGE:
            return [self._merge_shapes(node, [facts.shape for facts in inputs]), ()]
        return _try_rule(get_op_properties(node).shape, node, inputs) or ()

    def _merge_shapes(self, node: NodeDef, shapes: Sequence[tuple[Size, ...] | None]) -> Sizes:
        if node.name in self.following:
            return self.invariant.get(node.name, shapes[0])
        common: Sizes = shapes[0]
        for shape in shapes[1:]:
            common = _keep_equal_sizes(common, shape)
        return common

    def _infer_elements(
        self, node: NodeDef, inputs: Sequence[Facts], merged: Sequence[tuple[Size, ...] | None]
    ) -> list[Elements | None]:
        """Return the elements of each result that is a small tensor of integers, else None."""
        values: list[Elements | None] = [None] * len(merged)
        dtypes = list_result_dtypes(node)
        for index, shape in enumerate(merged):
            if index >= len(dtypes) or dtypes[index] not in _INTEGERS or shape is None:
                continue
            sizes = [size for size in shape if isinstance(size, int)]
            count = prod(sizes)
            if len(sizes) < len(shape) or count > MAX_ELEMENTS:
                continue
            derived = None
            if node.op == CONSTANT and count_constant_elements(node) == count:
                derived = to_elements(self.graph.constant_value(node.name).tolist())
            elif index == 0 or get_op_role(node) is Role.SWITCH:
                derived = _try_rule(get_op_properties(node).elements, node, inputs)
            if (
                derived is None
                or derived.size != count
                or not all(map(_is_small, derived.reshape(-1).tolist()))
            ):
                names = (f"{node.name}:{index}({position})" for position in range(count))
                derived = to_elements([unknown_size(name, nonnegative=False) for name in names])
            values[index] = derived.reshape(sizes)
        return values

    def _exceeds_static(self, node: NodeDef, inputs: Sequence[Facts]) -> bool:
        """Whether more is known of the inputs of a node than TensorFlow infers in the graph."""
        if node.op in (CONSTANT, *PLACEHOLDERS, *CONTROL_FLOW):
            return False
        for tensor, facts in zip(list_data_inputs(node), inputs, strict=True):
            if facts.shape is None:
                continue
            shape = self.static[get_node_name(tensor)][get_output_index(tensor)]
            sizes = [size if isinstance(size, int) else None for size in facts.shape]
            if shape is None or sizes != list(shape):
                return True
            if facts.value is not None and not self.graph.is_constant(tensor):
                return any(isinstance(element, int) for element in facts.elements)
        return False

    def _infer_with_facts(self, node: NodeDef, inputs: Sequence[Facts]) -> list[Shape]:
        """Return the shapes that TensorFlow infers of the results from what is known of inputs."""
        isolated = TensorGraph({}, self.graph.versions, self.graph.library)
        tensors = list_data_inputs(node)
        for position, (tensor, facts) in enumerate(zip(tensors, inputs, strict=True)):
            dtype = list_result_dtypes(self.graph[tensor])[get_output_index(tensor)]
            _add_stand_in(isolated, f"input_{position}", dtype, facts)
        name = isolated.unused_name("node")
        copy = copy_node(node, name)
        copy.input[:] = [f"input_{position}" for position in range(len(tensors))]
        isolated.add_node(copy)
        try:
            shapes_alone = _infer_static_shapes(isolated)[name]
        except (ValueError, tf.errors.OpError):
            logger.debug("TensorFlow rejects the inputs of %s", node.name, exc_info=True)
            return self.static[node.name]
        pairs = zip(self.static[node.name], shapes_alone, strict=True)
        return [_combine_known_sizes(static, inferred) for static, inferred in pairs]


def _add_stand_in(graph: TensorGraph, name: str, dtype: tf.DType, facts: Facts) -> None:
    """Add a node of which TensorFlow infers the known sizes and elements of a tensor."""
    if facts.value is None or facts.value.ndim > 1:
        sizes = facts.shape
        shape = None if sizes is None else [n if isinstance(n, int) else None for n in sizes]
        graph.put_node("Placeholder", name, dtype=dtype, shape=tf.TensorShape(shape))
        return
    parts = []
    for position, element in enumerate(facts.elements):
        part = f"{name}/{position}" if facts.value.ndim else name
        if isinstance(element, int):
            graph.add_node(make_constant(part, element, dtype))
        else:
            graph.put_node("Placeholder", part, dtype=dtype, shape=tf.TensorShape([]))
        parts.append(part)
    if facts.value.ndim and parts:
        graph.add_node(make_node("Pack", name, parts, T=dtype, N=len(parts), axis=0))
    elif facts.value.ndim:
        graph.put_node("Placeholder", name, dtype=dtype, shape=tf.TensorShape([0]))


def _try_rule(
    rule: Callable[[NodeDef, Sequence[Facts]], _Result] | None,
    node: NodeDef,
    inputs: Sequence[Facts],
) -> _Result | None:
    """Return the result of a rule; None without a rule, or if more must be known."""
    try:
        return None if rule is None else rule(node, inputs)
    except (ValueError, IndexError, ArithmeticError):
        return None


def _keep_equal_sizes(first: Sizes, second: Sizes) -> Sizes:
    """Return a shape with the sizes that are equal in both, None for others."""
    if first is None or second is None or len(first) != len(second):
        return None
    return tuple(a if a == b else None for a, b in zip(first, second, strict=True))


def _combine_known_sizes(first: Shape, second: Shape) -> Shape:
    if first is None or second is None or len(first) != len(second):
        return second if first is None else first
    return tuple(b if a is None else a for a, b in zip(first, second, strict=True))


def _complete_sizes(tensor: str, static: Shape, derived: Sizes) -> tuple[Size, ...] | None:
    """Return constants of TensorFlow's inference, derived sizes, and new unknowns for the rest."""
    if derived is None or (static is not None and len(static) != len(derived)):
        derived = None if static is None else (None,) * len(static)
    if derived is None:
        return None
    constants = (None,) * len(derived) if static is None else static
    sizes: list[Size] = []
    for axis, (constant, size) in enumerate(zip(constants, derived, strict=True)):
        if constant is not None:
            sizes.append(constant)
        elif size is not None and _is_small(size) and not (isinstance(size, int) and size < 0):
            sizes.append(mark_as_size(size))
        else:
            sizes.append(unknown_size(f"{tensor}[{axis}]"))
    return tuple(sizes)


def _is_small(size: Size) -> bool:
    return not isinstance(size, int) or abs(size) <= _MAX_SIZE


def with_sizes(graph: TensorGraph, sizes: Mapping[str, tuple[int, ...]]) -> tf.Graph | None:
    """Return a graph imported with known sizes of its inputs, given tensor → shape.

    None for a graph with branches or loops, whose sizes depend on values, and for inputs in the
    middle of the graph.
    """
    named = {get_node_name(tensor): shape for tensor, shape in sizes.items()}
    if any(node.op in CONTROL_FLOW for node in graph.nodes.values()):
        return None
    if any(graph[name].op not in PLACEHOLDERS for name in named):
        return None
    small = without_large(graph, _LARGE)
    for node in small.node:
        if node.name in named:
            node.attr["shape"].shape.CopyFrom(tf.TensorShape(named[node.name]).as_proto())
    try:
        return import_graph(small)
    except (ValueError, tf.errors.OpError):
        logger.debug("the graph rejects the sizes of its inputs", exc_info=True)
        return None
