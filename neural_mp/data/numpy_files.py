"""The dataset `numpy`: samples in .npy and .npz files."""

from __future__ import annotations

from typing import Any

import numpy as np

from neural_mp.data.checked_arrays import UNREADABLE, load_arrays
from neural_mp.data.datasets import DATASETS, ArrayDataset
from neural_mp.data.option_checks import existing_path, whole_number
from neural_mp.errors import ConfigurationError, DataError, did_you_mean


@DATASETS.register("numpy", "npz", "npy")
def numpy_dataset(
    path: Any = None,
    inputs: Any = None,
    labels: Any = None,
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


def _bound(option: str, value: Any) -> int | None:
    return None if value is None else whole_number(f"numpy: {option}", value)


def _read(option: str, reference: Any) -> np.ndarray:
    """The array that `file.npy`, `file.npz` or `file.npz:key` names."""
    name, separator, key = str(reference).partition(".npz:")
    file = f"{name}.npz" if separator else reference
    path = existing_path(f"numpy: {option}", file)
    try:
        # Mapped, not read: only the samples that are asked for come into memory.
        loaded = load_arrays(path, mapped=True)
        if isinstance(loaded, np.ndarray):
            return loaded
        with loaded as archive:
            return archive[_array_name(str(path), archive.files, key if separator else None)]
    except UNREADABLE as error:
        raise DataError(
            f"numpy: {option}: {path} cannot be read as plain .npy or .npz data "
            f"(pickled objects are refused): {error}"
        ) from error


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
