"""Registry of datasets; arrays, random samples, and CSV tables."""

from __future__ import annotations

import csv
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from neural_mp.data.option_checks import (
    check_existing_path,
    check_finite_number,
    check_fits_memory,
    check_whole_number,
    check_whole_numbers,
    parse_numeric_dtype,
    true_or_false,
)
from neural_mp.data.registry import Registry
from neural_mp.errors import ConfigurationError, DataError, did_you_mean
from neural_mp.util.text import format_count
from neural_mp.util.validators import preview_value, shape_of_array, validate_option

DATASETS = Registry("dataset", group="neural_mp.datasets")

#: The largest finite input of a table.
_LARGEST = float(np.finfo(np.float32).max)


@dataclass(frozen=True, eq=False)
class ArrayDataset:
    """Samples in arrays.

    Attributes:
        inputs: `[N, ...]`; the inputs of sample i are `inputs[i]`.
        labels: `[N]` or `[N, ...]`; None without labels.
        source: origin of the arrays, for messages.
        classes: class names of labels 0, 1, …, if the labels were text.

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
                raise DataError(f"the {name} of {self.source} must be an array, got one number")
        if self.labels is not None and len(self.inputs) != len(self.labels):
            raise DataError(
                f"{self.source} has {format_count(len(self.inputs), 'input')} (shape "
                f"{self.inputs.shape}) but {format_count(len(self.labels), 'label')} (shape "
                f"{self.labels.shape}); the numbers must be equal"
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
    """Random samples, determined by seed and index, whatever the order of reading.

    Attributes:
        shape: shape of one sample's inputs, without the batch.
        size: number of samples.
        low: the smallest value.
        high: exclusive upper bound.
        dtype: dtype of the inputs; integers are drawn from `low` to `high` - 1.
        label: `True` sets label 0 for all, a number n labels from 0 to n - 1, `[low, high]`
            labels from low to high - 1, `False` no labels (None). Labels are int64.
        seed: seed of the random numbers.

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
            "shape": check_whole_numbers("dummy: shape", self.shape, minimum=1),
            "size": check_whole_number("dummy: size", self.size, minimum=1),
            "low": check_finite_number("dummy: low", self.low),
            "high": check_finite_number("dummy: high", self.high),
            "dtype": parse_numeric_dtype("dummy: dtype", self.dtype),
            "label": _label_range(self.label),
            "seed": check_whole_number("dummy: seed", self.seed, minimum=0),
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


def _label_range(label: object) -> bool | tuple[int, int]:
    if label is False or label is None:
        return False
    if label is True:
        return (0, 1)
    if isinstance(label, Sequence) and not isinstance(label, str):
        bounds = check_whole_numbers("dummy: label", label)
    else:
        bounds = (0, check_whole_number("dummy: label", label, minimum=1))
    if len(bounds) != 2 or bounds[0] >= bounds[1]:
        raise ConfigurationError(
            f"dummy: label must be true, false, a number of classes or [low, high] "
            f"with low below high, got {label!r}"
        )
    return bounds[0], bounds[1]


@DATASETS.register("csv")
def csv_dataset(
    path: object,
    label: str | int | None = -1,
    columns: Sequence[str | int] | None = None,
    delimiter: str = ",",
    header: bool = True,
) -> ArrayDataset:
    """Read a CSV table: float32 vectors `[F]`, each with a label.

    If all labels are whole numbers, they become int64, other numbers float32, and text the int64
    index of the class in the sorted list of classes (`dataset.classes`).

    Args:
        path: the file, in UTF-8.
        label: column of the label, by name or by index from 0 (from -1 at the end); None for
            no labels.
        columns: columns of the inputs, by name or index; default: all but the label.
        delimiter: one character between cells.
        header: whether the first row names the columns.

    Raises:
        ConfigurationError: an option has the wrong type.
        DataError: the file is missing or has no rows, a column does not exist, rows differ in
            length, or an input is not a finite number.
    """
    if not isinstance(delimiter, str) or len(delimiter) != 1:
        raise ConfigurationError(f"csv: delimiter must be one character, got {delimiter!r}")
    true_or_false("csv: header", header)
    if columns is not None and (not isinstance(columns, list | tuple) or not columns):
        raise ConfigurationError(f"csv: columns must be a list of columns, got {columns!r}")
    file = check_existing_path("csv: path", path)
    rows = _read_rows(file, delimiter)
    names = rows.pop(0)[1] if header and rows else []
    if not rows:
        raise DataError(f"{file} has no rows of data")
    width = len(names) if header else len(rows[0][1])
    _check_widths(file, rows, width)
    label_column = None if label is None else _resolve_column(file, label, names, width)
    if columns is None:
        chosen = [column for column in range(width) if column != label_column]
    else:
        chosen = [_resolve_column(file, column, names, width) for column in columns]
    if not chosen:
        raise DataError(f"{file} has no column left for the inputs; change label or delimiter")
    inputs = [
        [_parse_number(file, line, cells[c], c, names) for c in chosen] for line, cells in rows
    ]
    input_array = np.array(inputs, dtype=np.float32)
    if label_column is None:
        return ArrayDataset(input_array, None, source=str(file))
    labels, classes = _encode_labels([cells[label_column] for _, cells in rows])
    return ArrayDataset(input_array, labels, source=str(file), classes=classes)


def _read_rows(file: Path, delimiter: str) -> list[tuple[int, list[str]]]:
    """Return rows that are not blank, each with its line number from 1."""
    check_fits_memory(file)
    try:
        with file.open(encoding="utf-8-sig", newline="") as lines:
            reader = csv.reader(lines, delimiter=delimiter)
            return [(reader.line_num, [c.strip() for c in cells]) for cells in reader if cells]
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise DataError(f"{file} cannot be read as a table in UTF-8: {error}") from error


def _check_widths(file: Path, rows: list[tuple[int, list[str]]], width: int) -> None:
    for line, cells in rows:
        if len(cells) != width:
            raise DataError(
                f"{file}, line {line}: {format_count(len(cells), 'cell')} where {width} are "
                "expected"
            )


def _resolve_column(file: Path, column: object, names: list[str], width: int) -> int:
    if isinstance(column, str):
        if column not in names:
            hint = did_you_mean(column, names) or "; without a header, give its index"
            raise DataError(f"{file} has no column {column!r}{hint}")
        return names.index(column)
    if not isinstance(column, int) or isinstance(column, bool):
        raise ConfigurationError(f"csv: a column is a name or an index, got {column!r}")
    if not -width <= column < width:
        raise DataError(f"{file} has no column {column}; it has {width}, counted from 0")
    return column % width


def _parse_number(file: Path, line: int, cell: str, column: int, names: list[str]) -> float:
    try:
        value = float(cell)
    except ValueError:
        value = math.nan
    if not abs(value) <= _LARGEST:
        name = repr(names[column]) if names else str(column)
        raise DataError(
            f"{file}, line {line}, column {name}: {preview_value(cell)} is not a finite number; "
            f"correct the cell, or list the columns to use in `columns`"
        )
    return value


def _encode_labels(cells: list[str]) -> tuple[np.ndarray, tuple[str, ...]]:
    try:
        return np.array([int(cell) for cell in cells], dtype=np.int64), ()
    except (ValueError, OverflowError):
        pass
    try:
        return np.array([float(cell) for cell in cells], dtype=np.float32), ()
    except ValueError:
        classes = tuple(sorted(set(cells)))
        indices = {name: index for index, name in enumerate(classes)}
        return np.array([indices[cell] for cell in cells], dtype=np.int64), classes
