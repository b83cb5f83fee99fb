"""Inputs of models: from files, random, or recorded in the calls of the user's own loop."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from neural_mp.adaptors.loaded_model import AnyModel
from neural_mp.adaptors.registry import adaptor_for
from neural_mp.api import config_objects
from neural_mp.config import load_settings
from neural_mp.config.source import TUNING_FILES
from neural_mp.data.datasets import csv_dataset
from neural_mp.data.numpy_files import iterate_plain_arrays
from neural_mp.errors import ConfigurationError, DataError
from neural_mp.tuning.evaluation.batches import Batches
from neural_mp.tuning.evaluation.calibration_batches import limit_samples
from neural_mp.util.labels import NAMES
from neural_mp.util.pytree import Array, batch_size_of
from neural_mp.util.validators import (
    file_path,
    integer_between,
    optional,
    shape_of_array,
    validate_option,
)

#: Default number of samples to run.
DEFAULT_SAMPLES = 100
#: Default batch size when a model is captured.
_CAPTURED_WITH = 32
_ARRAYS, _TABLE = (".npy", ".npz"), ".csv"
#: One array, or input name → array.
_Arrays = Array | dict[str, Array]


def read_first_inputs(data: str | Path, batch_size: int | None, trust: Iterable[str] = ()) -> Any:
    """Return the inputs of the first batch, to load models without example inputs."""
    if validate_option("data", file_path, data).suffix in TUNING_FILES:
        return _tuning_file_batches(Path(data), trust).first_inputs
    return _read_samples(_read_arrays(Path(data)), 0, batch_size or _CAPTURED_WITH)


def iterate_file_inputs(
    data: str | Path | None,
    model: AnyModel,
    batch_size: int | None,
    samples: int,
    trust: Iterable[str] = (),
) -> Batches:
    """Return the inputs in a file, in batches, by default as large as the example inputs.

    The file is an `.npy` file for a single input; an `.npz` file with one array per input name, or
    with `inputs` (and `labels`); a `.csv` table, without its last column; a tuning file, whose
    calibration data, else evaluation data, are used. None stands for one batch of random inputs.

    Raises:
        DataError: the file is missing or has other contents.
        ConfigurationError: a tuning file is invalid.
    """
    if data is None:
        return Batches([model.example_inputs(batch_size)], "the random inputs")
    size = batch_size or batch_size_of(model.example_inputs())
    return Batches(_build_input_reader(data, size, samples, trust), str(data))


def read_file_batches(
    data: str | Path, batch_size: int | None, samples: int, trust: Iterable[str] = ()
) -> list[tuple[Any, None]]:
    """Return the inputs in a file as pairs of inputs and None, before a model is loaded."""
    reader = _build_input_reader(data, batch_size or _CAPTURED_WITH, samples, trust)
    return [(inputs, None) for inputs in reader()]


def _build_input_reader(
    data: str | Path, size: int, samples: int, trust: Iterable[str]
) -> Callable[[], Iterator[Any]]:
    path = validate_option("data", file_path, data)
    if path.suffix in TUNING_FILES:
        loader = _tuning_file_batches(path, trust)
        return lambda: limit_samples(loader.iterate_inputs(), samples)
    return partial(_iterate_equal_batches, _read_arrays(path), size, samples)


def _tuning_file_batches(path: Path, trust: Iterable[str]) -> Batches:
    if not path.is_file():
        raise DataError(f"there is no tuning file {str(path)!r}")
    return Batches(
        config_objects.build_any_loader(load_settings(path, trust=trust), path), str(path)
    )


def _read_arrays(path: Path) -> _Arrays:
    if path.suffix == _TABLE:
        return csv_dataset(path).inputs  # as `tune` reads a table
    if path.suffix not in _ARRAYS:
        types = ", ".join((*_ARRAYS, _TABLE, *TUNING_FILES))
        raise DataError(f"data must be a file with one of the suffixes {types}, got {str(path)!r}")
    if not path.is_file():
        raise DataError(f"there is no file {str(path)!r}")
    with iterate_plain_arrays(path, mapped=True) as loaded:
        arrays = loaded if isinstance(loaded, np.ndarray) else dict(loaded)
    if isinstance(arrays, Mapping) and (len(arrays) == 1 or set(arrays) <= {"inputs", *NAMES}):
        arrays = arrays.get("inputs", next(iter(arrays.values()), np.zeros(0)))
    _check_sample_counts(path, {"it": arrays} if isinstance(arrays, np.ndarray) else arrays)
    return arrays


def _check_sample_counts(path: Path, arrays: Mapping[str, Array]) -> None:
    lengths = {name: len(array) if array.ndim else 0 for name, array in arrays.items()}
    if not min(lengths.values()):
        raise DataError(f"{str(path)!r} has no samples along the first axis")
    if len(set(lengths.values())) > 1:
        sizes = ", ".join(f"{name} {length}" for name, length in lengths.items())
        raise DataError(f"the arrays of {str(path)!r} must have equally many samples, got {sizes}")


def _read_samples(arrays: _Arrays, start: int, stop: int) -> Any:
    if isinstance(arrays, dict):
        return {name: np.array(array[start:stop]) for name, array in arrays.items()}
    return np.array(arrays[start:stop])


def _iterate_equal_batches(arrays: _Arrays, size: int, samples: int) -> Iterator[Any]:
    """Yield batches of equal size, as some models require; if samples are few, one batch."""
    first = next(iter(arrays.values())) if isinstance(arrays, dict) else arrays
    count = min(len(first), samples)
    for start in range(0, max(1, count - size + 1), size):
        yield _read_samples(arrays, start, min(start + size, count))


def make_random_inputs(descriptions: Sequence[str]) -> tuple[np.ndarray, ...] | None:
    """Return example inputs for shapes like `2,3,224,224` or `int64:2,128`; None without shapes.

    Floats are drawn from 0…1, integers are zeros (an index that is always valid).

    Raises:
        ConfigurationError: a shape is malformed.
    """
    arrays = []
    for text in descriptions:
        kind, _, shape_text = text.rpartition(":")
        try:
            dtype = np.dtype(kind or "float32")
            shape = tuple(int(size) for size in shape_text.split(","))
            validate_option("input shape", shape_of_array(np.dtype(np.float64).itemsize), shape)
            drawn = np.random.default_rng(0).random(shape)
        except (TypeError, ValueError):
            raise ConfigurationError(
                f"input shape {text!r} is malformed; write sizes with commas, such as 2,3,224,224, "
                f"or with a dtype before them, such as int64:2,128"
            ) from None
        arrays.append((drawn if dtype.kind == "f" else np.zeros(shape)).astype(dtype))
    return tuple(arrays) or None


class CalibrationInputs:
    """The inputs that a model was called with: batches for `calib_dataloader`.

    Args:
        samples: number of samples from which on no further call is recorded; None for all.
    """

    def __init__(self, samples: int | None = None) -> None:
        self.samples = 0
        self._most = validate_option("samples", optional(integer_between(1)), samples)
        self._batches: list[Any] = []

    def add_call(self, inputs: Any) -> None:
        """Add the inputs of one call."""
        if self._most is None or self.samples < self._most:
            self._batches.append(inputs)
            self.samples += batch_size_of(inputs)

    def __iter__(self) -> Iterator[Any]:
        if not self._batches:
            raise DataError(
                "no call of the model was recorded; run the model on calibration data within "
                "neural_mp.calibration"
            )
        return iter(self._batches)

    def __len__(self) -> int:
        return len(self._batches)

    def __getitem__(self, index: int) -> Any:
        return self._batches[index]

    def __repr__(self) -> str:
        return f"CalibrationInputs({len(self)} batches, {self.samples} samples)"


@contextmanager
def calibration(
    model: object, *, samples: int | None = None, framework: str | None = None
) -> Iterator[CalibrationInputs]:
    """Record the inputs of all calls that the user's own code makes to a model.

    The model runs as before. Its recorded inputs are batches for calibration:
    `converter.calib_dataloader = calibrated`.

    Args:
        model: the object that the user's code calls: a `torch.nn.Module` or a Keras model; no other
            framework offers recording so far.
        samples: number of samples from which on no further call is recorded; default: all, which
            are kept in memory.
        framework: framework of the model; default: detected.

    Raises:
        UnknownFrameworkError: no adaptor accepts the model.
        ConversionError: the framework offers no recording.
    """
    adaptor = adaptor_for(model, framework)
    inputs = CalibrationInputs(samples)
    with adaptor.record_calls(model, inputs.add_call):
        yield inputs
