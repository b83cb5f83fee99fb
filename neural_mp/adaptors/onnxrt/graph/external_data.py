"""Reading and writing of ONNX files without loading their weights.

Parsing a whole file costs twice its size in memory, and ONNX Runtime copies a parsed model.
Therefore every large initializer becomes external data of the same file: a file offset instead of
bytes. Files use the wire format of Protocol Buffers
(https://protobuf.dev/programming-guides/encoding); field numbers are those of `onnx.proto`. On
writing, weights are copied one by one.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from io import BytesIO
from pathlib import Path
from typing import BinaryIO

import onnx
import onnx_ir as ir
from google.protobuf.message import DecodeError

#: Smaller initializers are loaded.
_EXTERNAL_MIN_BYTES = 1024
_MODEL_GRAPH, _GRAPH_INITIALIZER = 7, 5
_TENSOR_RAW_DATA = 9
_VARINT, _EIGHT_BYTES, _DELIMITED, _FOUR_BYTES = 0, 1, 2, 5


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
