"""Protocol Buffers messages with one thing changed, of any type of message."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from attacks.mutants import broken

_INTEGERS = (0, -1, 1, 2, 3, 7, 99, 1000, 10**6, 2**31 - 1, -(2**31), 2**63 - 1, -(2**63))
_REALS = (0.0, -1.0, 1e-30, 1e30, float("nan"), float("inf"), float("-inf"))
_TEXTS = ("", "\0", "x", "../../etc/passwd", "a\nb\x1b[31m", "x" * 100_000, "^x", "x:7", "ä")
#: Values of the fields of one message that are listed.
_MOST_VALUES = 200


@dataclass(frozen=True)
class _Place:
    """A field of a message, and a position in the field if the field is repeated."""

    above: Any
    field: Any
    index: Any = None

    @property
    def kind(self) -> tuple[str, str]:
        return self.above.DESCRIPTOR.name, self.field.name

    @property
    def value(self) -> Any:
        content = getattr(self.above, self.field.name)
        return content if self.index is None else content[self.index]

    def put(self, value: Any) -> None:
        """Set a scalar."""
        if self.index is None:
            setattr(self.above, self.field.name, value)
        else:
            getattr(self.above, self.field.name)[self.index] = value

    def __str__(self) -> str:
        index = "" if self.index is None else f"[{self.index}]"
        return f"{self.above.DESCRIPTOR.name}.{self.field.name}{index}"


def altered(message: Any, drawn: random.Random) -> str:
    """Change one thing in a message, in place; return a name of the change.

    The kind of field is drawn first, so that fields that are there a thousand times do not take
    the attacks from all others.
    """
    kinds: dict[tuple[str, str], list[_Place]] = {}
    for location in _places(message):
        kinds.setdefault(location.kind, []).append(location)
    if not kinds:
        return "nothing"
    location = drawn.choice(kinds[drawn.choice(list(kinds))])
    candidates = [candidate for candidate in kinds[location.kind] if candidate is not location]
    name = str(location)
    if drawn.random() < 0.15:
        return f"{name}: {_removed(location)}"
    if location.index is not None and drawn.random() < 0.2:
        return f"{name}: {_repeated(location, drawn)}"
    if candidates and drawn.random() < 0.3:
        return f"{name}: {_taken_from(location, drawn.choice(candidates))}"
    return f"{name}: {_changed(location, drawn)}"


def _places(message: Any) -> Iterator[_Place]:
    """Yield all fields that are set, at any depth."""
    for field, value in message.ListFields():
        if _is_map(field):
            for key in list(value)[:_MOST_VALUES]:
                yield _Place(message, field, key)
                if _is_message(field.message_type.fields_by_name["value"]):
                    yield from _places(value[key])
        elif _is_repeated(field):
            for index in range(min(len(value), _MOST_VALUES)):
                yield _Place(message, field, index)
                if _is_message(field):
                    yield from _places(value[index])
        else:
            yield _Place(message, field)
            if _is_message(field):
                yield from _places(value)


def _is_map(field: Any) -> bool:
    return _is_message(field) and bool(field.message_type.GetOptions().map_entry)


def _is_message(field: Any) -> bool:
    return field.message_type is not None


def _is_repeated(field: Any) -> bool:
    return bool(field.is_repeated)


def _removed(location: _Place) -> str:
    if location.index is None:
        location.above.ClearField(location.field.name)
    else:
        del getattr(location.above, location.field.name)[location.index]
    return "removed"


def _repeated(location: _Place, drawn: random.Random) -> str:
    """Repeat an entry, under another key in a map, or reverse the order."""
    entries = getattr(location.above, location.field.name)
    if _is_map(location.field):
        key = drawn.choice(_TEXTS) if isinstance(location.index, str) else drawn.choice((0, 9, -1))
        if _is_message(location.field.message_type.fields_by_name["value"]):
            entries[key].CopyFrom(entries[location.index])
        else:
            entries[key] = entries[location.index]
        return f"also under {key[:20] if isinstance(key, str) else key!r}"
    times = drawn.choice((1, 3, 100))
    copies = [_copy(entries[location.index]) for _ in range(times)]
    entries.extend(copies)
    return f"{times} times more"


def _copy(value: Any) -> Any:
    if not hasattr(value, "CopyFrom"):
        return value
    copied = type(value)()
    copied.CopyFrom(value)
    return copied


def _taken_from(location: _Place, source: _Place) -> str:
    """Put what another field of the same kind has."""
    value = _copy(source.value)
    if hasattr(value, "CopyFrom"):
        location.value.CopyFrom(value)
    else:
        location.put(value)
    return f"as in {source}"


def _changed(location: _Place, drawn: random.Random) -> str:
    """Put a value of the same type that makes no sense."""
    field = location.field.message_type.fields_by_name["value"] if _is_map(location.field) else None
    field = field or location.field
    if _is_message(field):
        location.value.Clear()
        return "emptied"
    if field.enum_type is not None:
        location.put(drawn.choice(list(field.enum_type.values_by_number)))
        return f"is {location.value}"
    change, values = _OF_TYPES[field.cpp_type](location.value, drawn)
    for value in values:
        try:
            location.put(value)
        except (ValueError, TypeError):  # out of the range of the field
            continue
        return change
    return "as it was"


def _number(value: Any, drawn: random.Random) -> tuple[str, list[Any]]:
    number = drawn.choice((*_INTEGERS, value + 1, value - 1, -value))
    return f"is {number}", [number, drawn.choice(_INTEGERS[:8]), 0]


def _real(_: Any, drawn: random.Random) -> tuple[str, list[Any]]:
    number = drawn.choice(_REALS)
    return f"is {number}", [number]


def _flag(value: Any, _: random.Random) -> tuple[str, list[Any]]:
    return f"is {not value}", [not value]


def _text(value: Any, drawn: random.Random) -> tuple[str, list[Any]]:
    if isinstance(value, bytes):
        change, data = broken(value, drawn)
        return change, [data]
    text = drawn.choice((*_TEXTS, value[:-1], f"{value}x"))
    return f"is {text[:20]!r}", [text]


#: Type of a field, as `FieldDescriptor.cpp_type`, → (value, random numbers) → change, values.
_OF_TYPES: dict[int, Callable[[Any, random.Random], tuple[str, list[Any]]]] = {
    **dict.fromkeys((1, 2, 3, 4), _number),
    **dict.fromkeys((5, 6), _real),
    7: _flag,
    9: _text,
}
