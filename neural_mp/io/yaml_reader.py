"""YAML as plain values, without what makes YAML dangerous, and at twice the speed of a loader.

A loader recurses: text that is nested a hundred thousand times ends the process. What an alias
stands for is repeated by whoever walks over it: twenty lines can hold a billion values. Numbers may
be written to any length in base 60. So the parser's events are read here, one by one.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any

import yaml

from neural_mp.util.validators import InvalidValueError, preview

_LOADER: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
#: Deeper than any file of ours.
_DEEPEST = 100
_TOO_DEEP = "it is nested too deeply to be read"
#: The most values, where what aliases stand for counts every time.
_MOST_VALUES = 10_000_000
#: Characters of a number; more have no meaning.
_LONGEST_NUMBER = 400

_CONSTANTS: Mapping[str, Any] = {
    **dict.fromkeys(("", "~", "null", "Null", "NULL")),
    **dict.fromkeys(("true", "True", "TRUE", "yes", "Yes", "YES", "on", "On", "ON"), True),
    **dict.fromkeys(("false", "False", "FALSE", "no", "No", "NO", "off", "Off", "OFF"), False),
    **dict.fromkeys((".inf", ".Inf", ".INF", "+.inf", "+.Inf", "+.INF"), float("inf")),
    **dict.fromkeys(("-.inf", "-.Inf", "-.INF"), -float("inf")),
    **dict.fromkeys((".nan", ".NaN", ".NAN"), float("nan")),
}
_INTEGER = re.compile(r"[-+]?(?:0|[1-9][0-9_]*)")
_FLOAT = re.compile(r"[-+]?(?:[0-9][0-9_]*\.?[0-9_]*|\.[0-9][0-9_]*)(?:[eE][-+]?[0-9]+)?")
_NUMBER_STARTS = frozenset("+-.0123456789")
_CONSTANT_STARTS = frozenset("~nNtTyYoOfF")
_TAG = "tag:yaml.org,2002:"


def plain_yaml(text: str) -> Any:
    """The one document that a text holds: mappings, lists, texts, numbers, true, false and None.

    Keys are the text that they are written as.

    Raises:
        InvalidValueError: it is no YAML, or holds other things, too many, or too deeply nested.
    """
    reader = _Reader()
    try:
        for event in yaml.parse(text, _LOADER):
            reader.take(event)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        line = f"line {mark.line + 1}: " if mark else ""
        if "nesting depth" in str(error.problem):  # libyaml scans ahead of the events
            raise InvalidValueError(f"{line}{_TOO_DEEP}") from None
        raise InvalidValueError(f"{line}it is not YAML: {error.problem or error.context}") from None
    except (yaml.YAMLError, UnicodeError) as error:
        raise InvalidValueError(f"it is not YAML: {preview(str(error))}") from None
    return reader.found


class _Reader:
    """Puts values together from events, without recursion."""

    def __init__(self) -> None:
        self.found: Any = None
        self._documents = 0
        #: What is open: the value, the anchor, and how many values were there when it began.
        self._open: list[tuple[Any, str | None, int]] = []
        #: The key whose value comes next, for every mapping that is open; None before a key.
        self._keys: list[str | None] = []
        self._named: dict[str, tuple[Any, int]] = {}
        self._count = 0
        self._take: Mapping[type, Callable[[Any], None]] = {
            yaml.ScalarEvent: self._scalar,
            yaml.SequenceStartEvent: self._start_list,
            yaml.MappingStartEvent: self._start_mapping,
            yaml.SequenceEndEvent: self._end,
            yaml.MappingEndEvent: self._end,
            yaml.AliasEvent: self._alias,
            yaml.DocumentStartEvent: self._document,
        }

    def take(self, event: Any) -> None:
        """Take in the next event."""
        take = self._take.get(type(event))
        if take is not None:
            take(event)

    def _document(self, event: Any) -> None:
        self._documents += 1
        if self._documents > 1:
            raise _wrong(event, "expected one document, found several")

    def _scalar(self, event: Any) -> None:
        if self._expects_key():
            self._key(event)
            return
        text, tag = event.value, event.tag
        if tag is None and event.implicit[0]:
            value = _plain(event, text)
        elif tag in (None, "!", f"{_TAG}str"):
            value = text
        elif tag in (f"{_TAG}float", f"{_TAG}int", f"{_TAG}bool", f"{_TAG}null"):
            value = _plain(event, text)
        else:
            raise _wrong(event, f"the tag {preview(tag)} has no meaning here")
        self._put(event, value, 1)
        if event.anchor:
            self._named[event.anchor] = value, 1

    def _expects_key(self) -> bool:
        return bool(self._open) and self._keys[-1] is None and isinstance(self._open[-1][0], dict)

    def _key(self, event: Any) -> None:
        if event.value == "<<" and event.implicit[0]:
            raise _wrong(event, "'<<' is not read here; write the keys out")
        self._keys[-1] = event.value
        if event.anchor:
            self._named[event.anchor] = event.value, 1

    def _start_list(self, event: Any) -> None:
        self._start(event, [], f"{_TAG}seq")

    def _start_mapping(self, event: Any) -> None:
        self._start(event, {}, f"{_TAG}map")

    def _start(self, event: Any, value: Any, tag: str) -> None:
        if self._expects_key():
            raise _wrong(event, "a key must be a text, found a list or mapping")
        if event.tag not in (None, "!", tag):
            raise _wrong(event, f"the tag {preview(event.tag)} has no meaning here")
        if len(self._open) >= _DEEPEST:
            raise _wrong(event, _TOO_DEEP)
        self._put(event, value, 1)
        self._open.append((value, event.anchor, self._count))
        self._keys.append(None)

    def _end(self, event: Any) -> None:
        value, anchor, before = self._open.pop()
        self._keys.pop()
        if anchor:
            self._named[anchor] = value, self._count - before + 1

    def _alias(self, event: Any) -> None:
        if event.anchor not in self._named:
            raise _wrong(event, f"the alias {preview(event.anchor)} stands for nothing before it")
        value, size = self._named[event.anchor]
        if not self._expects_key():
            self._put(event, value, size)
        elif isinstance(value, str):
            self._keys[-1] = value
        else:
            raise _wrong(event, f"a key must be a text, found {preview(value)}")

    def _put(self, event: Any, value: Any, size: int) -> None:
        self._count += size
        if self._count > _MOST_VALUES:
            raise _wrong(event, f"it holds more than {_MOST_VALUES} values; its aliases multiply")
        if not self._open:
            self.found = value
            return
        into = self._open[-1][0]
        if isinstance(into, list):
            into.append(value)
            return
        into[self._keys[-1]] = value
        self._keys[-1] = None


def _wrong(event: Any, words: str) -> InvalidValueError:
    return InvalidValueError(f"line {event.start_mark.line + 1}: {words}")


def _plain(event: Any, text: str) -> Any:
    """What a scalar without quotes stands for."""
    first = text[:1]
    if first in _NUMBER_STARTS:
        if len(text) > _LONGEST_NUMBER and _FLOAT.fullmatch(text):
            raise _wrong(event, f"a number of {len(text)} digits")
        if _INTEGER.fullmatch(text):
            return int(text.replace("_", ""))
        if _FLOAT.fullmatch(text):
            return float(text.replace("_", ""))
    elif first and first not in _CONSTANT_STARTS:
        return text
    return _CONSTANTS.get(text, text)
