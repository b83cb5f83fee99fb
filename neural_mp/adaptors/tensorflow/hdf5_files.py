"""What a file of HDF5 may hold, seen to before its arrays are read.

The format lets a file take its arrays from other files, and declare arrays that are not there.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

from neural_mp.errors import ModelLoadError

#: How many times its size in the file an array may be, and what it may be anyhow.
_MOST_PACKED, _SMALL = 200, 16 * 2**20
_MOST_OBJECTS = 1_000_000


@dataclass(frozen=True)
class Hdf5Content:
    """What a file holds.

    Attributes:
        attributes: of the file as a whole.
        nbytes: what all its arrays take in memory.
    """

    attributes: dict[str, Any]
    nbytes: int


def check_hdf5(file: Path | BinaryIO, shown: str) -> Hdf5Content:
    """See that all arrays of a file are in the file.

    Args:
        file: its path, or a stream of it.
        shown: what to call it in errors.

    Raises:
        ModelLoadError: an array is taken from another file, larger than what is there, or of no
            numbers; or the file is damaged.
    """
    import h5py

    try:
        with h5py.File(file, "r") as opened:
            arrays: list[Any] = []
            for fault in _faults(opened, arrays):
                raise ModelLoadError(f"{shown} is not read: {fault}. Save the model again")
            return Hdf5Content(dict(opened.attrs), sum(array.nbytes for array in arrays))
    except (OSError, ValueError, RuntimeError, KeyError, TypeError, RecursionError) as error:
        raise ModelLoadError(f"{shown} is no HDF5 file, or damaged: {error}") from error


def _faults(opened: Any, arrays: list[Any]) -> Iterator[str]:
    """What is wrong with a file, in words; its arrays are put into a list on the way."""
    import h5py

    waiting, seen = [opened], set()
    while waiting:
        group = waiting.pop()
        for name in group:
            where = f"{group.name.rstrip('/')}/{name}"
            if not isinstance(group.get(name, getlink=True), h5py.HardLink):
                yield f"{where!r} is a link to somewhere else"
            item = group[name]
            address = h5py.h5o.get_info(item.id).addr
            if address in seen:
                yield f"{where!r} is there twice"
            seen.add(address)
            if len(seen) > _MOST_OBJECTS:
                yield f"it holds more than {_MOST_OBJECTS} objects"
            if isinstance(item, h5py.Group):
                waiting.append(item)
            elif isinstance(item, h5py.Dataset):
                arrays.append(item)
                yield from _faults_of_array(item, where)
            else:
                yield f"{where!r} is neither a group nor an array"


def _faults_of_array(array: Any, where: str) -> Iterator[str]:
    if array.external or array.is_virtual:
        yield f"the array {where!r} is taken from another file"
    if array.dtype.hasobject:
        yield f"the array {where!r} holds texts or lists, not numbers"
    stored = array.id.get_storage_size()
    if array.nbytes > max(_SMALL, _MOST_PACKED * stored):
        yield f"the array {where!r} is {array.nbytes} bytes, of which {stored} are in the file"
