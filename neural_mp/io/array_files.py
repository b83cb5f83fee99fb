"""Bounded reading of .npy and .npz files of unknown origin."""

from __future__ import annotations

import math
import zipfile
import zlib
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
from numpy.lib import format as npy

from neural_mp.io.limits import (
    MAX_COMPRESSION_RATIO,
    MAX_EMPTY_ARRAY_LENGTH,
    RATIO_EXEMPT_ARRAY_BYTES,
)

#: Exceptions for unreadable files and for unreadable arrays in an archive.
UNREADABLE = (ValueError, OSError, EOFError, zipfile.BadZipFile, zlib.error)
_ARRAY = ".npy"
_LONGEST = np.iinfo(np.intp).max


def load_arrays(path: Path, *, mapped: bool = False) -> Any:
    """Return the result of `numpy.load`; pickled objects are never read.

    Args:
        path: an `.npy` or `.npz` file.
        mapped: whether to memory-map an array instead of reading it.

    Raises:
        Exception: one of `UNREADABLE`: the file is missing, unreadable or damaged, holds pickled
            objects, or is smaller than declared.
    """
    with path.open("rb") as file:
        is_archive = file.read(4) == b"PK\x03\x04"
        if not is_archive:
            file.seek(0)
            _check_declared_array(file, path.stat().st_size, "the array")
    if is_archive:
        _check_archive(path)
    return np.load(path, mmap_mode="r" if mapped else None, allow_pickle=False)


def _check_archive(path: Path) -> None:
    try:
        with zipfile.ZipFile(path) as archive:
            for member in archive.infolist():
                _check_member(archive, member)
    except (RuntimeError, NotImplementedError) as error:  # e.g. encrypted, of an unknown version
        raise ValueError(str(error)) from error


def _check_member(archive: zipfile.ZipFile, member: zipfile.ZipInfo) -> None:
    shown = f"{member.filename[:100]!r}"
    packed_well = MAX_COMPRESSION_RATIO * member.compress_size
    if member.file_size > max(packed_well, RATIO_EXEMPT_ARRAY_BYTES):
        raise ValueError(
            f"{shown} has {member.file_size} bytes, compressed to {member.compress_size}"
        )
    if member.filename.endswith(_ARRAY):
        with archive.open(member) as file:
            _check_declared_array(file, member.file_size, shown)


def _check_declared_array(file: Any, size: int, what: str) -> None:
    try:
        shape, kind = _read_array_header(file)
    except Exception as error:
        # numpy parses text of the header as Python, which raises any type.
        raise ValueError(f"{what} has no valid numpy header: {error}") from error
    if kind.hasobject:
        raise ValueError(f"{what} holds pickled objects")
    needed, available = math.prod(shape) * kind.itemsize, size - file.tell()
    # An array without bytes could declare any number of samples.
    endless = not needed and any(length > MAX_EMPTY_ARRAY_LENGTH for length in shape)
    if not kind.itemsize or endless or any(not 0 <= length <= _LONGEST for length in shape):
        raise ValueError(f"{what} declares an impossible size")
    if needed > available:
        raise ValueError(f"{what} of shape {shape} requires {needed} bytes, got {available}")


def _read_array_header(file: BinaryIO) -> tuple[tuple[int, ...], np.dtype[Any]]:
    if npy.read_magic(file) == (1, 0):
        shape, _, kind = npy.read_array_header_1_0(file)
    else:  # version 3 differs only in the encoding of field names
        shape, _, kind = npy.read_array_header_2_0(file)
    return shape, kind
