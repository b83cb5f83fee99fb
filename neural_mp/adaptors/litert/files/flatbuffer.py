"""Bounds-checked reading of flatbuffers: the readers of the schema follow any offset."""

from __future__ import annotations

import struct
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any

from ai_edge_litert import schema_py_generated as schema

#: Values of a table by the names of the schema, without those that have their default.
Table = Mapping[str, Any]
#: Limit of the runtime's own check.
MAX_TABLES = 1_000_000
#: Bytes that are read over bytes of the file: writers may store equal strings once.
MAX_READ_RATIO = 4

_SCALARS = {
    "PrependBoolSlot": "?",
    "PrependInt8Slot": "b",
    "PrependUint8Slot": "B",
    "PrependInt32Slot": "i",
    "PrependUint32Slot": "I",
    "PrependInt64Slot": "q",
    "PrependUint64Slot": "Q",
    "PrependFloat32Slot": "f",
}
_REFERENCE = "PrependUOffsetTRelativeSlot"
#: Format of the elements of vectors by their bytes.
_ELEMENTS = {1: "bytes", 2: "H*", 4: "i*", 8: "q*"}
_FLOATS = ("min", "max", "scale")
_TABLES = {
    ("Tensor", "quantization"): "QuantizationParameters",
    ("Tensor", "sparsity"): "SparsityParameters",
}
_VECTORS_OF_TABLES = {
    ("Model", "operatorCodes"): "OperatorCode",
    ("Model", "subgraphs"): "SubGraph",
    ("Model", "buffers"): "Buffer",
    ("Model", "metadata"): "Metadata",
    ("Model", "signatureDefs"): "SignatureDef",
    ("Model", "externalBufferGroups"): "ExternalBufferGroup",
    ("Model", "externalBuffers"): "ExternalBuffer",
    ("SubGraph", "tensors"): "Tensor",
    ("SubGraph", "operators"): "Operator",
    ("Tensor", "variantTensors"): "VariantSubType",
    ("SignatureDef", "inputs"): "TensorMap",
    ("SignatureDef", "outputs"): "TensorMap",
    ("SparsityParameters", "dimMetadata"): "DimensionMetadata",
}
#: Field with a table whose type another field holds as a number of an enumeration.
_UNIONS = {
    ("Operator", "builtinOptions"): "BuiltinOptions",
    ("Operator", "builtinOptions2"): "BuiltinOptions2",
    ("QuantizationParameters", "details"): "QuantizationDetails",
    ("DimensionMetadata", "arraySegments"): "SparseIndexVector",
    ("DimensionMetadata", "arrayIndices"): "SparseIndexVector",
}


class FlatbufferError(ValueError):
    """A reference that leaves the file, or a file that takes too long to read."""


@dataclass(frozen=True)
class Bytes:
    """A part of a file, which is not copied.

    Attributes:
        start: position of the first byte.
        size: number of bytes.
    """

    start: int
    size: int


@dataclass
class _SlotRecorder:
    """Stands for a builder of flatbuffers, and records what the schema asks to write."""

    slot: tuple[str, int] = ("", 0)
    element_bytes: int = 0

    def StartVector(self, element_bytes: int, *_: int) -> None:  # noqa: N802
        self.element_bytes = element_bytes

    def __getattr__(self, method: str) -> Any:
        def record(slot: int, *_: Any) -> None:
            self.slot = (method, slot)

        return record


@cache
def list_fields(table: str) -> tuple[tuple[int, str, str], ...]:
    """Return (slot, name, format) of all fields of a table of the schema."""
    prefix = f"{table}Add"
    writers = {
        name.removeprefix(prefix): writer
        for name, writer in vars(schema).items()
        if name.startswith(prefix)
    }
    return tuple(_describe_field(table, name, writer) for name, writer in writers.items())


def _describe_field(table: str, title: str, writer: Any) -> tuple[int, str, str]:
    recorder = _SlotRecorder()
    writer(recorder, 0)
    method, slot = recorder.slot
    name = title[0].lower() + title[1:]
    if method != _REFERENCE:
        return slot, name, _SCALARS[method]
    key = (table, name)
    if key in _TABLES:
        return slot, name, f"table {_TABLES[key]}"
    if key in _VECTORS_OF_TABLES:
        return slot, name, f"tables {_VECTORS_OF_TABLES[key]}"
    if key in _UNIONS:
        return slot, name, f"union {_UNIONS[key]}"
    start_vector = getattr(schema, f"{table}Start{title}Vector", None)
    if start_vector is None:
        return slot, name, "text"
    start_vector(recorder, 0)
    if name in _FLOATS:
        return slot, name, "f*"
    return slot, name, _ELEMENTS[recorder.element_bytes]


@cache
def _list_union_members(union: str) -> dict[int, str]:
    members = vars(getattr(schema, union)).items()
    return {number: name for name, number in members if isinstance(number, int) and number}


@dataclass
class FlatbufferReader:
    """Reads the tables of a flatbuffer in time that is linear in its size.

    Attributes:
        content: the file.
        tables: number of tables that were read.
        read_bytes: bytes of all tables and vectors that were read.
    """

    content: bytes
    tables: int = 0
    read_bytes: int = 0

    def read_root(self) -> Table:
        """Return the values of the root table and, nested, of all tables behind.

        Raises:
            FlatbufferError: a reference leaves the file.
        """
        return self._read_table(self._follow(0), "Model")

    def _unpack(self, kind: str, position: int) -> Any:
        size = struct.calcsize(f"<{kind}")
        if not 0 <= position <= len(self.content) - size:
            raise FlatbufferError(f"position {position} is outside of the file")
        return struct.unpack_from(f"<{kind}", self.content, position)[0]

    def _follow(self, position: int) -> int:
        distance: int = self._unpack("I", position)
        if not distance:
            raise FlatbufferError(f"the reference at {position} is empty")
        return position + distance

    def _count(self, size: int) -> None:
        self.read_bytes += size
        if self.read_bytes > MAX_READ_RATIO * len(self.content):
            raise FlatbufferError("the same bytes are read again and again")

    def _read_table(self, position: int, name: str) -> Table:
        self.tables += 1
        if self.tables > MAX_TABLES:
            raise FlatbufferError(f"more than {MAX_TABLES} tables")
        layout = position - self._unpack("i", position)
        layout_bytes, table_bytes = self._unpack("H", layout), self._unpack("H", layout + 2)
        if layout_bytes < 4 or table_bytes < 4 or position + table_bytes > len(self.content):
            raise FlatbufferError(f"the table at {position} is outside of the file")
        self._count(table_bytes)
        values: dict[str, Any] = {}
        for slot, key, kind in list_fields(name):
            entry = 4 + 2 * slot
            if entry + 2 > layout_bytes:
                continue
            offset = self._unpack("H", layout + entry)
            if offset:
                self._check_field(offset, table_bytes, kind)
                values[key] = self._read_field(position + offset, kind, values.get(f"{key}Type", 0))
        return values

    def _check_field(self, offset: int, table_bytes: int, kind: str) -> None:
        size = struct.calcsize(f"<{kind}") if len(kind) == 1 else 4
        if not 4 <= offset <= table_bytes - size:
            raise FlatbufferError("a value is outside of its table")

    def _read_field(self, position: int, kind: str, union_type: int) -> Any:
        if len(kind) == 1:
            return self._unpack(kind, position)
        target = self._follow(position)
        if kind.startswith("table "):
            return self._read_table(target, kind.removeprefix("table "))
        if kind.startswith("union "):
            member = _list_union_members(kind.removeprefix("union ")).get(union_type)
            return None if member is None else self._read_table(target, member)
        count = self._unpack("I", target)
        if kind.startswith("tables "):
            self._check_room(target, 4 * count)
            member = kind.removeprefix("tables ")
            references = range(target + 4, target + 4 + 4 * count, 4)
            return [self._read_table(self._follow(reference), member) for reference in references]
        return self._read_vector(target, count, kind)

    def _read_vector(self, position: int, count: int, kind: str) -> Any:
        start = position + 4
        if kind == "bytes":
            self._check_room(position, count, counted=False)
            return Bytes(start, count)
        if kind == "text":
            self._check_room(position, count + 1)
            return self.content[start : start + count].decode(errors="replace")
        element = kind[0]
        self._check_room(position, struct.calcsize(f"<{element}") * count)
        return struct.unpack_from(f"<{count}{element}", self.content, start)

    def _check_room(self, position: int, size: int, counted: bool = True) -> None:
        if position + 4 + size > len(self.content):
            raise FlatbufferError(f"the vector at {position} is outside of the file")
        if counted:
            self._count(size)
