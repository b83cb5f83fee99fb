"""Reading an ONNX file without its weights, which stay in the file until they are needed.

Parsing a file whole takes twice its size in memory, and ONNX Runtime copies what it gets so. Here
every large initializer becomes external data of the file itself: its place in the file instead of
its bytes. Files are in Protocol Buffers' wire format
(https://protobuf.dev/programming-guides/encoding); field numbers are those of `onnx.proto`.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

import onnx
from google.protobuf.message import DecodeError

#: Initializers of fewer bytes are read with the rest.
_LARGE = 1024
_MODEL_GRAPH, _GRAPH_INITIALIZER = 7, 5
_TENSOR_RAW_DATA = 9
_VARINT, _EIGHT_BYTES, _DELIMITED, _FOUR_BYTES = 0, 1, 2, 5


@dataclass(frozen=True)
class _Field:
    """One field of a message: its number, where it starts, and where its value does and ends."""

    number: int
    start: int
    value: int
    end: int


def read_without_weights(path: Path) -> onnx.ModelProto:
    """The model of a file; its large initializers are external data that lies in the same file.

    Raises:
        DecodeError: it is no file of ONNX's, or not whole.
    """
    with path.open("rb") as file:
        size = path.stat().st_size
        parts = []
        for field in _fields(file, 0, size):
            if field.number == _MODEL_GRAPH:
                parts.append(_graph(file, field, path.name))
            else:
                parts.append(_bytes(file, field.start, field.end))
    model = onnx.ModelProto()
    model.ParseFromString(b"".join(parts))
    return model


def _graph(file: BinaryIO, graph: _Field, name: str) -> bytes:
    parts = []
    for field in _fields(file, graph.value, graph.end):
        if field.number == _GRAPH_INITIALIZER and field.end - field.value >= _LARGE:
            parts.append(_delimited(_GRAPH_INITIALIZER, _initializer(file, field, name)))
        else:
            parts.append(_bytes(file, field.start, field.end))
    return _delimited(_MODEL_GRAPH, b"".join(parts))


def _initializer(file: BinaryIO, tensor: _Field, name: str) -> bytes:
    parts = []
    for field in _fields(file, tensor.value, tensor.end):
        if field.number != _TENSOR_RAW_DATA:
            parts.append(_bytes(file, field.start, field.end))
            continue
        elsewhere = onnx.TensorProto(data_location=onnx.TensorProto.EXTERNAL)
        place = {"location": name, "offset": field.value, "length": field.end - field.value}
        for key, value in place.items():
            elsewhere.external_data.add(key=key, value=str(value))
        parts.append(elsewhere.SerializeToString())
    return b"".join(parts)


def _fields(file: BinaryIO, start: int, end: int) -> Iterator[_Field]:
    position = start
    while position < end:
        key, after = _varint(file, position)
        kind = key & 7
        value = after
        if kind == _VARINT:
            _, after = _varint(file, value)
        elif kind == _DELIMITED:
            length, value = _varint(file, value)
            after = value + length
        elif kind in (_EIGHT_BYTES, _FOUR_BYTES):
            after = value + (8 if kind == _EIGHT_BYTES else 4)
        else:
            raise DecodeError(f"no field begins at byte {position}")
        if after > end:
            raise DecodeError(f"the file is cut off within the field at byte {position}")
        yield _Field(key >> 3, position, value, after)
        position = after


def _varint(file: BinaryIO, position: int) -> tuple[int, int]:
    """A number of seven bits a byte, lowest first, and the position behind it."""
    file.seek(position)
    number = shift = 0
    for byte in file.read(10):
        number |= (byte & 127) << shift
        shift += 7
        position += 1
        if byte < 128:
            return number, position
    raise DecodeError(f"a number does not end before byte {position}")


def _bytes(file: BinaryIO, start: int, end: int) -> bytes:
    file.seek(start)
    return file.read(end - start)


def _delimited(number: int, content: bytes) -> bytes:
    return _as_varint(number << 3 | _DELIMITED) + _as_varint(len(content)) + content


def _as_varint(number: int) -> bytes:
    groups = []
    while number > 127:
        groups.append(number & 127 | 128)
        number >>= 7
    return bytes([*groups, number])
