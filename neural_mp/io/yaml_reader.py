"""Safe YAML parser to plain values, twice as fast as PyYAML's loaders.

PyYAML's loaders recurse: text nested 100,000 levels deep crashes the process. Aliases can expand
twenty lines to a billion values, and base-60 numbers have unbounded length. Therefore, the parser's
events are processed one by one.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import yaml

from neural_mp.io.limits import MAX_DEPTH, MAX_NUMBER_CHARS, MAX_VALUES
from neural_mp.util.validators import InvalidValueError, preview_value

_LOADER: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
_TOO_DEEP = f"nesting exceeds the limit of {MAX_DEPTH} levels"
_NOT_YAML = "not readable YAML"

_CONSTANTS: Mapping[str, Any] = {
    **dict.fromkeys(("", "~", "null", "Null", "NULL")),
    **dict.fromkeys(("true", "True", "TRUE", "yes", "Yes", "YES", "on", "On", "ON"), True),
    **dict.fromkeys(("false", "False", "FALSE", "no", "No", "NO", "off", "Off", "OFF"), False),
    **dict.fromkeys((".inf", ".Inf", ".INF", "+.inf", "+.Inf", "+.INF"), float("inf")),
    **dict.fromkeys(("-.inf", "-.Inf", "-.INF"), -float("inf")),
    **dict.fromkeys((".nan", ".NaN", ".NAN"), float("nan")),
}
_INTEGER_RE = re.compile(r"[-+]?(?:[1-9][0-9_]*|0|0x[0-9a-fA-F]+|0b[01]+|(?P<octal>0[0-7]+))")
_FLOAT_RE = re.compile(
    r"[-+]?(?:(?:[0-9][0-9_]*\.[0-9_]*|\.[0-9][0-9_]*)(?:[eE][-+][0-9]+)?"
    r"|(?:[0-9]+\.?[0-9]*|\.[0-9]+)[eE][-+]?[0-9]+)"
)
_MANY_DIGITS_RE = re.compile(r"[-+.0-9_eExXa-fA-F]+")
_NUMBER_STARTS = frozenset("+-.0123456789")
_CONSTANT_STARTS = frozenset("~nNtTyYoOfF")
_TAG = "tag:yaml.org,2002:"
_SCALAR_TAGS = frozenset(f"{_TAG}{name}" for name in ("float", "int", "bool", "null"))
_TEXT_TAGS = (None, "!", f"{_TAG}str")
#: Python tags in files of Intel Neural Compressor, read as plain values.
_LIST_TAGS = (None, "!", f"{_TAG}seq", f"{_TAG}python/tuple")
_MAPPING_TAGS = (None, "!", f"{_TAG}map", "!Pruner")


class _Merge(str):
    """The unquoted key `<<`, whose value is merged into its mapping."""


_MERGE = _Merge("<<")


class YamlError(InvalidValueError):
    """Text that cannot be read as YAML.

    Attributes:
        line: line number, from 1.
        problem: the message without the line.
    """

    line: int = 1
    problem: str = ""


def _build_error(line: int, problem: str, keys: tuple[str | int, ...] = ()) -> YamlError:
    error = YamlError(f"line {line}: {problem}")
    error.line, error.problem, error.keys = line, problem, keys
    return error


@dataclass
class YamlDocument:
    """A document with the line numbers of its parts, from 1.

    Attributes:
        value: content; None if empty.
        line: first line.
        lines: `id` of a mapping or list → key or index → line.
        repeated: `id` of a mapping → repeated key → line of its first occurrence.
    """

    value: Any = None
    line: int = 1
    lines: dict[int, dict[Any, int]] = field(default_factory=dict)
    repeated: dict[int, dict[str, int]] = field(default_factory=dict)


def load_yaml(text: str) -> Any:
    """Parse a single document into dicts, lists, strings, numbers, booleans and None.

    Keys stay text.

    Raises:
        YamlError: invalid YAML, unsupported tags, too many values, or nested too deeply.
    """
    return _read_events(text, _Reader(YamlDocument(), MAX_VALUES, with_lines=False))


def load_yaml_with_lines(text: str, max_values: int) -> YamlDocument:
    """Parse a single document, with the line of every key and item.

    Raises:
        YamlError: invalid YAML, unsupported tags, more than `max_values` values (aliases expanded),
            or nested too deeply.
    """
    document = YamlDocument()
    _read_events(text, _Reader(document, max_values, with_lines=True))
    return document


def _read_events(text: str, reader: _Reader) -> Any:
    try:
        for event in yaml.parse(text, _LOADER):
            handle = reader.handlers.get(type(event))
            if handle is not None:
                handle(event)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        # An unexpected end is marked on the line after the last.
        line = min(mark.line, text.count("\n")) + 1 if mark else 1
        if "nesting depth" in str(error.problem):  # libyaml scans ahead of the events
            raise _build_error(line, _TOO_DEEP) from None
        raise _build_error(line, f"{_NOT_YAML}: {error.problem or error.context}") from None
    except yaml.reader.ReaderError as error:
        line = text.encode()[: error.position].count(b"\n") + 1
        raise _build_error(line, f"{_NOT_YAML}: {error.reason}") from None
    except (yaml.YAMLError, UnicodeError) as error:
        raise _build_error(1, f"{_NOT_YAML}: {preview_value(str(error))}") from None
    return reader.document.value


@dataclass(slots=True)
class _Open:
    """An unfinished mapping or list.

    Attributes:
        value: the mapping or list.
        place: its key or index in the parent.
        anchor: name for aliases.
        count: number of values before its start.
        key: key of the next value; None before a key.
        merged: values of the key `<<`.
    """

    value: Any
    place: str | int
    anchor: str | None
    count: int
    key: str | None = None
    merged: list[Any] = field(default_factory=list)


class _Reader:
    """Builds values from parser events, without recursion.

    Attributes:
        document: the values read so far.
        handlers: type of event → the method that processes it; other events say nothing.
    """

    def __init__(self, document: YamlDocument, max_values: int, with_lines: bool) -> None:
        self.document = document
        self._max_values, self._with_lines = max_values, with_lines
        self._documents = self._count = 0
        self._open: list[_Open] = []
        self._named: dict[str, tuple[Any, int]] = {}
        self.handlers: Mapping[type, Callable[[Any], None]] = {
            yaml.ScalarEvent: self._take_scalar,
            yaml.SequenceStartEvent: lambda event: self._begin_collection(event, [], _LIST_TAGS),
            yaml.MappingStartEvent: lambda event: self._begin_collection(event, {}, _MAPPING_TAGS),
            yaml.SequenceEndEvent: self._end_collection,
            yaml.MappingEndEvent: self._end_collection,
            yaml.AliasEvent: self._take_alias,
            yaml.DocumentStartEvent: self._take_document,
        }

    def _take_document(self, event: Any) -> None:
        self._documents += 1
        if self._documents > 1:
            raise self._build_error(event, f"{_NOT_YAML}: expected one document, found several")

    def _take_scalar(self, event: Any) -> None:
        if self._expects_key():
            merges = event.value == "<<" and event.implicit[0]
            self._set_key(event, _MERGE if merges else event.value)
            value = event.value
        else:
            value = self._parse_scalar_value(event)
            self._put_value(event, value, 1)
        if event.anchor:
            self._named[event.anchor] = value, 1

    def _parse_scalar_value(self, event: Any) -> Any:
        text, tag = event.value, event.tag
        if (tag is None and event.implicit[0]) or tag in _SCALAR_TAGS:
            if len(text) > MAX_NUMBER_CHARS and _MANY_DIGITS_RE.fullmatch(text):
                problem = f"a number must have at most {MAX_NUMBER_CHARS} digits, got {len(text)}"
                raise self._build_error(event, problem)
            return _parse_plain_scalar(text)
        if tag not in _TEXT_TAGS:
            raise self._make_tag_error(event)
        return text

    def _make_tag_error(self, event: Any) -> YamlError:
        return self._build_error(
            event, f"the tag {preview_value(event.tag)} is not supported; remove the tag"
        )

    def _expects_key(self) -> bool:
        if not self._open:
            return False
        inner = self._open[-1]
        return inner.key is None and isinstance(inner.value, dict)

    def _set_key(self, event: Any, key: str) -> None:
        inner = self._open[-1]
        inner.key = key
        if self._with_lines and key is not _MERGE:
            lines = self.document.lines[id(inner.value)]
            if key in lines:
                repeated = self.document.repeated.setdefault(id(inner.value), {})
                repeated.setdefault(key, lines[key])
            lines[key] = event.start_mark.line + 1

    def _begin_collection(self, event: Any, value: Any, tags: tuple[str | None, ...]) -> None:
        if self._expects_key():
            raise self._build_error(event, "a key must be a string, got a list or mapping")
        if event.tag not in tags:
            raise self._make_tag_error(event)
        if len(self._open) >= MAX_DEPTH:
            raise self._build_error(event, _TOO_DEEP)
        location = self._next_key_or_index() if self._open else ""
        self._put_value(event, value, 1)
        self._open.append(_Open(value, location, event.anchor, self._count))
        if self._with_lines:
            self.document.lines[id(value)] = {}

    def _end_collection(self, event: Any) -> None:
        inner = self._open[-1]
        if inner.merged:
            self._merge_mappings(event, inner)
        self._open.pop()
        if inner.anchor:
            self._named[inner.anchor] = inner.value, self._count - inner.count + 1

    def _merge_mappings(self, event: Any, inner: _Open) -> None:
        """Add the keys of merged mappings before the mapping's own keys, which take precedence."""
        merged: dict[str, Any] = {}
        lines: dict[str, int] = {}
        for value in inner.merged:
            for part in reversed(value if isinstance(value, list) else [value]):
                if not isinstance(part, dict):
                    problem = (
                        f"'<<' must be a mapping or a list of mappings, got {preview_value(part)}"
                    )
                    raise self._build_error(event, problem)
                merged |= part
                lines |= self.document.lines.get(id(part), {})
        own = dict(inner.value)
        inner.value.clear()
        inner.value.update(merged | own)
        if self._with_lines:
            self.document.lines[id(inner.value)] = lines | self.document.lines[id(inner.value)]

    def _take_alias(self, event: Any) -> None:
        if event.anchor not in self._named:
            problem = f"the alias {preview_value(event.anchor)} has no anchor before it"
            raise self._build_error(event, f"{_NOT_YAML}: {problem}")
        value, size = self._named[event.anchor]
        if not self._expects_key():
            self._put_value(event, value, size)
        elif isinstance(value, str):
            self._set_key(event, value)
        else:
            raise self._build_error(event, f"a key must be a string, got {preview_value(value)}")

    def _put_value(self, event: Any, value: Any, size: int) -> None:
        self._count += size
        if self._count > self._max_values:
            problem = f"the number of values, aliases expanded, exceeds {self._max_values}"
            raise self._build_error(event, problem)
        if not self._open:
            self.document.value, self.document.line = value, event.start_mark.line + 1
            return
        inner = self._open[-1]
        if isinstance(inner.value, list):
            if self._with_lines:
                lines = self.document.lines[id(inner.value)]
                lines[len(inner.value)] = event.start_mark.line + 1
            inner.value.append(value)
        elif inner.key is _MERGE:
            inner.merged.append(value)
            inner.key = None
        else:
            inner.value[inner.key] = value
            inner.key = None

    def _next_key_or_index(self) -> str | int:
        inner = self._open[-1]
        return len(inner.value) if inner.key is None else inner.key

    def _build_error(self, event: Any, problem: str) -> YamlError:
        keys = [part.place for part in self._open[1:]]
        if self._open and not self._expects_key():
            keys.append(self._next_key_or_index())
        return _build_error(event.start_mark.line + 1, problem, tuple(keys))


def _parse_plain_scalar(text: str) -> Any:
    first = text[:1]
    if first in _NUMBER_STARTS:
        integer = _INTEGER_RE.fullmatch(text)
        if integer:
            return int(text.replace("_", ""), 8 if integer["octal"] else 0)
        if _FLOAT_RE.fullmatch(text):
            return float(text.replace("_", ""))
    elif first and first not in _CONSTANT_STARTS:
        return text
    return _CONSTANTS.get(text, text)
