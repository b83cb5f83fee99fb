"""The dataset `csv`: a table of numbers with a label in each row."""

from __future__ import annotations

import csv
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from neural_mp.data.datasets import DATASETS, ArrayDataset
from neural_mp.data.option_checks import existing_path, true_or_false
from neural_mp.errors import ConfigurationError, DataError, did_you_mean
from neural_mp.util.text import counted
from neural_mp.util.validators import preview

#: The largest number that the inputs can hold.
_LARGEST = float(np.finfo(np.float32).max)


@DATASETS.register("csv")
def csv_dataset(
    path: Any,
    label: str | int | None = -1,
    columns: Sequence[str | int] | None = None,
    delimiter: str = ",",
    header: bool = True,
) -> ArrayDataset:
    """Rows of a text table: float32 vectors `[F]`, each with a label.

    Labels that are all whole numbers become int64, other numbers float32, and text becomes the
    int64 index of the class in the sorted list of classes (`dataset.classes`).

    Args:
        path: the file, in UTF-8.
        label: column of the label, by name or by index from 0 (from -1 at the end); None for
            no labels.
        columns: columns of the inputs, by name or index; all but the label where left out.
        delimiter: one character between cells.
        header: the first row names the columns.

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
    file = existing_path("csv: path", path)
    rows = _rows(file, delimiter)
    names = rows.pop(0)[1] if header and rows else []
    if not rows:
        raise DataError(f"{file} has no rows of data")
    width = len(names) if header else len(rows[0][1])
    _check_widths(file, rows, width)
    label_column = None if label is None else _column(file, label, names, width)
    if columns is None:
        chosen = [column for column in range(width) if column != label_column]
    else:
        chosen = [_column(file, column, names, width) for column in columns]
    if not chosen:
        raise DataError(f"{file} has no column left for the inputs; change label or delimiter")
    inputs = [[_number(file, line, cells[c], c, names) for c in chosen] for line, cells in rows]
    input_array = np.array(inputs, dtype=np.float32)
    if label_column is None:
        return ArrayDataset(input_array, None, source=str(file))
    labels, classes = _labels([cells[label_column] for _, cells in rows])
    return ArrayDataset(input_array, labels, source=str(file), classes=classes)


def _rows(file: Path, delimiter: str) -> list[tuple[int, list[str]]]:
    """Rows that are not blank, each with its line number from 1."""
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
                f"{file}, line {line}: {counted(len(cells), 'cell')} where {width} are expected"
            )


def _column(file: Path, column: Any, names: list[str], width: int) -> int:
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


def _number(file: Path, line: int, cell: str, column: int, names: list[str]) -> float:
    try:
        value = float(cell)
    except ValueError:
        value = math.nan
    if not abs(value) <= _LARGEST:
        name = repr(names[column]) if names else str(column)
        raise DataError(
            f"{file}, line {line}, column {name}: {preview(cell)} is not a finite number; "
            f"mend it, or list the columns to use in `columns`"
        )
    return value


def _labels(cells: list[str]) -> tuple[np.ndarray, tuple[str, ...]]:
    try:
        return np.array([int(cell) for cell in cells], dtype=np.int64), ()
    except (ValueError, OverflowError):
        pass
    try:
        return np.array([float(cell) for cell in cells], dtype=np.float32), ()
    except ValueError:
        classes = tuple(sorted(set(cells)))
        places = {name: place for place, name in enumerate(classes)}
        return np.array([places[cell] for cell in cells], dtype=np.int64), classes
