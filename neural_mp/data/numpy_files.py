"""Dataset `numpy`: samples in .npy and .npz files."""

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
            _check_array(file, path.stat().st_size, "the array")
    if is_archive:
        _check_archive(path)
    return np.load(path, mmap_mode="r" if mapped else None, allow_pickle=False)


@contextmanager
def plain_arrays(path: Path, *, option: str = "", mapped: bool = False) -> Iterator[Any]:
    """Yield the result of `load_arrays`; convert errors raised while arrays are read.

    Args:
        path: an `.npy` or `.npz` file.
        option: option that names the file, for messages.
        mapped: whether to memory-map an array instead of reading it.

    Raises:
        DataError: the file cannot be read.
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
                    f"{shown} has {member.file_size} bytes, compressed to {member.compress_size}"
                )
            if not member.filename.endswith(_ARRAY):
                continue
            try:
                with archive.open(member) as file:
                    _check_array(file, member.file_size, shown)
            except (RuntimeError, NotImplementedError) as error:  # e.g. encrypted
                raise ValueError(f"{shown} cannot be unpacked: {error}") from error


def _check_array(file: Any, size: int, what: str) -> None:
    """Check that the file holds the declared array."""
    try:
        shape, kind = _header(file)
    except Exception as error:
        # numpy parses text of the header as Python, which raises any type.
        raise ValueError(f"{what} has no valid numpy header: {error}") from error
    if kind.hasobject:
        raise ValueError(f"{what} holds pickled objects")
    needed, there = math.prod(shape) * kind.itemsize, size - file.tell()
    # An array without bytes could declare any number of samples.
    endless = not needed and any(length > MAX_EMPTY_ARRAY_LENGTH for length in shape)
    if not kind.itemsize or endless or any(not 0 <= length <= _LONGEST for length in shape):
        raise ValueError(f"{what} declares an impossible size")
    if needed > there:
        raise ValueError(f"{what} of shape {shape} requires {needed} bytes, got {there}")


def _header(file: BinaryIO) -> tuple[tuple[int, ...], np.dtype[Any]]:
    if npy.read_magic(file) == (1, 0):
        shape, _, kind = npy.read_array_header_1_0(file)
    else:  # version 3 differs only in the encoding of field names
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
    """Read samples from one .npz file with both arrays, or from one file each.

    Pickled objects are never loaded.

    Args:
        path: a .npz file; `inputs_key` and `labels_key` name its arrays.
        inputs: instead of `path`: `file.npy`, `file.npz:key`, or `file.npz` with one array.
        labels: with `inputs`, in the same format; default: no labels (None).
        inputs_key: array of inputs in `path`, `[N, ...]`.
        labels_key: array of labels in `path`, `[N]` or `[N, ...]`; None for no labels.
        start: first sample, as in a Python slice.
        stop: end of the samples, exclusive, as in a Python slice.

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
    # Checked before slicing: a slice would hide different lengths.
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
    """Return the array named by `file.npy`, `file.npz` or `file.npz:key`."""
    name, separator, key = str(reference).partition(".npz:")
    file = f"{name}.npz" if separator else reference
    path = existing_path(f"numpy: {option}", file)
    # Memory-mapped: only requested samples are read.
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
