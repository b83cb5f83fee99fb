"""Helpers to read and edit nodes, and to insert names and constants into a graph."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import numpy as np
import onnx_ir as ir
from onnx_ir.passes import common

from neural_mp.adaptors.common.naming import UniqueNames, reserve_name
from neural_mp.adaptors.common.signatures.signature import Array
from neural_mp.adaptors.onnxrt.graph.protos import is_map, read_raw_bytes
from neural_mp.adaptors.onnxrt.graph.subgraphs import (
    in_order,
    iterate_node_bodies,
    name_within_bodies,
)
from neural_mp.core.precision import Precision

#: 16-bit element type → precision.
SIXTEEN_BITS = {ir.DataType.BFLOAT16: Precision.BF16, ir.DataType.FLOAT16: Precision.FP16}

#: Types of attributes whose values are compared as they are.
PLAIN_ATTRIBUTES = frozenset(
    {
        ir.AttributeType.INT,
        ir.AttributeType.INTS,
        ir.AttributeType.FLOAT,
        ir.AttributeType.FLOATS,
        ir.AttributeType.STRING,
    }
)


def get_node_input(node: ir.Node, position: int) -> ir.Value | None:
    """Return the input at a position; None if it is omitted."""
    return node.inputs[position] if position < len(node.inputs) else None


def put_input(node: ir.Node, position: int, value: ir.Value) -> None:
    """Set the input at a position, appending it if necessary."""
    node.resize_inputs(max(len(node.inputs), position + 1))
    node.replace_input_with(position, value)


def list_used_outputs(node: ir.Node) -> list[ir.Value]:
    """Return the results with a consumer, and always the first."""
    return [
        value
        for index, value in enumerate(node.outputs)
        if index == 0 or value.uses() or value.is_graph_output()
    ]


def is_tensor(value: ir.Value) -> bool:
    """Whether a value is a tensor or of unknown type, not a sequence, optional or map."""
    if value.type is None:
        return not is_map(value)
    return isinstance(value.type, ir.TensorType)


def get_known_sizes(value: ir.Value) -> tuple[int | None, ...] | None:
    """Return the shape of a value, None for a free size; None if the rank is unknown."""
    if value.shape is None:
        return None
    return tuple(size if isinstance(size, int) else None for size in value.shape)


def is_float32(value: ir.Value | None) -> bool:
    """Whether a tensor is known to hold float32."""
    return value is not None and is_tensor(value) and value.dtype is ir.DataType.FLOAT


def get_constant_array(value: ir.Value | None) -> Array | None:
    """Return the value of a constant; None for a computed value."""
    if value is None or value.const_value is None:
        return None
    tensor = value.const_value
    if not isinstance(tensor, ir.ExternalTensor) or tensor.dtype.bitwidth % 8:
        return np.asarray(tensor.numpy())
    return np.frombuffer(read_raw_bytes(tensor), tensor.dtype.numpy()).reshape(tensor.shape.numpy())


def iterate_node_constants(node: ir.Node) -> Iterator[ir.TensorProtocol]:
    """Yield the constants that a node reads."""
    for value in node.inputs:
        if value is not None and value.const_value is not None:
            yield value.const_value


def list_nested_graphs(graph: ir.Graph) -> tuple[ir.Graph, ...]:
    """Return a graph and all graphs within its nodes."""
    return (graph, *graph.subgraphs())


def iterate_all_constants(program: ir.Model) -> Iterator[ir.TensorProtocol]:
    """Yield all constants, in initializers and Constant nodes, including inner graphs."""
    for part in list_nested_graphs(program.graph):
        for value in part.initializers.values():
            if value.const_value is not None:
                yield value.const_value
        for node in part:
            if node.op_type == "Constant" and "value" in node.attributes:
                yield node.attributes["value"].as_tensor()


def count_tensor_bytes(tensor: ir.TensorProtocol) -> int:
    """Return the size of a tensor in bytes; 0 for strings."""
    return 0 if tensor.dtype is ir.DataType.STRING else int(tensor.nbytes)


def require_constant_array(value: ir.Value | None) -> Array:
    """Return the value of a tensor that must be a constant."""
    array = get_constant_array(value)
    assert array is not None
    return array


def read_by(node: ir.Node) -> Iterator[ir.Value]:
    """Yield the values that a node reads: its inputs, and the outputs of its bodies."""
    yield from (value for value in node.inputs if value is not None)
    for body in iterate_node_bodies(node):
        yield from body.outputs


def redirect_reads(node: ir.Node, value: ir.Value, replacement: ir.Value) -> None:
    """Replace a value that a node reads (see `read_by`)."""
    if replacement is value:
        return
    for position, operand in enumerate(node.inputs):
        if operand is value:
            node.replace_input_with(position, replacement)
    for body in iterate_node_bodies(node):
        for position, operand in enumerate(body.outputs):
            if operand is value:
                body.outputs[position] = replacement
                replacement.type, replacement.shape = value.type, value.shape


def forget_types(graph: ir.Graph) -> None:
    """Remove types and shapes within a graph and its bodies; ONNX Runtime infers them."""
    for node in in_order(graph):
        for value in node.outputs:
            if not value.is_graph_output():
                value.type = value.shape = None


def correct_declarations(program: ir.Model) -> None:
    """Replace sizes of -1, written by some exporters, by unknown sizes.

    Initializers get the type and shape of their values: ONNX Runtime ignores other declarations.
    """
    for part in list_nested_graphs(program.graph):
        for value in part.initializers.values():
            if value.const_value is not None:
                value.dtype = value.const_value.dtype
                value.shape = ir.Shape(value.const_value.shape.numpy())
        for value in (*part.inputs, *(result for node in part for result in node.outputs)):
            if value.shape is not None and any(isinstance(s, int) and s < 0 for s in value.shape):
                sizes = [None if isinstance(s, int) and s < 0 else s for s in value.shape]
                value.shape = ir.Shape(sizes)


def computes_same(program: ir.Model, other: ir.Model) -> bool:
    """Whether two graphs are one but for names of nodes and declared shapes.

    False for graphs with functions or bodies, which are not compared.
    """
    graphs = program.graph, other.graph
    if program.functions or other.functions or len(graphs[0]) != len(graphs[1]):
        return False
    if program.opset_imports != other.opset_imports or program.ir_version != other.ir_version:
        return False
    ports = [[_list_names(graph.inputs), _list_names(graph.outputs)] for graph in graphs]
    if ports[0] != ports[1] or graphs[0].initializers.keys() != graphs[1].initializers.keys():
        return False
    constants = (
        (value.const_value, graphs[1].initializers[name].const_value)
        for name, value in graphs[0].initializers.items()
    )
    if not all(_stores_same(first, second) for first, second in constants):
        return False
    pairs = zip(*graphs, strict=True)
    return all(_describe_node(first) == _describe_node(second) for first, second in pairs)


def _list_names(values: Iterable[ir.Value | None]) -> list[str | None]:
    return [None if value is None else value.name for value in values]


def _stores_same(tensor: ir.TensorProtocol | None, other: ir.TensorProtocol | None) -> bool:
    """Whether two constants surely have the same content."""
    if tensor is None or other is None or tensor.dtype is not other.dtype:
        return False
    if tensor.dtype is ir.DataType.STRING or tensor.shape != other.shape:
        return False
    if isinstance(tensor, ir.ExternalTensor) or isinstance(other, ir.ExternalTensor):
        places = [
            (item.path, item.offset, item.length) if isinstance(item, ir.ExternalTensor) else None
            for item in (tensor, other)
        ]
        return places[0] == places[1]
    return tensor.tobytes() == other.tobytes()


def _describe_node(node: ir.Node) -> tuple[object, ...]:
    """Return all of a node that decides on its results; unequal to any other for bodies."""
    attributes = {
        item.name: (item.type, item.value if item.type in PLAIN_ATTRIBUTES else object())
        for item in node.attributes.values()
    }
    ports = _list_names(node.inputs), _list_names(node.outputs)
    return node.domain, node.op_type, node.overload, attributes, ports


class GraphNames:
    """The names in a graph, and new names for insertions."""

    def __init__(self, graph: ir.Graph) -> None:
        self._graph = graph
        names = set[str]()
        for part in list_nested_graphs(graph):
            results = (value for node in part for value in node.outputs)
            names.update(part.initializers)
            names.update(str(named.name) for named in (*part.inputs, *part, *results))
        self._names = UniqueNames(names)

    def reserve_name(self, name: str) -> str:
        """Reserve and return an unused name."""
        return self._names.reserve(name)

    def give_up(self, name: str) -> None:
        """Release a name."""
        self._names.give_up(name)

    def add_constant(self, name: str, value: object, dtype: ir.DataType | None = None) -> ir.Value:
        """Add a constant to the graph and return it."""
        array = np.asarray(value)
        tensor = ir.Tensor(array, dtype, name=self.reserve_name(name))
        initializer = ir.val(tensor.name, tensor.dtype, tensor.shape, const_value=tensor)
        self._graph.register_initializer(initializer)
        return initializer


def name_nodes(program: ir.Model) -> None:
    """Make the names of nodes and tensors unique.

    Nodes and inputs have distinct names, as plans and ranges use a single namespace.
    """
    common.NameFixPass()(program)
    input_names = {str(value.name) for value in program.graph.inputs}
    names = {str(node.name) for node in program.graph} | input_names
    for node in program.graph:
        if node.name in input_names:
            node.name = reserve_name(f"{node.name}_{node.op_type}", names)
    name_within_bodies(program)
