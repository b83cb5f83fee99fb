"""Untrusted archives: bounded reading of .npy and .npz files, and checks of members of zip files.

Members are checked before any is read.
"""

from __future__ import annotations

import math
import re
import stat
import zipfile
import zlib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
from numpy.lib import format as npy

from neural_mp.errors import ModelLoadError, NeuralMPError, one_line
from neural_mp.io.limits import (
    MAX_ARCHIVE_MEMBERS,
    MAX_COMPRESSION_RATIO,
    MAX_EMPTY_ARRAY_LENGTH,
    RATIO_EXEMPT_ARRAY_BYTES,
    RATIO_EXEMPT_MODEL_BYTES,
    count_excess_bytes,
)
from neural_mp.util.system.memory import describe_shortage

#: Exceptions for unreadable files and for unreadable arrays in an archive.
UNREADABLE = (ValueError, OSError, EOFError, zipfile.BadZipFile, zlib.error)
_ARRAY = ".npy"
_LONGEST = np.iinfo(np.intp).max
_METHODS = (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED)
_ENCRYPTED = 0x1
#: Exceptions of `zipfile` for damaged archives.
_DAMAGE = (zipfile.BadZipFile, zlib.error, EOFError, OSError, NotImplementedError)
_UNSAFE_NAME_RE = re.compile(r"[\x00-\x1f\x7f\\]|^/|^[A-Za-z]:|(^|/)\.\.?(/|$)|//")


class ArrayArchive(Mapping[str, np.ndarray]):
    """The arrays of an `.npz` file, each of which is read when it is asked for.

    Attributes:
        files: the names of the arrays.
    """

    def __init__(self, path: Path) -> None:
        self._arrays = np.load(path, allow_pickle=False)
        self.files: list[str] = self._arrays.files
        members = self._arrays.zip.infolist()
        self._sizes = {m.filename.removesuffix(_ARRAY): m.file_size for m in members}

    def __getitem__(self, name: str) -> np.ndarray:
        """Return an array.

        Raises:
            ValueError: the array does not fit into memory.
            Exception: one of `UNREADABLE`: the archive is damaged.
        """
        shortage = describe_shortage(self._sizes.get(name, 0))
        if shortage:
            raise ValueError(
                f"array {name[:100]!r} {shortage}; store the array in an .npy file, of which only "
                f"samples in use are read"
            )
        array: np.ndarray = self._arrays[name]
        return array

    def __iter__(self) -> Iterator[str]:
        """Iterate over the names."""
        return iter(self.files)

    def __len__(self) -> int:
        """Return the number of arrays."""
        return len(self.files)

    def __enter__(self) -> ArrayArchive:
        """Return the archive, which is closed on exit."""
        return self

    def __exit__(self, *raised: object) -> None:
        """Close the archive."""
        self._arrays.close()


def load_arrays(path: Path, *, mapped: bool = False) -> np.ndarray | ArrayArchive:
    """Return the array or the arrays of a file; pickled objects are never read.

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
            size = path.stat().st_size
            _check_declared_array(file, size, "the array")
            shortage = "" if mapped else describe_shortage(size)
            if shortage:
                raise ValueError(f"the array {shortage}; divide it into several files")
    if is_archive:
        _check_archive(path)
        return ArrayArchive(path)
    array: np.ndarray = np.load(path, mmap_mode="r" if mapped else None, allow_pickle=False)
    return array


def _check_archive(path: Path) -> None:
    try:
        with zipfile.ZipFile(path) as archive:
            members = archive.infolist()
            excess = count_excess_bytes((m.file_size, m.compress_size) for m in members)
            if excess > RATIO_EXEMPT_ARRAY_BYTES:
                raise ValueError(
                    f"arrays of {excess >> 20} MiB are compressed to less than a "
                    f"{MAX_COMPRESSION_RATIO}th, got a file of {path.stat().st_size >> 10} KiB; "
                    f"such arrays may have up to {RATIO_EXEMPT_ARRAY_BYTES >> 20} MiB: store "
                    f"others uncompressed, by numpy.savez"
                )
            for member in members:
                if member.filename.endswith(_ARRAY):
                    with archive.open(member) as file:
                        name = f"{member.filename[:100]!r}"
                        _check_declared_array(file, member.file_size, name)
    except (RuntimeError, NotImplementedError) as error:  # e.g. encrypted, of an unknown version
        raise ValueError(str(error)) from error


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


@contextmanager
def open_checked_archive(
    file: Path | BinaryIO, error: type[NeuralMPError] = ModelLoadError
) -> Iterator[zipfile.ZipFile]:
    """Open a zip archive whose members have unique, safe names and plausible sizes.

    `ZipFile.read` returns at most a member's declared size, so the checks bound all reads. Other
    readers may interpret the bytes differently: read members from the returned archive, or rewrite
    them with it.

    Raises:
        NeuralMPError: of class `error`, if the file is not an archive, is damaged (including
            checksum errors while reading), or has a refused member.
    """
    name = str(file) if isinstance(file, Path) else str(getattr(file, "name", "the archive"))
    try:
        with _open_archive(file) as archive:
            for fault in _describe_member_faults(archive):
                raise error(f"{name!r} is refused: {fault}; save the file again")
            yield archive
    except _DAMAGE as problem:
        raise error(f"{name!r} is damaged or not a zip archive: {one_line(problem)}") from problem


def _open_archive(file: Path | BinaryIO) -> zipfile.ZipFile:
    try:
        return zipfile.ZipFile(file)
    except ValueError as problem:  # invalid offsets or names
        raise zipfile.BadZipFile(str(problem)) from problem


def _describe_member_faults(archive: zipfile.ZipFile) -> Iterator[str]:
    members = archive.infolist()
    if len(members) > MAX_ARCHIVE_MEMBERS:
        yield f"number of members: limit {MAX_ARCHIVE_MEMBERS}, got {len(members)}"
    names: set[str] = set()
    total = 0
    for member in members:
        name = member.filename
        subject = f"member {name[:100]!r}"
        if _UNSAFE_NAME_RE.search(name) or member.orig_filename != name:
            yield f"the name of {subject} leads out of the archive"
        if name in names:
            yield f"{subject} occurs twice"
        names.add(name)
        if stat.S_ISLNK(member.external_attr >> 16):
            yield f"{subject} is a link"
        if member.flag_bits & _ENCRYPTED or member.compress_type not in _METHODS:
            yield f"{subject} is encrypted, or compressed by an unsupported method"
        plausible = MAX_COMPRESSION_RATIO * member.compress_size
        if member.file_size > max(plausible, RATIO_EXEMPT_MODEL_BYTES):
            yield (
                f"compression ratio of {subject}: limit {MAX_COMPRESSION_RATIO}, got "
                f"{member.file_size} bytes from {member.compress_size} bytes"
            )
        total += member.compress_size
    excess = count_excess_bytes((member.file_size, member.compress_size) for member in members)
    if excess > RATIO_EXEMPT_ARRAY_BYTES:
        yield (
            f"members that exceed the compression ratio of {MAX_COMPRESSION_RATIO}: limit "
            f"{RATIO_EXEMPT_ARRAY_BYTES} bytes, got {excess} bytes"
        )
    if archive.fp is not None and total > archive.fp.seek(0, 2):
        yield "members overlap"
