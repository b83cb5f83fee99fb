"""YAML text → plain data, together with the line that every key stands on."""

from __future__ import annotations

import os
import re
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

import yaml

from neural_mp.core.enums import Dialect
from neural_mp.errors import ConfigurationError, NeuralMPError
from neural_mp.util.validators import key_words, validate_option, without_nul

KeyPath = tuple[str | int, ...]

#: YAML 1.1, which PyYAML reads, takes `1e-3` for a word; the people who write it do not.
PLAIN_FLOAT = re.compile(r"^[-+]?(?:[0-9]+\.?[0-9]*|\.[0-9]+)[eE][-+]?[0-9]+$")
FLOAT_TAG = "tag:yaml.org,2002:float"
FLOAT_STARTS = list("-+0123456789.")

_MERGE_TAG = "tag:yaml.org,2002:merge"
_MAPPING_TAGS = ("tag:yaml.org,2002:map", "!Pruner")
_SEQUENCE_TAGS = ("tag:yaml.org,2002:seq", "tag:yaml.org,2002:python/tuple")
_MOST_VALUES = 200_000
#: Nodes that are put together: a value and its key.
_MOST_NODES = 2 * _MOST_VALUES
#: The most bytes of a tuning file.
LARGEST = 1 << 24
#: Characters of a number, which YAML may have in base 60, and of what an error says.
_LONGEST_NUMBER, _LONGEST_MESSAGE = 400, 2000
_NUMBER_TAGS = ("tag:yaml.org,2002:int", FLOAT_TAG)


class IgnoredSettingWarning(UserWarning):
    """A setting of Intel Neural Compressor that is understood, but not acted on."""


@dataclass(frozen=True)
class Source:
    """A tuning file as it was read.

    Attributes:
        origin: its path, or what to call the text in messages.
        data: its content.
        lines: key path → line, counted from 1.
        repeated: key path → the line it stands on first, of keys that are given again; the last
            value counts.
    """

    origin: str
    data: dict[str, Any] = field(default_factory=dict)
    lines: Mapping[KeyPath, int] = field(default_factory=dict)
    repeated: Mapping[KeyPath, int] = field(default_factory=dict)

    def line(self, path: KeyPath) -> int:
        """The line of a key, or of the nearest key above it that was written."""
        while path and path not in self.lines:
            path = path[:-1]
        return self.lines.get(path, 1)

    def where(self, path: KeyPath) -> str:
        """File, line and dotted path, to start a message with; no line where nothing was read."""
        dotted = ".".join(key_words(key) for key in path)
        line = f", line {self.line(path)}" if self.lines else ""
        return f"{self.origin}{line}: {dotted}"

    def error(self, path: KeyPath, message: str) -> ConfigurationError:
        """An error that says where in the file it comes from."""
        return ConfigurationError(f"{self.where(path)}: {message[:_LONGEST_MESSAGE]}")

    @contextmanager
    def at(self, path: KeyPath) -> Iterator[None]:
        """Say in every error of ours raised inside where in the file it comes from.

        Raises:
            NeuralMPError: the error raised inside, of the same class.
        """
        try:
            yield
        except NeuralMPError as error:
            words = str(error)[:_LONGEST_MESSAGE]
            raise type(error)(f"{self.where((*path, *error.keys))}: {words}") from error

    def ignored(self, path: KeyPath, reason: str) -> None:
        """Warn once that a setting has no effect."""
        message = f"{self.where(path)} is ignored: {reason}"
        warnings.warn(message, IgnoredSettingWarning, stacklevel=2)

    def check_repeated(self, dialect: Dialect) -> None:
        """Warn of keys that are given twice in a file of theirs; the last value counts, as there.

        Raises:
            ConfigurationError: a file of ours gives a key twice.
        """
        for path, first in self.repeated.items():
            if dialect is Dialect.OWN:
                raise self.error(path, f"given twice, first on line {first}")
            before = f"{self.origin}, line {first}: {'.'.join(map(str, path))}"
            message = f"{before} is ignored: it is given again on line {self.line(path)}"
            warnings.warn(message, IgnoredSettingWarning, stacklevel=2)


class _Loader(yaml.SafeLoader):
    """A safe loader that also takes `1e-3` for a number, and ends early where there is too much."""

    nodes = 0

    def compose_node(self, parent: Any, index: Any) -> Any:
        """Put the next node together: one takes a kilobyte of memory."""
        self.nodes += 1
        if self.nodes > _MOST_NODES:
            mark = self.peek_event().start_mark
            raise yaml.MarkedYAMLError(
                problem=f"it holds more than {_MOST_VALUES} values", problem_mark=mark
            )
        return super().compose_node(parent, index)


_Loader.add_implicit_resolver(FLOAT_TAG, PLAIN_FLOAT, FLOAT_STARTS)


def read_text(text: str, origin: str) -> Source:
    """Read YAML text whose top level is a mapping.

    Raises:
        ConfigurationError: it is no YAML, or holds anything but a mapping.
    """
    try:
        return _compose(text, origin)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        line = mark.line + 1 if mark else 1
        message = error.problem or error.context
        raise ConfigurationError(f"{origin}, line {line}: not readable YAML: {message}") from error
    except yaml.reader.ReaderError as error:
        line = text.count("\n", 0, error.position) + 1
        raise ConfigurationError(
            f"{origin}, line {line}: not readable YAML: {error.reason}"
        ) from error
    except RecursionError as error:
        raise ConfigurationError(f"{origin}, line 1: nested too deeply to be read") from error


def read_mapping(data: Mapping[Any, Any], origin: str) -> Source:
    """What a tuning file would hold, given as a mapping in Python; messages name no lines.

    Raises:
        ConfigurationError: it is nested without end.
    """
    try:
        return Source(origin, _plain(dict(data), origin))
    except RecursionError as error:
        raise ConfigurationError(f"{origin}: nested too deeply to be read") from error


def _plain(value: Any, where: str) -> Any:
    """A value as a YAML file could hold it: words for enumerations and paths, lists for tuples."""
    if isinstance(value, Mapping):
        names = ((str(_plain(key, where)), item) for key, item in value.items())
        return {key: _plain(item, f"{where}: {key_words(key)}") for key, item in names}
    if isinstance(value, list | tuple | set | frozenset):
        return [_plain(item, where) for item in value]
    if isinstance(value, Enum):
        return value.value
    found = str(value) if isinstance(value, os.PathLike) else value
    return validate_option(where, without_nul, found)


def _compose(text: str, origin: str) -> Source:
    loader = _Loader(text)
    try:
        node = loader.get_single_node()
        if node is None:
            raise ConfigurationError(
                f"{origin}, line 1: the file is empty; expected sections such as model or tuning"
            )
        if not isinstance(node, yaml.MappingNode):
            raise ConfigurationError(
                f"{origin}, line {node.start_mark.line + 1}: the top level must be a mapping of "
                f"sections such as model or tuning, found {_kind(node)}"
            )
        reader = _Reader(loader, origin)
        data = reader.plain(node, ())
        return Source(origin, data, reader.lines, reader.repeated)
    finally:
        loader.dispose()


def _kind(node: yaml.Node) -> str:
    return "a list" if isinstance(node, yaml.SequenceNode) else f"the value {node.value!r}"


class _Reader:
    """Turns nodes into plain data and notes the line of each key."""

    def __init__(self, loader: _Loader, origin: str) -> None:
        self._loader = loader
        self._origin = origin
        self._open: set[int] = set()
        self._count = 0
        self.lines: dict[KeyPath, int] = {}
        self.repeated: dict[KeyPath, int] = {}

    def plain(self, node: yaml.Node, path: KeyPath) -> Any:
        """The value of a node; every key of a mapping is the text it was written as."""
        self._guard(node, path)
        if isinstance(node, yaml.MappingNode) and node.tag in _MAPPING_TAGS:
            value: Any = self._mapping(node, path)
        elif isinstance(node, yaml.SequenceNode) and node.tag in _SEQUENCE_TAGS:
            value = [self._item(item, (*path, index)) for index, item in enumerate(node.value)]
        else:
            value = self._scalar(node, path)
        self._open.discard(id(node))
        return value

    def _guard(self, node: yaml.Node, path: KeyPath) -> None:
        self._count += 1
        if id(node) in self._open or self._count > _MOST_VALUES:
            message = "its aliases refer to each other or multiply without end"
            raise self._error(node, path, message)
        self._open.add(id(node))

    def _item(self, node: yaml.Node, path: KeyPath) -> Any:
        self.lines[path] = node.start_mark.line + 1
        return self.plain(node, path)

    def _mapping(self, node: yaml.MappingNode, path: KeyPath) -> dict[str, Any]:
        merged: dict[str, Any] = {}
        own: dict[str, Any] = {}
        # Merged keys come first, so that the lines noted last are those of the mapping's own keys.
        pairs = sorted(node.value, key=lambda pair: pair[0].tag != _MERGE_TAG)
        for key_node, value_node in pairs:
            if key_node.tag == _MERGE_TAG:
                for part in reversed(self._merged(value_node, path)):
                    merged.update(part)
                continue
            key = self._key(key_node, path)
            if key in own:
                self.repeated.setdefault((*path, key), self.lines[(*path, key)])
            self.lines[(*path, key)] = key_node.start_mark.line + 1
            own[key] = self.plain(value_node, (*path, key))
        return {**merged, **own}

    def _merged(self, node: yaml.Node, path: KeyPath) -> list[dict[str, Any]]:
        nodes = node.value if isinstance(node, yaml.SequenceNode) else [node]
        values = [self.plain(part, path) for part in nodes]
        if not all(isinstance(value, dict) for value in values):
            raise self._error(node, path, "'<<' takes a mapping or a list of mappings")
        return values

    def _key(self, node: yaml.Node, path: KeyPath) -> str:
        if not isinstance(node, yaml.ScalarNode):
            raise self._error(node, path, "a key must be a word, found a list or mapping")
        if "\0" in node.value:
            raise self._error(node, path, "a key holds the character NUL")
        return str(node.value)

    def _scalar(self, node: yaml.Node, path: KeyPath) -> Any:
        known = node.tag in yaml.SafeLoader.yaml_constructors and not node.tag.startswith("!")
        if not isinstance(node, yaml.ScalarNode) or not known:
            raise self._error(node, path, f"the tag {node.tag!r} is not understood here")
        if "\0" in node.value:
            raise self._error(node, path, "the value holds the character NUL")
        if node.tag in _NUMBER_TAGS and len(node.value) > _LONGEST_NUMBER:
            raise self._error(node, path, f"a number of {len(node.value)} characters")
        try:
            return self._loader.construct_object(node)
        except (ValueError, KeyError, AttributeError) as error:
            raise self._error(node, path, f"cannot be read as a value: {error}") from error

    def _error(self, node: yaml.Node, path: KeyPath, message: str) -> ConfigurationError:
        dotted = ".".join(key_words(key) for key in path) or "top level"
        line = node.start_mark.line + 1
        return ConfigurationError(f"{self._origin}, line {line}: {dotted}: {message}")
