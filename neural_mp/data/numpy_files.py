"""The dataset `numpy`: samples in .npy and .npz files."""

from __future__ import annotations

import math
import zipfile
import zlib
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
from numpy.lib import format as npy

from neural_mp.data.datasets import DATASETS, ArrayDataset
from neural_mp.data.option_checks import existing_path, whole_number
from neural_mp.errors import ConfigurationError, DataError, did_you_mean
from neural_mp.io.limits import (
    MAX_COMPRESSION_RATIO,
    MAX_EMPTY_ARRAY_LENGTH,
    RATIO_EXEMPT_ARRAY_BYTES,
)

#: What is raised of a file that cannot be read, also when an array is taken out of an archive.
UNREADABLE = (ValueError, OSError, EOFError, zipfile.BadZipFile, zlib.error)
_ARRAY = ".npy"
_LONGEST = np.iinfo(np.intp).max


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


@contextmanager
def plain_arrays(path: Path, *, option: str = "", mapped: bool = False) -> Iterator[Any]:
    """What `load_arrays` gives, for as long as arrays are taken out of it.

    Args:
        path: an `.npy` or `.npz` file.
        option: what names it, for messages.
        mapped: whether an array stays in the file until a part of it is asked for.

    Raises:
        DataError: it cannot be read.
    """
    with ExitStack() as stack:
        try:
            found = load_arrays(path, mapped=mapped)
            yield found if isinstance(found, np.ndarray) else stack.enter_context(found)
        except UNREADABLE as error:
            raise DataError(
                f"{option}{path} cannot be read as plain .npy or .npz data (pickled objects are "
                f"refused): {error}"
            ) from error


def _check_archive(path: Path) -> None:
    with zipfile.ZipFile(path) as archive:
        for member in archive.infolist():
            shown = f"{member.filename[:100]!r}"
            packed_well = MAX_COMPRESSION_RATIO * member.compress_size
            if member.file_size > max(packed_well, RATIO_EXEMPT_ARRAY_BYTES):
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
    endless = not needed and any(length > MAX_EMPTY_ARRAY_LENGTH for length in shape)
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


@DATASETS.register("numpy", "npz", "npy")
def numpy_dataset(
    path: object = None,
    inputs: object = None,
    labels: object = None,
    inputs_key: str = "inputs",
    labels_key: str | None = "labels",
    start: int | None = None,
    stop: int | None = None,
) -> ArrayDataset:
    """Samples from one .npz file that holds both arrays, or from one file each.

    Pickled objects are never loaded.

    Args:
        path: a .npz file; `inputs_key` and `labels_key` name the arrays in it.
        inputs: instead of `path`: `file.npy`, `file.npz:key`, or `file.npz` with one array.
        labels: beside `inputs`, written the same way; labels are None where it is left out.
        inputs_key: array of inputs in `path`, `[N, ...]`.
        labels_key: array of labels in `path`, `[N]` or `[N, ...]`; None for no labels.
        start: first sample taken, as in a Python slice.
        stop: sample to stop before, as in a Python slice.

    Raises:
        ConfigurationError: options contradict each other or have the wrong type.
        DataError: a file or array is missing or unreadable, or lengths differ or are zero.
    """
    if (path is None) == (inputs is None) or (path is not None and labels is not None):
        raise ConfigurationError(
            "dataset 'numpy' needs either path (one .npz file with inputs and labels) "
            "or inputs and labels (a file each)"
        )
    if path is not None:
        inputs = f"{path}:{inputs_key}"
        labels = None if labels_key is None else f"{path}:{labels_key}"
    taken = slice(_bound("start", start), _bound("stop", stop))
    input_array = _read("inputs", inputs)
    label_array = None if labels is None else _read("labels", labels)
    # Compared whole: a slice would hide that the files do not belong together.
    whole = ArrayDataset(input_array, label_array, source=str(path or inputs))
    if taken == slice(None, None):
        return whole
    return ArrayDataset(
        input_array[taken],
        None if label_array is None else label_array[taken],
        source=f"{whole.source} from start={start} to stop={stop}, of {len(whole)} samples,",
    )


def _bound(option: str, value: object) -> int | None:
    return None if value is None else whole_number(f"numpy: {option}", value)


def _read(option: str, reference: object) -> np.ndarray:
    """The array that `file.npy`, `file.npz` or `file.npz:key` names."""
    name, separator, key = str(reference).partition(".npz:")
    file = f"{name}.npz" if separator else reference
    path = existing_path(f"numpy: {option}", file)
    # Mapped, not read: only the samples that are asked for come into memory.
    with plain_arrays(path, option=f"numpy: {option}: ", mapped=True) as found:
        if isinstance(found, np.ndarray):
            return found
        array: np.ndarray = found[_array_name(str(path), found.files, key if separator else None)]
        return array


def _array_name(path: str, names: list[str], key: str | None) -> str:
    if key is None and len(names) == 1:
        return names[0]
    if key is None:
        raise DataError(
            f"{path} holds {len(names)} arrays ({', '.join(names)}); "
            f"name one, such as {path}:{names[0] if names else 'key'}"
        )
    if key not in names:
        raise DataError(f"{path} has no array {key!r}{did_you_mean(key, names)}")
    return key
