"""Inputs of models: from files, random, or recorded in the calls of the user's own functions."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from neural_mp.adaptors.composite.adaptor import make_call_key, require_parts
from neural_mp.adaptors.loaded_model import AnyModel, LoadedModel, TransferredModel
from neural_mp.adaptors.registry import adaptor_for
from neural_mp.api import config_objects
from neural_mp.api.loading import resolve_source
from neural_mp.config import Options, load_settings
from neural_mp.config.source import TUNING_FILES
from neural_mp.data.datasets import csv_dataset
from neural_mp.data.numpy_files import iterate_plain_arrays
from neural_mp.errors import ConfigurationError, DataError
from neural_mp.tuning.evaluation.batches import Batches
from neural_mp.tuning.evaluation.calibration_batches import limit_samples
from neural_mp.util.batch_cache import copy_batch
from neural_mp.util.labels import NAMES
from neural_mp.util.pytree import Array, batch_size_of
from neural_mp.util.user_calls import call_user
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


@dataclass
class _Recording:
    """Calls in batches, each of which begins with a call of the part that is called first.

    Attributes:
        limit: number of batches from which on no further call is recorded.
    """

    limit: int
    batches: list[dict[str, Any]] = field(default_factory=list)
    _first: str | None = None

    def add_call(self, part: str, inputs: Any) -> None:
        """Add a call with a copy of its inputs."""
        self._first = self._first or part
        if part == self._first:
            if len(self.batches) >= self.limit:
                self.limit = 0
                return
            self.batches.append({})
        if self.limit:
            batch = self.batches[-1]
            batch[make_call_key(len(batch), part)] = copy_batch(inputs)


@dataclass
class _RecordedPart:
    """A part that is loaded, as it was given, with the inputs of its first call."""

    name: str
    source: Any
    add_call: Callable[[str, Any], None]
    _loaded: AnyModel | None = None

    def __call__(self, *inputs: object, **named: object) -> Any:
        """Run and record one call."""
        fed: Any = named or (inputs[0] if len(inputs) == 1 else inputs)
        fed = dict(fed) if isinstance(fed, Mapping) else fed
        self.add_call(self.name, fed)
        if self._loaded is None:
            adaptor = adaptor_for(self.source)
            self._loaded = LoadedModel(adaptor, adaptor.load(self.source, example=fed))
        return TransferredModel(self._loaded)(fed)


def record_part_calls(options: Options) -> Batches:
    """Return the calls that `eval_func` makes to the parts, up to `sampling_size` batches.

    Raises:
        ConfigurationError: `eval_func` is missing, or data are set beside; or a name is invalid.
        DataError: a part is never called.
    """
    if options.eval_func is None or options.eval_dataloader is not None:
        raise ConfigurationError(
            "a model of several parts requires eval_func, a function of the parts that returns a "
            "number, in place of eval_dataloader: def eval_func(parts): parts['encoder'](…)"
        )
    sources = require_parts(options.model)
    recording = _Recording(int(options.sampling_size))
    parts = {
        name: _RecordedPart(name, resolve_source(source), recording.add_call)
        for name, source in sources.items()
    }
    call_user(options.eval_func, parts, form="eval_func(parts)", kind=ConfigurationError)
    calls = {key.partition(":")[2] for batch in recording.batches for key in batch}
    for name in sources:
        if name not in calls:
            raise DataError(
                f"eval_func must call each part, but did not call {name!r}; remove the part, or "
                f"call parts[{name!r}](inputs)"
            )
    return Batches(recording.batches, "the calls of eval_func")
