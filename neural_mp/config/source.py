"""YAML text → plain data, with the line of every key."""

from __future__ import annotations

import difflib
import os
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path
from typing import Any

from neural_mp.core.enums import Dialect
from neural_mp.errors import ConfigurationError, NeuralMPError, did_you_mean
from neural_mp.io.files import read_bounded
from neural_mp.io.limits import MAX_FILE_BYTES, MAX_SETTINGS_VALUES
from neural_mp.io.yaml_reader import YamlDocument, YamlError, load_yaml_with_lines
from neural_mp.util.validators import InvalidValueError, format_path_key, preview_value

KeyPath = tuple[str | int, ...]

#: Suffixes of tuning files.
TUNING_FILES = (".yaml", ".yml")
#: Characters of an error message.
_MAX_MESSAGE_CHARS = 2000


class IgnoredSettingWarning(UserWarning):
    """A setting of Intel Neural Compressor that is recognized but has no effect."""


@dataclass(frozen=True)
class Source:
    """The parsed content of a tuning file.

    Attributes:
        origin: path of the file, or name of the text in messages.
        lines: key path → line, counted from 1.
        repeated: path of a repeated key → line of its first occurrence; the last value counts.
    """

    origin: str
    data: dict[str, Any] = field(default_factory=dict)
    lines: Mapping[KeyPath, int] = field(default_factory=dict)
    repeated: Mapping[KeyPath, int] = field(default_factory=dict)

    def line_of(self, path: KeyPath) -> int:
        """Return the line of a key, or of its nearest parent in the file."""
        while path and path not in self.lines:
            path = path[:-1]
        return self.lines.get(path, 1)

    def describe_location(self, path: KeyPath) -> str:
        """Return file, line and dotted path as a message prefix; no line without a file."""
        dotted = ".".join(format_path_key(key) for key in path)
        line = f", line {self.line_of(path)}" if self.lines else ""
        return f"{self.origin}{line}: {dotted}" if path else f"{self.origin}{line}"

    def error_at(self, path: KeyPath, message: str) -> ConfigurationError:
        """Return an error that starts with the location of the key."""
        return ConfigurationError(f"{self.describe_location(path)}: {message[:_MAX_MESSAGE_CHARS]}")

    @contextmanager
    def locate_errors(self, path: KeyPath) -> Iterator[None]:
        """Prefix every NeuralMPError raised inside with the location in the file.

        Raises:
            NeuralMPError: the error raised inside, of the same class, or a ConfigurationError
                for an invalid value.
        """
        try:
            yield
        except NeuralMPError as error:
            message = str(error)[:_MAX_MESSAGE_CHARS]
            kind = ConfigurationError if isinstance(error, InvalidValueError) else type(error)
            raise kind(f"{self.describe_location((*path, *error.keys))}: {message}") from error

    def warn_ignored(self, path: KeyPath, reason: str) -> None:
        """Warn that a setting has no effect."""
        message = f"{self.describe_location(path)} is ignored: {reason}"
        warnings.warn(message, IgnoredSettingWarning, stacklevel=2)

    def check_repeated(self, dialect: Dialect) -> None:
        """Warn about repeated keys in a file of INC; the last value counts, as in INC.

        Raises:
            ConfigurationError: a file in our own dialect repeats a key.
        """
        for path, first in self.repeated.items():
            if dialect is Dialect.OWN:
                raise self.error_at(path, f"must not be given twice; the first is on line {first}")
            location = f"{self.origin}, line {first}: {'.'.join(map(str, path))}"
            message = f"{location} is ignored: repeated on line {self.line_of(path)}"
            warnings.warn(message, IgnoredSettingWarning, stacklevel=2)


def _suggest_other_file(path: Path) -> str:
    """Return a hint at a tuning file with a similar name, such as `conf.yml` for `conf.yaml`."""
    try:
        files = [file for file in path.parent.iterdir() if file.suffix in TUNING_FILES]
    except OSError:
        return ""
    stems = difflib.get_close_matches(path.stem, {file.stem for file in files}, cutoff=0.6)
    return did_you_mean(path.name, [file.name for file in files if file.stem in stems])


def read_file(path: str | Path) -> Source:
    """Read a YAML file whose top level is a mapping.

    Raises:
        ConfigurationError: the file cannot be read, is not YAML, or is not a mapping.
    """
    try:
        text = read_bounded(path, MAX_FILE_BYTES).decode("utf-8-sig")
    except OSError as error:
        raise ConfigurationError(
            f"{path}: cannot be read: {error.strerror or error}{_suggest_other_file(Path(path))}"
        ) from error
    except UnicodeDecodeError as error:
        line = error.object.count(b"\n", 0, error.start) + 1
        raise ConfigurationError(
            f"{path}, line {line}: not readable YAML: the text is not UTF-8"
        ) from error
    return read_text(text, str(path))


def read_text(text: str, origin: str) -> Source:
    """Read YAML text whose top level is a mapping.

    Raises:
        ConfigurationError: the text is not YAML, or is not a mapping.
    """
    try:
        document = load_yaml_with_lines(text, MAX_SETTINGS_VALUES)
    except YamlError as error:
        lines = {error.keys: error.line}
        raise Source(origin, lines=lines).error_at(error.keys, error.problem) from error
    if document.value is None:
        raise ConfigurationError(
            f"{origin}, line 1: the file is empty; expected sections such as model or tuning"
        )
    if not isinstance(document.value, dict):
        raise ConfigurationError(
            f"{origin}, line {document.line}: the top level must be a mapping of sections such as "
            f"model or tuning, found {preview_value(document.value)}"
        )
    return _Reader(origin, document).read_source(document.value)


def read_mapping(data: Mapping[Any, Any], origin: str) -> Source:
    """Read the content of a tuning file from a Python mapping; messages have no lines.

    Raises:
        ConfigurationError: the mapping is nested too deeply.
    """
    try:
        return _Reader(origin, YamlDocument()).read_source(data)
    except RecursionError as error:
        raise ConfigurationError(f"{origin}: nested too deeply to be read") from error


class _Reader:
    """Copies values and records the line of each key path."""

    def __init__(self, origin: str, document: YamlDocument) -> None:
        self._document = document
        self._lines: dict[KeyPath, int] = {}
        self._repeated: dict[KeyPath, int] = {}
        self._source = Source(origin, {}, self._lines, self._repeated)

    def read_source(self, data: Mapping[Any, Any]) -> Source:
        self._source.data.update(self._to_yaml_types(data, ()))
        return self._source

    def _to_yaml_types(self, value: object, path: KeyPath) -> Any:
        """Convert a value to YAML types: words for enums and paths, lists."""
        if isinstance(value, Mapping):
            self._record_lines(value, path)
            names = ((str(self._to_yaml_types(key, path)), item) for key, item in value.items())
            return {key: self._to_yaml_types(item, (*path, key)) for key, item in names}
        if isinstance(value, list | tuple | set | frozenset):
            self._record_lines(value, path)
            return [self._to_yaml_types(item, (*path, index)) for index, item in enumerate(value)]
        if isinstance(value, Enum):
            return value.value
        scalar = str(value) if isinstance(value, os.PathLike) else value
        if isinstance(scalar, str) and "\0" in scalar:
            raise self._source.error_at(path, "must not contain the character NUL")
        return scalar

    def _record_lines(self, value: object, path: KeyPath) -> None:
        for key, line in self._document.lines.get(id(value), {}).items():
            self._lines[(*path, key)] = line
        for key, line in self._document.repeated.get(id(value), {}).items():
            self._repeated[(*path, key)] = line
