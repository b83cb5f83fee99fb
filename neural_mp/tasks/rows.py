"""Rows of data files: `.jsonl`, `.csv`, `.parquet`, and folders of images or sound."""

from __future__ import annotations

import csv
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from neural_mp.data.images import IMAGE_SUFFIXES
from neural_mp.data.option_checks import check_existing_path, check_fits_memory, import_package
from neural_mp.data.text import iterate_json_lines
from neural_mp.errors import DataError, did_you_mean, one_line
from neural_mp.util.validators import preview_value

SOUND_SUFFIXES = (".wav",)
#: Files in a folder of images or sound with a row for each file, whose key `file_name` names it.
_METADATA = ("metadata.jsonl", "metadata.csv")
_FILE_NAME = "file_name"
_SUFFIXES = (".jsonl", ".csv", ".parquet")


@dataclass(frozen=True)
class Column:
    """A column of a data file.

    Attributes:
        name: name of the column.
        aliases: other names of the column.
        required: whether every data file has the column.
    """

    name: str
    aliases: tuple[str, ...] = ()
    required: bool = True


@dataclass(frozen=True)
class Row:
    """A row of a data file, by the names of the task's columns.

    Attributes:
        values: column → value.
        origin: file and line, as text.
        base: folder to which paths in the row are relative.
    """

    values: Mapping[str, Any]
    origin: str = "the input"
    base: Path = Path()

    def __contains__(self, name: object) -> bool:
        return self.values.get(str(name)) is not None

    def __getitem__(self, name: str) -> Any:
        """Return the value of a column.

        Raises:
            DataError: the row has none.
        """
        if name not in self:
            raise DataError(
                f"{self.origin} must have a value for {name!r}, got {', '.join(self.values)}"
            )
        return self.values[name]

    def text(self, name: str) -> str:
        """Return a text that is not empty.

        Raises:
            DataError: the value is no text.
        """
        value = self[name]
        if not isinstance(value, str) or not value.strip():
            raise self.fault(name, "a text that is not empty")
        return value

    def number(self, name: str) -> float:
        """Return a finite number, also one in a text.

        Raises:
            DataError: the value is no number.
        """
        value = self[name]
        try:
            number = math.nan if isinstance(value, bool) else float(value)
        except (TypeError, ValueError):
            number = math.nan
        if not math.isfinite(number):
            raise self.fault(name, "a finite number")
        return number

    def items(self, name: str) -> list[Any]:
        """Return a list.

        Raises:
            DataError: the value is no list.
        """
        value = self[name]
        if not isinstance(value, list | tuple):
            raise self.fault(name, "a list")
        return list(value)

    def path(self, name: str) -> Path:
        """Return the path of a file, relative to the folder of the data.

        Raises:
            DataError: the value is no path of a file.
        """
        value = self[name]
        if isinstance(value, Mapping):  # as `datasets` writes images and sound
            value = value.get("path")
        if not isinstance(value, str | Path) or not str(value):
            raise self.fault(name, "the path of a file")
        file = self.base / value
        if not file.is_file():
            raise DataError(f"{self.origin}: there is no file {str(file)!r} of {name!r}")
        return file

    def fault(self, name: str, expected: str) -> DataError:
        """Return the error for a value of a column."""
        return DataError(
            f"{self.origin}: {name!r} must be {expected}, got {preview_value(self.values[name])}"
        )


def read_rows(
    data: str | Path,
    columns: Sequence[Column],
    media: str | None,
    names: Mapping[str, str] | None = None,
) -> list[Row]:
    """Return all rows of a data file or folder.

    Args:
        data: a `.jsonl`, `.csv` or `.parquet` file; or, for tasks of images or sound, a folder with
            `metadata.jsonl` or `metadata.csv`, or with a folder of files for each class.
        columns: the columns of the task.
        media: the column of files, for tasks of images or sound; None for others.
        names: column of the task → name in the file, where it is none of the usual ones.

    Raises:
        DataError: the file does not exist, is damaged, has no rows or lacks a column.
        MissingFrameworkError: pyarrow, which reads `.parquet` files, is not installed.
    """
    path = check_existing_path("data", str(data))
    if path.is_dir():
        rows = list(_iterate_folder(path, media))
    else:
        rows = list(_iterate_file(path))
    if not rows:
        raise DataError(f"{str(path)!r} must have at least one row, got none")
    return [_rename_columns(row, columns, names or {}) for row in rows]


def _iterate_file(path: Path) -> Iterator[Row]:
    readers = {".jsonl": iterate_json_lines, ".csv": _read_csv_rows, ".parquet": _read_parquet_rows}
    reader = readers.get(path.suffix.lower())
    if reader is None:
        raise DataError(
            f"the data must be a file of {', '.join(_SUFFIXES)}, or a folder of images or sound, "
            f"got {str(path)!r}"
        )
    for origin, values in reader(path):
        if not isinstance(values, Mapping):
            raise DataError(
                f"{origin} must be an object of columns, got {preview_value(values)}; write one "
                f'per line, e.g. {{"text": "…", "label": 1}}'
            )
        yield Row(values, origin, path.parent)


def _read_csv_rows(path: Path) -> Iterator[tuple[str, Any]]:
    check_fits_memory(path)
    try:
        with path.open(newline="", encoding="utf-8") as file:
            reader = csv.DictReader(file, strict=True)
            for values in reader:
                origin = f"{path.name}, line {reader.line_num}"
                if None in values or None in values.values():
                    count = len(reader.fieldnames or ())
                    raise DataError(f"{origin} must have {count} columns, as the first line")
                yield origin, {name: value for name, value in values.items() if value != ""}
    except (csv.Error, UnicodeDecodeError) as error:
        raise DataError(f"{str(path)!r} is no table of UTF-8 text: {error}") from error


def _read_parquet_rows(path: Path) -> Iterator[tuple[str, Any]]:
    parquet = import_package("pyarrow.parquet", "a .parquet file", "parquet", "pyarrow")
    check_fits_memory(path)
    try:
        rows = parquet.read_table(path).to_pylist()
    except Exception as error:  # pyarrow's own types, and OSError
        raise DataError(f"{str(path)!r} is no parquet file: {one_line(error)}") from error
    return ((f"{path.name}, row {number}", row) for number, row in enumerate(rows, start=1))


def _iterate_folder(folder: Path, media: str | None) -> Iterator[Row]:
    if media is None:
        raise DataError(
            f"the data of a task of texts must be a file of {', '.join(_SUFFIXES)}, got the folder "
            f"{str(folder)!r}"
        )
    metadata = next((folder / name for name in _METADATA if (folder / name).is_file()), None)
    if metadata is not None:
        for row in _iterate_file(metadata):
            yield replace(row, values={media: row[_FILE_NAME], **row.values})
        return
    suffixes = IMAGE_SUFFIXES if media == "image" else SOUND_SUFFIXES
    files = [file for file in sorted(folder.glob("*/**/*")) if file.suffix.lower() in suffixes]
    if not files:
        raise DataError(
            f"the folder {str(folder)!r} must contain a folder of files ({', '.join(suffixes)}) "
            f"for each class, or {_METADATA[0]}"
        )
    for file in files:
        relative = file.relative_to(folder)
        yield Row({media: str(relative), "label": relative.parts[0]}, str(relative), folder)


def _rename_columns(row: Row, columns: Sequence[Column], names: Mapping[str, str]) -> Row:
    """Return the row by the names of the task's columns, other columns left out."""
    for name in names:
        if name not in {column.name for column in columns}:
            known = [column.name for column in columns]
            raise DataError(f"columns must name columns of the task{did_you_mean(name, known)}")
    values = {}
    for column in columns:
        usual = (column.name, *column.aliases)
        candidates = (names[column.name],) if column.name in names else usual
        key = next((name for name in candidates if name in row.values), None)
        if key is not None:
            values[column.name] = row.values[key]
        elif column.required:
            raise DataError(
                f"{row.origin} must have the column {' or '.join(map(repr, candidates))}, got "
                f"{', '.join(map(preview_value, row.values)) or 'none'}; rename the column, or set "
                f"columns to {{{column.name!r}: NAME}}"
            )
    return replace(row, values=values)
