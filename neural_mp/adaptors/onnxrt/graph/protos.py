"""Messages with what onnx-ir does not represent, and files read or written without their weights.

Classifiers of scikit-learn return a sequence of maps by default (`ZipMap`). A value of such a type
has no type in the graph; the type is kept beside it and written back into messages. Sparse
constants become dense, which integer kernels require, too.

Parsing a whole file costs twice its size in memory, and ONNX Runtime copies a parsed model.
Therefore every large initializer becomes external data of the same file: a file offset instead of
bytes. Files use the wire format of Protocol Buffers
(https://protobuf.dev/programming-guides/encoding); field numbers are those of `onnx.proto`. On
writing, weights are copied one by one.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from io import BytesIO
from pathlib import Path
from typing import BinaryIO

import numpy as np
import onnx
import onnx_ir as ir
from google.protobuf.message import DecodeError
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
#: Smaller initializers are loaded.
_EXTERNAL_MIN_BYTES = 1024
_MODEL_GRAPH, _GRAPH_INITIALIZER = 7, 5
_TENSOR_RAW_DATA = 9
_VARINT, _EIGHT_BYTES, _DELIMITED, _FOUR_BYTES = 0, 1, 2, 5


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


@dataclass(frozen=True)
class _Field:
    """One field of a message: number, start, and start and end of its value."""

    number: int
    start: int
    value: int
    end: int


def read_without_weights(path: Path) -> onnx.ModelProto:
    """Return the model in a file, with large initializers as external data of the same file.

    Raises:
        DecodeError: the file is not a complete ONNX file.
    """
    with path.open("rb") as file:
        size = path.stat().st_size
        parts = []
        for field in _read_fields(file, 0, size):
            if field.number == _MODEL_GRAPH:
                parts.append(_rewrite_graph(file, field, path.name))
            else:
                parts.append(_read_bytes(file, field.start, field.end))
    model = onnx.ModelProto()
    model.ParseFromString(b"".join(parts))
    return model


def write_with_weights(
    model: onnx.ModelProto, weights: Mapping[str, ir.TensorProtocol], path: Path
) -> None:
    """Write a model into one file, including its external initializers.

    `weights` are these by name. The initializers of `model` are removed.
    """
    initializers: list[tuple[bytes, ir.TensorProtocol | None]] = []
    for tensor in model.graph.initializer:
        value, key = None, b""
        if tensor.data_location == onnx.TensorProto.EXTERNAL:
            value = weights[tensor.name]
            key = _encode_key(_TENSOR_RAW_DATA, value.nbytes)
            del tensor.external_data[:]
            tensor.ClearField("data_location")
        initializers.append((tensor.SerializeToString() + key, value))
    del model.graph.initializer[:]
    bare = model.SerializeToString()
    sizes = [len(head) + (int(value.nbytes) if value else 0) for head, value in initializers]
    with path.open("wb") as file, BytesIO(bare) as source:
        for field in _read_fields(source, 0, len(bare)):
            if field.number != _MODEL_GRAPH:
                file.write(bare[field.start : field.end])
                continue
            keys = [_encode_key(_GRAPH_INITIALIZER, size) for size in sizes]
            whole = field.end - field.value + sum(sizes) + sum(map(len, keys))
            file.write(_encode_key(_MODEL_GRAPH, whole))
            file.write(bare[field.value : field.end])
            for key, (head, value) in zip(keys, initializers, strict=True):
                file.write(key + head)
                if value is not None:
                    file.write(read_raw_bytes(value))


def read_raw_bytes(tensor: ir.TensorProtocol) -> bytes:
    """Return the bytes of a tensor; file data is not mapped, as mappings stay in memory."""
    if not isinstance(tensor, ir.ExternalTensor):
        return bytes(tensor.tobytes())
    with Path(tensor.path).open("rb") as file:
        file.seek(tensor.offset or 0)
        return file.read(tensor.nbytes)


def _rewrite_graph(file: BinaryIO, graph: _Field, name: str) -> bytes:
    parts = []
    for field in _read_fields(file, graph.value, graph.end):
        if field.number == _GRAPH_INITIALIZER and field.end - field.value >= _EXTERNAL_MIN_BYTES:
            parts.append(
                _encode_delimited(_GRAPH_INITIALIZER, _externalize_initializer(file, field, name))
            )
        else:
            parts.append(_read_bytes(file, field.start, field.end))
    return _encode_delimited(_MODEL_GRAPH, b"".join(parts))


def _externalize_initializer(file: BinaryIO, tensor: _Field, name: str) -> bytes:
    parts = []
    for field in _read_fields(file, tensor.value, tensor.end):
        if field.number != _TENSOR_RAW_DATA:
            parts.append(_read_bytes(file, field.start, field.end))
            continue
        elsewhere = onnx.TensorProto(data_location=onnx.TensorProto.EXTERNAL)
        location = {"location": name, "offset": field.value, "length": field.end - field.value}
        for key, value in location.items():
            elsewhere.external_data.add(key=key, value=str(value))
        parts.append(elsewhere.SerializeToString())
    return b"".join(parts)


def _read_fields(file: BinaryIO, start: int, end: int) -> Iterator[_Field]:
    position = start
    while position < end:
        key, stop = _read_varint(file, position)
        kind = key & 7
        value = stop
        if kind == _VARINT:
            _, stop = _read_varint(file, value)
        elif kind == _DELIMITED:
            length, value = _read_varint(file, value)
            stop = value + length
        elif kind in (_EIGHT_BYTES, _FOUR_BYTES):
            stop = value + (8 if kind == _EIGHT_BYTES else 4)
        else:
            raise DecodeError(f"invalid field at byte {position}")
        if stop > end:
            raise DecodeError(f"the file ends within the field at byte {position}")
        yield _Field(key >> 3, position, value, stop)
        position = stop


def _read_varint(file: BinaryIO, position: int) -> tuple[int, int]:
    """Return a varint (seven bits per byte, lowest first) and the position after it."""
    file.seek(position)
    number = shift = 0
    for byte in file.read(10):
        number |= (byte & 127) << shift
        shift += 7
        position += 1
        if byte < 128:
            return number, position
    raise DecodeError(f"the number before byte {position} is incomplete")


def _read_bytes(file: BinaryIO, start: int, end: int) -> bytes:
    file.seek(start)
    return file.read(end - start)


def _encode_delimited(number: int, content: bytes) -> bytes:
    return _encode_key(number, len(content)) + content


def _encode_key(number: int, length: int) -> bytes:
    return _encode_varint(number << 3 | _DELIMITED) + _encode_varint(length)


def _encode_varint(number: int) -> bytes:
    groups = []
    while number > 127:
        groups.append(number & 127 | 128)
        number >>= 7
    return bytes([*groups, number])
