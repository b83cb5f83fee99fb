"""The registry of datasets, and the two that need no file format: arrays and random samples."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from neural_mp.data.option_checks import finite_number, numeric_dtype, whole_number, whole_numbers
from neural_mp.data.registry import Registry
from neural_mp.errors import ConfigurationError, DataError
from neural_mp.util.text import counted
from neural_mp.util.validators import shape_of_array, validate_option

DATASETS = Registry("dataset")


@dataclass(frozen=True, eq=False)
class ArrayDataset:
    """Samples held in arrays.

    Attributes:
        inputs: `[N, ...]`; a sample's inputs are `inputs[i]`.
        labels: `[N]` or `[N, ...]`, or None where there are none: labels are then None.
        source: where the arrays come from, for messages.
        classes: the text that labels 0, 1, … stand for, where the labels were text.

    Raises:
        DataError: there is no sample, or inputs and labels differ in length.
    """

    inputs: np.ndarray
    labels: np.ndarray | None = None
    source: str = "arrays"
    classes: tuple[str, ...] = field(default=())

    def __post_init__(self) -> None:
        for name, array in (("inputs", self.inputs), ("labels", self.labels)):
            if array is not None and array.ndim == 0:
                raise DataError(f"the {name} of {self.source} are one number, not an array")
        if self.labels is not None and len(self.inputs) != len(self.labels):
            raise DataError(
                f"{self.source} has {counted(len(self.inputs), 'input')} (shape "
                f"{self.inputs.shape}) but {counted(len(self.labels), 'label')} (shape "
                f"{self.labels.shape}); there must be as many"
            )
        if len(self.inputs) == 0:
            raise DataError(f"{self.source} has no samples")

    def __len__(self) -> int:
        return len(self.inputs)

    def __getitem__(self, index: int) -> tuple[np.ndarray, Any]:
        label = None if self.labels is None else self.labels[index]
        return np.asarray(self.inputs[index]), label


@DATASETS.register("dummy")
@dataclass(frozen=True)
class DummyDataset:
    """Random samples, the same for the same seed and index whatever the order of reading.

    Attributes:
        shape: of one sample's inputs, without the batch.
        size: how many samples.
        low: the smallest value.
        high: values stay below it.
        dtype: of the inputs; integers are drawn from `low` to `high` - 1.
        label: `True` gives label 0 to all, a number n labels from 0 to n - 1, `[low, high]`
            labels from low to high - 1, `False` no labels (None). Labels are int64.
        seed: of the random numbers.

    Raises:
        ConfigurationError: an option has the wrong type or is out of range.
    """

    shape: Sequence[int]
    size: int
    low: float = 0.0
    high: float = 1.0
    dtype: Any = "float32"
    label: bool | int | Sequence[int] = True
    seed: int = 0

    def __post_init__(self) -> None:
        settings = {
            "shape": whole_numbers("dummy: shape", self.shape, minimum=1),
            "size": whole_number("dummy: size", self.size, minimum=1),
            "low": finite_number("dummy: low", self.low),
            "high": finite_number("dummy: high", self.high),
            "dtype": numeric_dtype("dummy: dtype", self.dtype),
            "label": _label_range(self.label),
            "seed": whole_number("dummy: seed", self.seed, minimum=0),
        }
        for name, value in settings.items():
            object.__setattr__(self, name, value)
        self._check_range()
        validate_option("dummy: shape", shape_of_array(np.dtype(np.float64).itemsize), self.shape)

    def _check_range(self) -> None:
        if self.low >= self.high:
            raise ConfigurationError(f"dummy: low ({self.low}) must be below high ({self.high})")
        limits = np.finfo(self.dtype) if self.dtype.kind == "f" else np.iinfo(self.dtype)
        beyond = self.high if self.dtype.kind == "f" else self.high - 1
        if self.low < limits.min or beyond > limits.max:
            raise ConfigurationError(
                f"dummy: {self.dtype} does not hold {self.low} to {self.high}; "
                f"change dtype, low or high"
            )
        if self.dtype.kind != "f" and not (self.low.is_integer() and self.high.is_integer()):
            raise ConfigurationError(
                f"dummy: low and high must be whole numbers for {self.dtype}, "
                f"got {self.low} and {self.high}"
            )

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> tuple[np.ndarray, Any]:
        random = np.random.default_rng([self.seed, range(self.size)[index]])
        label = None if self.label is False else random.integers(*self.label)  # type: ignore[misc]
        if self.dtype.kind == "f":
            return random.uniform(self.low, self.high, self.shape).astype(self.dtype), label
        inputs = random.integers(int(self.low), int(self.high), self.shape, dtype=self.dtype)
        return inputs, label


def _label_range(label: Any) -> bool | tuple[int, int]:
    if label is False or label is None:
        return False
    if label is True:
        return (0, 1)
    if isinstance(label, Sequence) and not isinstance(label, str):
        bounds = whole_numbers("dummy: label", label)
    else:
        bounds = (0, whole_number("dummy: label", label, minimum=1))
    if len(bounds) != 2 or bounds[0] >= bounds[1]:
        raise ConfigurationError(
            f"dummy: label must be true, false, a number of classes or [low, high] "
            f"with low below high, got {label!r}"
        )
    return bounds[0], bounds[1]
