"""Safe reader of plain tensors in `torch.save` files: runs no code named in pickles.

PyTorch's own safe reader takes a tensor's size from the pickle without checking the file.

A pickle of 100 bytes can hold a tuple of tuples that never finishes hashing or printing, and the C
unpickler allocates as much memory as the largest number in a pickle demands. Hence Python's
unpickler, limited to the few opcodes that `torch.save` writes.

Tensors, those of `.pt2` archives too, are views with bounds checked against the bytes in the file.
"""

from __future__ import annotations

import io
import math
import pickle
import re
import sys
import zipfile
from collections import OrderedDict
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, BinaryIO, ClassVar

import torch
from torch import nn

from neural_mp.io.archives import open_checked_archive
from neural_mp.io.limits import (
    MAX_DEPTH,
    MAX_EXPANSION_RATIO,
    MAX_PICKLE_NODES,
    RATIO_EXEMPT_ARRAY_BYTES,
)
from neural_mp.util.validators import preview_value

#: Opcodes that create values, as written by `torch.save`.
_STEPS = (
    "PROTO STOP MARK NONE NEWTRUE NEWFALSE BININT BININT1 BININT2 LONG1 LONG4 BINFLOAT"
    " SHORT_BINUNICODE BINUNICODE EMPTY_TUPLE TUPLE1 TUPLE2 TUPLE3 TUPLE EMPTY_LIST APPEND APPENDS"
    " EMPTY_DICT GLOBAL BINPERSID REDUCE NEWOBJ BINPUT LONG_BINPUT BINGET LONG_BINGET"
)
_DEVICE = re.compile(r"[a-z]{2,8}(:\d{1,3})?")
_PLAIN = (type(None), bool, int, float, complex, str, torch.dtype, torch.device, torch.layout)
_DTYPES = {name: kind for name, kind in vars(torch).items() if isinstance(kind, torch.dtype)}
#: Storage classes, which name dtypes in pickles; untyped storage names none.
_STORAGES = {
    "UntypedStorage": None,
    "DoubleStorage": torch.float64,
    "FloatStorage": torch.float32,
    "HalfStorage": torch.float16,
    "BFloat16Storage": torch.bfloat16,
    "LongStorage": torch.int64,
    "IntStorage": torch.int32,
    "ShortStorage": torch.int16,
    "CharStorage": torch.int8,
    "ByteStorage": torch.uint8,
    "BoolStorage": torch.bool,
    "ComplexDoubleStorage": torch.complex128,
    "ComplexFloatStorage": torch.complex64,
}


@dataclass(frozen=True)
class _Storage:
    key: str
    location: str
    dtype: torch.dtype | None


@dataclass(frozen=True)
class _Marker:
    """Storage class in a pickle, which stands for a dtype."""

    dtype: torch.dtype | None


class _Attribute:
    """Placeholder for tensor attributes, which are ignored."""


#: Placeholders for the two tensor classes.
_PLAIN_TENSOR, _PARAMETER = object(), object()


@dataclass(frozen=True)
class _Pickled:
    """A tensor as described by its pickle."""

    storage: Any
    offset: Any
    size: Any
    stride: Any
    requires_grad: Any
    dtype: Any = None
    parameter: bool = False


def read_plain(file: BinaryIO) -> Any:
    """Read nested tuples, lists and dicts of tensors and numbers from a `torch.save` file.

    Raises:
        ModelLoadError: if the archive is damaged.
        ValueError: if the file holds other content, or tensors that exceed their storage.
    """
    with open_checked_archive(file) as archive:
        root = archive.namelist()[0].partition("/")[0] if archive.namelist() else ""
        if f"{root}/data.pkl" not in archive.namelist():
            raise ValueError("the archive is not a file of torch.save")
        if f"{root}/byteorder" in archive.namelist():
            order = archive.read(f"{root}/byteorder").decode("ascii", "replace")
            if order != sys.byteorder:
                raise ValueError(f"the byte order must be {sys.byteorder}, got {order}")
        try:
            described = _Reader(archive.read(f"{root}/data.pkl")).load()
        except ValueError:
            raise
        except Exception as error:
            # A damaged pickle raises whatever its objects raise.
            raise ValueError(f"the pickle is damaged: {type(error).__name__}") from error
        return _Built(archive, root).build_value(described, 0)


def _get_opcode_byte(step: str) -> int:
    code: bytes = getattr(pickle, step)
    return code[0]


def _set_items(reader: Any, items: list[Any]) -> None:
    for key, value in zip(items[::2], items[1::2], strict=True):
        into = reader.stack[-1]
        if type(into) not in (dict, OrderedDict) or not isinstance(key, _PLAIN):
            raise ValueError("the keys of a dict must be names")
        into[key] = value


class _Reader(pickle._Unpickler):
    """Unpickler that maps the names of tensor components to placeholders."""

    dispatch: ClassVar[dict[int, Callable[..., None]]] = {
        **{
            code: pickle._Unpickler.dispatch[code] for code in map(_get_opcode_byte, _STEPS.split())
        },
        _get_opcode_byte("SETITEM"): lambda reader: _set_items(
            reader, [reader.stack.pop(-2), reader.stack.pop()]
        ),
        _get_opcode_byte("SETITEMS"): lambda reader: _set_items(reader, reader.pop_mark()),
        _get_opcode_byte("BUILD"): lambda reader: reader.stack.pop(),  # drops the state
    }

    def __init__(self, content: bytes) -> None:
        super().__init__(io.BytesIO(content), encoding="utf-8")

    def find_class(self, module: str, name: str) -> Any:
        match module, name:
            case "collections", "OrderedDict":
                return lambda: OrderedDict()  # items follow later in the pickle
            case "builtins" | "__builtin__", "complex":
                return complex
            case "builtins" | "__builtin__", "set":
                return lambda _items: _Attribute()  # only tensor attributes are sets
            case "torch", "Size":
                return tuple
            case "torch", "device":
                return torch.device
            case "torch._utils", "_rebuild_tensor_v2" | "_rebuild_tensor_v3":
                return _describe_tensor
            case "torch._utils", "_rebuild_parameter" | "_rebuild_parameter_with_state":
                return _describe_parameter
            case "torch._tensor", "_rebuild_from_type_v2":
                return _drop_attributes
            case "torch", "Tensor":
                return _PLAIN_TENSOR
            case "torch.nn.parameter", "Parameter":
                return _PARAMETER
            case "torch._dynamo.decorators", "_DimRange":
                return _Attribute
            case "torch.serialization", "_get_layout":
                return _parse_layout
            case (("torch" | "torch.storage"), _) if name in _STORAGES:
                return _Marker(_STORAGES[name])
            case "torch", _ if name in _DTYPES:
                return _DTYPES[name]
        raise ValueError(
            f"the pickle contains an object of {preview_value(f'{module}.{name}')}, which could "
            "run code"
        )

    def persistent_load(self, pid: object) -> _Storage:
        match pid:
            case ("storage", _Marker(dtype=dtype), str() as key, str() as location, int()):
                return _Storage(key, location, dtype)
        raise ValueError(f"the pickle contains an unknown storage {preview_value(pid)}")


def _describe_tensor(
    storage: object,
    offset: object,
    size: object,
    stride: object,
    requires_grad: object,
    *rest: object,
) -> _Pickled:
    dtype = rest[1] if len(rest) > 1 and isinstance(rest[1], torch.dtype) else None
    return _Pickled(storage, offset, size, stride, requires_grad, dtype)


def _describe_parameter(data: object, requires_grad: object, *_unused: object) -> _Pickled:
    if not isinstance(data, _Pickled):
        raise ValueError("a parameter must be a tensor")
    form = (data.storage, data.offset, data.size, data.stride, requires_grad, data.dtype)
    return _Pickled(*form, parameter=True)


def _drop_attributes(
    make: Callable[..., _Pickled], kind: object, arguments: Iterable[object], _attributes: object
) -> _Pickled:
    """Return a tensor without attributes left by an export with dynamic sizes."""
    if make not in (_describe_tensor, _describe_parameter):
        raise ValueError("a tensor must have the metadata of torch.save")
    tensor: _Pickled = make(*arguments)
    if kind is not (_PARAMETER if tensor.parameter else _PLAIN_TENSOR):
        raise ValueError("a tensor must not be of a subclass")
    return tensor


def _parse_layout(name: object) -> torch.layout:
    if name != "torch.strided":
        raise ValueError(f"the layout of a tensor must be torch.strided, got {preview_value(name)}")
    return torch.strided


class _Built:
    """Builder of tensors from their descriptions; shared values stay shared."""

    def __init__(self, archive: zipfile.ZipFile, root: str) -> None:
        self._archive, self._root = archive, root
        self._values: dict[str, torch.Tensor] = {}
        self._tensors: dict[int, torch.Tensor] = {}
        self._nodes = 0

    def build_value(self, value: Any, depth: int) -> Any:
        """Return a value with descriptions replaced by tensors."""
        self._nodes += 1
        if depth > MAX_DEPTH or self._nodes > MAX_PICKLE_NODES:
            raise ValueError(
                f"the values exceed the limit of {MAX_DEPTH} levels or {MAX_PICKLE_NODES} values"
            )
        if isinstance(value, _Pickled):
            if id(value) not in self._tensors:
                self._tensors[id(value)] = self._build_tensor(value)
            return self._tensors[id(value)]
        if type(value) in (tuple, list):
            return type(value)(self.build_value(item, depth + 1) for item in value)
        if type(value) in (dict, OrderedDict):
            return type(value)(
                (key, self.build_value(item, depth + 1)) for key, item in value.items()
            )
        if type(value) in _PLAIN:
            return value
        raise ValueError(f"expected tensors, got {preview_value(type(value).__name__)}")

    def _build_tensor(self, described: _Pickled) -> torch.Tensor:
        match described:
            case _Pickled(
                storage=_Storage(key=key, location=location, dtype=named),
                offset=int() as offset,
                size=tuple() as size,
                stride=tuple() as stride,
                requires_grad=bool() as requires_grad,
            ) if all(type(n) is int for n in (*size, *stride)):
                dtype = described.dtype or named
                if dtype is not None:
                    stored = self._read_storage_bytes(key, location)
                    tensor = strided_view(stored, View(dtype, size, stride, offset))
                    if described.parameter:
                        return nn.Parameter(tensor, requires_grad)
                    return tensor.requires_grad_(requires_grad)
        raise ValueError("a tensor must have the metadata of torch.save")

    def _read_storage_bytes(self, key: str, location: str) -> torch.Tensor:
        if key not in self._values:
            name = f"{self._root}/data/{key}"
            if name not in self._archive.namelist() or not _DEVICE.fullmatch(location):
                raise ValueError(
                    f"the archive must contain the storage {preview_value(key)} of a tensor"
                )
            self._values[key] = move_to_device(read_values(self._archive, name), location)
        return self._values[key]


#: dtype numbers in programs written by `torch.export.save`.
_DTYPE_NAMES = {
    1: "uint8",
    2: "int8",
    3: "int16",
    4: "int32",
    5: "int64",
    6: "float16",
    7: "float32",
    8: "float64",
    9: "complex32",
    10: "complex64",
    11: "complex128",
    12: "bool",
    13: "bfloat16",
    28: "uint16",
    29: "float8_e4m3fn",
    30: "float8_e5m2",
    31: "float8_e4m3fnuz",
    32: "float8_e5m2fnuz",
    33: "float8_e8m0fnu",
    34: "uint32",
    35: "uint64",
}
_STRIDED = 7
_CHUNK = 2**20


@dataclass(frozen=True)
class View:
    """Layout of a tensor in a shared storage; stride and offset count elements, not bytes."""

    dtype: torch.dtype
    size: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int


def read_values(archive: zipfile.ZipFile, name: str) -> torch.Tensor:
    """Return the bytes of an archive member, which must fit into memory."""
    values = torch.empty(archive.getinfo(name).file_size, dtype=torch.uint8)
    room = memoryview(values.numpy())
    with archive.open(name) as member:
        done = 0
        while done < len(room):
            chunk = member.read(_CHUNK)
            if not chunk:
                raise ValueError(f"the archive member {name!r} is truncated")
            room[done : done + len(chunk)] = chunk
            done += len(chunk)
        if member.read(1):
            raise ValueError(f"the archive member {name!r} exceeds its declared size")
    return values


def strided_view(values: torch.Tensor, view: View) -> torch.Tensor:
    """Return a strided view of these bytes.

    Raises:
        ValueError: if the view exceeds the bytes, or repeats them excessively.
    """
    if not (len(view.size) == len(view.stride) <= torch.iinfo(torch.int8).max // 2 + 1):
        raise ValueError(
            f"a tensor of {len(view.size)} axes must have as many strides, got {len(view.stride)}"
        )
    if min((view.offset, *view.size, *view.stride)) < 0:
        raise ValueError(f"sizes and strides must be at least 0, got {view.size} and {view.stride}")
    item = view.dtype.itemsize
    count = math.prod(view.size)
    last = sum((n - 1) * step for n, step in zip(view.size, view.stride, strict=True))
    needed = view.offset + (last + 1 if count else 0)
    if needed * item > values.numel():
        raise ValueError(
            f"a tensor of the size {view.size} requires {needed * item} bytes, got {values.numel()}"
        )
    if count * item > max(RATIO_EXEMPT_ARRAY_BYTES, MAX_EXPANSION_RATIO * values.numel()):
        raise ValueError(
            f"a tensor of the size {view.size} repeats {values.numel()} bytes too often"
        )
    usable = values[: values.numel() // item * item].view(view.dtype)
    return torch.as_strided(usable, view.size, view.stride, view.offset)


def parse_tensor_view(meta: dict[str, Any]) -> View:
    """Return the layout of a tensor according to the program's metadata.

    Raises:
        ValueError: if dtype or memory layout is not supported, or a size is not a number.
    """
    dtype = getattr(torch, _DTYPE_NAMES.get(meta["dtype"], ""), None)
    if dtype is None or meta["layout"] != _STRIDED:
        raise ValueError(f"unsupported tensor: data type {meta['dtype']}, layout {meta['layout']}")
    sizes, strides = (tuple(map(_parse_size, meta[key])) for key in ("sizes", "strides"))
    return View(dtype, sizes, strides, _parse_size(meta["storage_offset"]))


def _parse_size(size: object) -> int:
    match size:
        case {"as_int": int() as number}:
            return number
    raise ValueError(f"the size of a tensor must be an integer, got {preview_value(size)}")


def move_to_device(values: torch.Tensor, device: str) -> torch.Tensor:
    """Move bytes to the device named in a file.

    Raises:
        ValueError: if this machine has no such device.
    """
    if device == "cpu":
        return values
    try:
        return values.to(device)
    except (RuntimeError, AssertionError, NotImplementedError) as error:
        raise ValueError(f"the device {device!r} of a tensor is not available") from error
