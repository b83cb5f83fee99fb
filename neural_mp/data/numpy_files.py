"""Dataset `numpy`: samples in .npy and .npz files."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import numpy as np

from neural_mp.data.datasets import DATASETS, ArrayDataset
from neural_mp.data.option_checks import check_existing_path, check_whole_number
from neural_mp.errors import ConfigurationError, DataError, did_you_mean
from neural_mp.io.archives import UNREADABLE, ArrayArchive, load_arrays


@contextmanager
def iterate_plain_arrays(
    path: Path, *, option: str = "", mapped: bool = False
) -> Iterator[np.ndarray | ArrayArchive]:
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
            arrays = load_arrays(path, mapped=mapped)
            yield arrays if isinstance(arrays, np.ndarray) else stack.enter_context(arrays)
        except UNREADABLE as error:
            raise DataError(
                f"{option}{path} cannot be read as plain .npy or .npz data (pickled objects are "
                f"refused): {error}"
            ) from error


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
    selection = slice(_parse_bound("start", start), _parse_bound("stop", stop))
    input_array = _read_array("inputs", inputs)
    label_array = None if labels is None else _read_array("labels", labels)
    # Checked before slicing: a slice would hide different lengths.
    whole = ArrayDataset(input_array, label_array, source=str(path or inputs))
    if selection == slice(None, None):
        return whole
    return ArrayDataset(
        input_array[selection],
        None if label_array is None else label_array[selection],
        source=f"{whole.source} from start={start} to stop={stop}, of {len(whole)} samples,",
    )


def _parse_bound(option: str, value: object) -> int | None:
    return None if value is None else check_whole_number(f"numpy: {option}", value)


def _read_array(option: str, reference: object) -> np.ndarray:
    """Return the array named by `file.npy`, `file.npz` or `file.npz:key`."""
    name, separator, key = str(reference).partition(".npz:")
    file = f"{name}.npz" if separator else reference
    path = check_existing_path(f"numpy: {option}", file)
    # Memory-mapped: only requested samples are read.
    with iterate_plain_arrays(path, option=f"numpy: {option}: ", mapped=True) as arrays:
        if isinstance(arrays, np.ndarray):
            return arrays
        array: np.ndarray = arrays[
            _choose_array_name(str(path), arrays.files, key if separator else None)
        ]
        return array


def _choose_array_name(path: str, names: list[str], key: str | None) -> str:
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
