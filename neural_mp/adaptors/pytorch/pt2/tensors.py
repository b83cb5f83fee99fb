"""Tensors from files, with bounds checked against the bytes in the file."""

from __future__ import annotations

import math
import zipfile
from dataclasses import dataclass
from typing import Any

import torch

from neural_mp.io.limits import MAX_EXPANSION_RATIO, RATIO_EXEMPT_ARRAY_BYTES
from neural_mp.util.validators import preview

#: dtype numbers in programs written by `torch.export.save`.
_DTYPES = {
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


def viewed(values: torch.Tensor, view: View) -> torch.Tensor:
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


def view_of(meta: dict[str, Any]) -> View:
    """Return the layout of a tensor according to the program's metadata.

    Raises:
        ValueError: if dtype or memory layout is not supported, or a size is not a number.
    """
    dtype = getattr(torch, _DTYPES.get(meta["dtype"], ""), None)
    if dtype is None or meta["layout"] != _STRIDED:
        raise ValueError(f"unsupported tensor: data type {meta['dtype']}, layout {meta['layout']}")
    sizes, strides = (tuple(map(_parse_size, meta[key])) for key in ("sizes", "strides"))
    return View(dtype, sizes, strides, _parse_size(meta["storage_offset"]))


def _parse_size(size: object) -> int:
    match size:
        case {"as_int": int() as number}:
            return number
    raise ValueError(f"the size of a tensor must be an integer, got {preview(size)}")


def placed(values: torch.Tensor, device: str) -> torch.Tensor:
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
