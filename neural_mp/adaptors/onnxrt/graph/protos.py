"""Messages with what onnx-ir does not represent: map types, and sparse constants.

Classifiers of scikit-learn return a sequence of maps by default (`ZipMap`). A value of such a type
has no type in the graph; the type is kept beside it and written back into messages. Sparse
constants become dense, which integer kernels require, too.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import onnx
import onnx_ir as ir
from onnx import numpy_helper

from neural_mp.adaptors.onnxrt.graph.file_checks import iterate_nested_graphs
from neural_mp.errors import ModelLoadError
from neural_mp.io.limits import (
    MAX_COMPRESSION_RATIO,
    RATIO_EXEMPT_ARRAY_BYTES,
    count_excess_bytes,
)

#: Key of the type of a value in its `meta`.
_TYPE = "neural_mp.map_type"
#: Domain without op definitions.
_UNKNOWN_DOMAIN = "neural_mp.unknown"


def parse_program_message(proto: onnx.ModelProto) -> ir.Model:
    """Return the graph of a message, which is changed."""
    removed: dict[str, onnx.TypeProto] = {}
    for graph in iterate_nested_graphs([proto.graph]):
        for value in (*graph.input, *graph.output, *graph.value_info):
            if _is_map(value.type):
                removed[value.name] = onnx.TypeProto.FromString(value.type.SerializeToString())
                value.ClearField("type")
    program = ir.from_proto(proto)
    for part in program.graphs():
        for port in (*part.inputs, *part.outputs):
            if port.name in removed:
                port.meta[_TYPE] = removed[port.name]
    return program


def is_map(value: ir.Value) -> bool:
    """Whether a value is declared as a map, or as a sequence of maps."""
    return _TYPE in value.meta


def serialize_to_message(program: ir.Model) -> onnx.ModelProto:
    """Return a graph as a message."""
    proto = ir.to_proto(program)
    _write_map_types(program, proto)
    return proto


def save_program(program: ir.Model, path: Path, external_data: str) -> None:
    """Write a graph into a file, and its weights into another."""
    ir.save(program, path, external_data=external_data)
    if any(map(is_map, (*program.graph.inputs, *program.graph.outputs))):
        proto = onnx.load(path, load_external_data=False)
        _write_map_types(program, proto)
        path.write_bytes(proto.SerializeToString())


@contextmanager
def hide_map_ops(program: ir.Model) -> Iterator[None]:
    """Hide the definitions of ops that return maps: onnx-ir fails on the inferred types."""
    hidden = [node for node in program.graph.all_nodes() if _returns_maps(node)]
    domains = [node.domain for node in hidden]
    for node in hidden:
        node.domain = _UNKNOWN_DOMAIN
    if hidden:  # an inference ends at a domain that the model does not import
        program.opset_imports[_UNKNOWN_DOMAIN] = 1
    try:
        yield
    finally:
        program.opset_imports.pop(_UNKNOWN_DOMAIN, None)
        for node, domain in zip(hidden, domains, strict=True):
            node.domain = domain


def _write_map_types(program: ir.Model, proto: onnx.ModelProto) -> None:
    ports = (*program.graph.inputs, *program.graph.outputs)
    types = {str(value.name): value.meta[_TYPE] for value in ports if is_map(value)}
    for value in (*proto.graph.input, *proto.graph.output):
        if value.name in types:
            value.type.CopyFrom(types[value.name])


def _returns_maps(node: ir.Node) -> bool:
    if not node.domain:
        return False
    try:
        schema = onnx.defs.get_schema(node.op_type, domain=node.domain)
    except onnx.defs.SchemaError:
        return False
    return any("map(" in kind for result in schema.outputs for kind in result.types)


def _is_map(kind: onnx.TypeProto) -> bool:
    nested = kind.WhichOneof("value")
    if nested in ("sequence_type", "optional_type"):
        return _is_map(getattr(kind, nested).elem_type)
    return nested == "map_type"


def without_sparse(proto: onnx.ModelProto) -> onnx.ModelProto:
    """Return a model with dense constants; the model itself if none is sparse.

    Raises:
        ModelLoadError: a constant exceeds the memory limit, or has indices out of bounds.
    """
    graphs = list(iterate_nested_graphs([proto.graph]))
    attributes = (a for graph in graphs for node in graph.node for a in node.attribute)
    tensors = [tensor for graph in graphs for tensor in graph.sparse_initializer]
    tensors += [a.sparse_tensor for a in attributes if a.HasField("sparse_tensor")]
    if not tensors:
        return proto
    excess = count_excess_bytes((_count_dense_bytes(t), t.ByteSize()) for t in tensors)
    if excess > RATIO_EXEMPT_ARRAY_BYTES:
        raise ModelLoadError(
            f"all sparse constants that are more than {MAX_COMPRESSION_RATIO} times larger when "
            f"dense must have at most {RATIO_EXEMPT_ARRAY_BYTES} bytes then, got {excess} bytes; "
            f"store dense tensors"
        )
    copy = onnx.ModelProto.FromString(proto.SerializeToString())
    for graph in iterate_nested_graphs([copy.graph]):
        graph.initializer.extend(map(_densify_tensor, graph.sparse_initializer))
        graph.ClearField("sparse_initializer")
        for node in graph.node:
            for attribute in node.attribute:
                if attribute.HasField("sparse_tensor"):
                    attribute.t.CopyFrom(_densify_tensor(attribute.sparse_tensor))
                    attribute.ClearField("sparse_tensor")
                    attribute.type, attribute.name = onnx.AttributeProto.TENSOR, "value"
    return copy


def _count_dense_bytes(sparse: onnx.SparseTensorProto) -> int:
    size = math.prod(sparse.dims) * numpy_helper.to_array(sparse.values).itemsize
    if min(sparse.dims, default=0) < 0 or size > RATIO_EXEMPT_ARRAY_BYTES:
        raise ModelLoadError(
            f"sparse constant {sparse.values.name!r} must have at most {RATIO_EXEMPT_ARRAY_BYTES} "
            f"bytes when dense, got the sizes {list(sparse.dims)}; store a dense tensor"
        )
    return size


def _densify_tensor(sparse: onnx.SparseTensorProto) -> onnx.TensorProto:
    name = sparse.values.name
    values, indices = numpy_helper.to_array(sparse.values), numpy_helper.to_array(sparse.indices)
    dense = np.zeros(math.prod(sparse.dims), values.dtype)
    try:
        if indices.ndim > 1:
            indices = np.ravel_multi_index(tuple(indices.T), tuple(sparse.dims))
        dense[indices] = values
    except (IndexError, ValueError) as error:
        raise ModelLoadError(
            f"the indices of the sparse constant {name!r} must lie within its sizes "
            f"{list(sparse.dims)}: {error}"
        ) from error
    return numpy_helper.from_array(dense.reshape(tuple(sparse.dims)), name)
