"""Protocol Buffers messages with one thing changed, of any type of message."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from mutants import broken

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
        found = getattr(self.above, self.field.name)
        return found if self.index is None else found[self.index]

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
    for place in _places(message):
        kinds.setdefault(place.kind, []).append(place)
    if not kinds:
        return "nothing"
    place = drawn.choice(kinds[drawn.choice(list(kinds))])
    others = [other for other in kinds[place.kind] if other is not place]
    name = str(place)
    if drawn.random() < 0.15:
        return f"{name}: {_removed(place)}"
    if place.index is not None and drawn.random() < 0.2:
        return f"{name}: {_repeated(place, drawn)}"
    if others and drawn.random() < 0.3:
        return f"{name}: {_taken_from(place, drawn.choice(others))}"
    return f"{name}: {_changed(place, drawn)}"


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


def _removed(place: _Place) -> str:
    if place.index is None:
        place.above.ClearField(place.field.name)
    else:
        del getattr(place.above, place.field.name)[place.index]
    return "removed"


def _repeated(place: _Place, drawn: random.Random) -> str:
    """Repeat an entry, under another key in a map, or reverse the order."""
    found = getattr(place.above, place.field.name)
    if _is_map(place.field):
        key = drawn.choice(_TEXTS) if isinstance(place.index, str) else drawn.choice((0, 9, -1))
        if _is_message(place.field.message_type.fields_by_name["value"]):
            found[key].CopyFrom(found[place.index])
        else:
            found[key] = found[place.index]
        return f"also under {key[:20] if isinstance(key, str) else key!r}"
    times = drawn.choice((1, 3, 100))
    kept = [_copy(found[place.index]) for _ in range(times)]
    found.extend(kept)
    return f"{times} times more"


def _copy(value: Any) -> Any:
    if not hasattr(value, "CopyFrom"):
        return value
    copied = type(value)()
    copied.CopyFrom(value)
    return copied


def _taken_from(place: _Place, other: _Place) -> str:
    """Put what another field of the same kind has."""
    value = _copy(other.value)
    if hasattr(value, "CopyFrom"):
        place.value.CopyFrom(value)
    else:
        place.put(value)
    return f"as in {other}"


def _changed(place: _Place, drawn: random.Random) -> str:
    """Put a value of the same type that makes no sense."""
    field = place.field.message_type.fields_by_name["value"] if _is_map(place.field) else None
    field = field or place.field
    if _is_message(field):
        place.value.Clear()
        return "emptied"
    if field.enum_type is not None:
        place.put(drawn.choice(list(field.enum_type.values_by_number)))
        return f"is {place.value}"
    change, values = _OF_TYPES[field.cpp_type](place.value, drawn)
    for value in values:
        try:
            place.put(value)
        except (ValueError, TypeError):  # out of the range of the field
            continue
        return change
    return "as it was"


def _number(value: Any, drawn: random.Random) -> tuple[str, list[Any]]:
    wanted = drawn.choice((*_INTEGERS, value + 1, value - 1, -value))
    return f"is {wanted}", [wanted, drawn.choice(_INTEGERS[:8]), 0]


def _real(_: Any, drawn: random.Random) -> tuple[str, list[Any]]:
    wanted = drawn.choice(_REALS)
    return f"is {wanted}", [wanted]


def _flag(value: Any, _: random.Random) -> tuple[str, list[Any]]:
    return f"is {not value}", [not value]


def _text(value: Any, drawn: random.Random) -> tuple[str, list[Any]]:
    if isinstance(value, bytes):
        change, data = broken(value, drawn)
        return change, [data]
    wanted = drawn.choice((*_TEXTS, value[:-1], f"{value}x"))
    return f"is {wanted[:20]!r}", [wanted]


#: Type of a field, as `FieldDescriptor.cpp_type`, → (value, random numbers) → change, values.
_OF_TYPES: dict[int, Callable[[Any, random.Random], tuple[str, list[Any]]]] = {
    **dict.fromkeys((1, 2, 3, 4), _number),
    **dict.fromkeys((5, 6), _real),
    7: _flag,
    9: _text,
}
