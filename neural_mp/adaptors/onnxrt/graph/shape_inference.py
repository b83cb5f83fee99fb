"""Types and shapes of all tensors of a graph, as far as ONNX infers them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import onnx
import onnx_ir as ir

from neural_mp.adaptors.onnxrt.graph.file_checks import iterate_nested_graphs

#: Constants with more bytes are not part of the message for ONNX.
_MOST_BYTES = 1000


def infer_tensor_types(program: ir.Model) -> None:
    """Set element types and shapes of tensors, in place; names must be unique across bodies.

    The pass of onnx-ir does the same in time that grows with the square of the constants, and
    reads the whole graph back.
    """
    with _without_large_constants(program) as constants:
        proto = ir.to_proto(program)
    ports = {port.name for port in proto.graph.input}
    missing = (value for value in constants if value.name not in ports)
    proto.graph.input.extend(map(ir.serde.serialize_value, missing))
    inferred = onnx.shape_inference.infer_shapes(proto, data_prop=True)
    types = {
        item.name: item.type.SerializeToString()
        for graph in iterate_nested_graphs([inferred.graph])
        for item in (*graph.value_info, *graph.input, *graph.output)
        if item.type.HasField("tensor_type")
    }
    # Long graphs repeat a few types.
    parsed = {content: _parse_type(content) for content in set(types.values())}
    for graph in program.graphs():
        for value in (*graph.inputs, *(result for node in graph for result in node.outputs)):
            if value.name in types:
                _set_type(value, *parsed[types[value.name]])


@contextmanager
def _without_large_constants(program: ir.Model) -> Iterator[list[ir.Value]]:
    """Remove large constants from a graph for a while; yield all constants."""
    initializers = program.graph.initializers
    constants = list(initializers.values())
    large = [c for c in constants if c.const_value is None or c.const_value.nbytes > _MOST_BYTES]
    for value in large:
        initializers.pop(str(value.name))
    try:
        yield constants
    finally:
        for value in large:
            initializers.add(value)


def _parse_type(content: bytes) -> tuple[ir.DataType | None, ir.Shape | None]:
    """Return the element type and shape of a serialized tensor type."""
    kind = onnx.TypeProto.FromString(content)
    inferred = ir.serde.deserialize_type_proto_for_type(kind)
    dtype = None if inferred is None else inferred.dtype
    return dtype, ir.serde.deserialize_type_proto_for_shape(kind)


def _set_type(value: ir.Value, dtype: ir.DataType | None, shape: ir.Shape | None) -> None:
    if shape is not None and value.shape != shape:
        value.shape = shape.copy()
    if dtype is not None and value.dtype != dtype:
        value.dtype = dtype
