"""Files of numpy, seen to before an array of them is made.

numpy makes room for an array by what the file says of its size, and takes that word for word.
"""

from __future__ import annotations

import math
import zipfile
import zlib
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
from numpy.lib import format as npy

#: What is raised of a file that cannot be read, also when an array is taken out of an archive.
UNREADABLE = (ValueError, OSError, EOFError, zipfile.BadZipFile, zlib.error)
#: How many times its size in the archive an array may be, and what it may be anyhow.
_MOST_PACKED, _SMALL = 200, 2**30
_ARRAY = ".npy"
_LONGEST, _LONGEST_EMPTY = np.iinfo(np.intp).max, 10**6


def load_arrays(path: Path, *, mapped: bool = False) -> Any:
    """What `numpy.load` gives; pickled objects are never read.

    Args:
        path: an `.npy` or `.npz` file.
        mapped: whether an array stays in the file until a part of it is asked for.

    Raises:
        Exception: one of `UNREADABLE`: it cannot be read, is damaged or no such file, holds
            objects, or declares more than it holds.
    """
    with path.open("rb") as file:
        is_archive = file.read(4) == b"PK\x03\x04"
        if not is_archive:
            file.seek(0)
            _check_array(file, path.stat().st_size, "the array")
    if is_archive:
        _check_archive(path)
    return np.load(path, mmap_mode="r" if mapped else None, allow_pickle=False)


def _check_archive(path: Path) -> None:
    with zipfile.ZipFile(path) as archive:
        for member in archive.infolist():
            shown = f"{member.filename[:100]!r}"
            if member.file_size > max(_SMALL, _MOST_PACKED * member.compress_size):
                raise ValueError(
                    f"{shown} is {member.file_size} bytes, packed into {member.compress_size}"
                )
            if not member.filename.endswith(_ARRAY):
                continue
            try:
                with archive.open(member) as file:
                    _check_array(file, member.file_size, shown)
            except (RuntimeError, NotImplementedError) as error:  # such as a password
                raise ValueError(f"{shown} cannot be unpacked: {error}") from error


def _check_array(file: Any, size: int, what: str) -> None:
    """See that an array is in a file as it is declared."""
    try:
        shape, kind = _header(file)
    except Exception as error:
        # numpy hands a text in the file to Python's own parser, which raises whatever it likes.
        raise ValueError(f"{what} does not begin as one of numpy does: {error}") from error
    if kind.hasobject:
        raise ValueError(f"{what} holds pickled objects")
    needed, there = math.prod(shape) * kind.itemsize, size - file.tell()
    # An array without bytes can be as long as it likes, and have as many samples.
    endless = not needed and any(length > _LONGEST_EMPTY for length in shape)
    if not kind.itemsize or endless or any(not 0 <= length <= _LONGEST for length in shape):
        raise ValueError(f"{what} is of no size that an array has")
    if needed > there:
        raise ValueError(f"{what} of shape {shape} takes {needed} bytes, and {there} are there")


def _header(file: BinaryIO) -> tuple[tuple[int, ...], np.dtype[Any]]:
    if npy.read_magic(file) == (1, 0):
        shape, _, kind = npy.read_array_header_1_0(file)
    else:  # that of version 3 differs in the letters that names of fields may have
        shape, _, kind = npy.read_array_header_2_0(file)
    return shape, kind
