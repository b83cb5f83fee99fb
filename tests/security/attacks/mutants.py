"""What mutations make of data and bytes: every place once, in an order that a seed shuffles."""

from __future__ import annotations

import copy
import random
from collections.abc import Callable, Iterator, Sequence
from typing import Any

Place = tuple[str | int, ...]

#: What stands in the place of a value; each is made anew, since some are changed by who reads them.
HOSTILE: dict[str, Callable[[], Any]] = {
    "None": lambda: None,
    "a list": list,
    "a dict": dict,
    "-1": lambda: -1,
    "0": lambda: 0,
    "10**30": lambda: 10**30,
    "10**400": lambda: 10**400,
    "1.5": lambda: 1.5,
    "NaN": lambda: float("nan"),
    "inf": lambda: float("inf"),
    "-inf": lambda: float("-inf"),
    "True": lambda: True,
    "False": lambda: False,
    "no text": lambda: "",
    "NUL": lambda: "\0",
    "a NUL within": lambda: "a\0b",
    "abc": lambda: "abc",
    "a path": lambda: "../../etc/passwd",
    "a long text": lambda: "x" * 1_000_000,
    "long words": lambda: "int8 " * 100_000,
    "controls": lambda: "a\nb\x1b[31m\r",
    "other letters": lambda: "ä\u2028\U0001f600",
    "nested lists": lambda: [[[[[[]]]]]],
    "numbers": lambda: [1, 2.5, "x", None],
    "a dict of dicts": lambda: {"a": {"b": {"c": None}}},
    "int8": lambda: "int8",
    "a code": lambda: "os:system",
}
_KEYS = ("", "\0", "abc", "x" * 100_000, "__class__", "0")


def places(tree: Any, at: Place = ()) -> Iterator[Place]:
    """All places in nested lists and dicts but the top; of a long list its ends."""
    if isinstance(tree, dict):
        items: list[tuple[str | int, Any]] = list(tree.items())
    elif isinstance(tree, list):
        ends = range(len(tree)) if len(tree) < 5 else (0, 1, len(tree) - 1)
        items = [(index, tree[index]) for index in ends]
    else:
        return
    for key, value in items:
        yield (*at, key)
        yield from places(value, (*at, key))


def mutants(tree: Any, seed: str, count: int) -> Iterator[tuple[str, Any]]:
    """What a tree becomes by one mutation each: a name of it, and the tree."""
    every = [(path, change) for path in places(tree) for change in (*HOSTILE, *_CHANGES)]
    drawn = random.Random(seed)
    drawn.shuffle(every)
    for number in range(count):
        path, change = every[number % len(every)]
        name = f"{'.'.join(map(str, path))}: {change}"
        yield name, mutated(tree, path, change, drawn)


def mutated(tree: Any, path: Place, change: str, drawn: random.Random) -> Any:
    """A tree with one place changed."""
    whole = copy.deepcopy(tree)
    above = whole
    for key in path[:-1]:
        above = above[key]
    if change in HOSTILE:
        above[path[-1]] = HOSTILE[change]()
    else:
        _CHANGES[change](above, path[-1], drawn)
    return whole


def _delete(above: Any, key: Any, _: random.Random) -> None:
    del above[key]


def _rename(above: Any, key: Any, drawn: random.Random) -> None:
    if isinstance(above, dict):
        above[drawn.choice(_KEYS)] = above.pop(key)
    else:
        above.reverse()


def _duplicate(above: Any, key: Any, _: random.Random) -> None:
    if isinstance(above, dict):
        above[f"{key}_"] = copy.deepcopy(above[key])
    else:
        above.extend([copy.deepcopy(above[key])] * 3)


def _swap(above: Any, key: Any, drawn: random.Random) -> None:
    sibling = drawn.choice(list(above) if isinstance(above, dict) else range(len(above)))
    above[key], above[sibling] = above[sibling], above[key]


def _wrap(above: Any, key: Any, _: random.Random) -> None:
    above[key] = [above[key]]


def _scale(above: Any, key: Any, _: random.Random) -> None:
    value = above[key]
    above[key] = value * 1000 if isinstance(value, int | float) else {"value": value}


_CHANGES: dict[str, Callable[[Any, Any, random.Random], None]] = {
    "deleted": _delete,
    "renamed": _rename,
    "duplicated": _duplicate,
    "swapped": _swap,
    "in a list": _wrap,
    "scaled": _scale,
}


def broken(data: bytes, drawn: random.Random) -> tuple[str, bytes]:
    """Bytes with a few of them changed: a name of the change, and the bytes."""
    kind = drawn.choice(("flipped", "flipped", "cut", "empty", "doubled", "zeroed", "inserted"))
    where = drawn.randrange(max(1, len(data)))
    changed = bytearray(data)
    if kind == "flipped":
        for _ in range(drawn.choice((1, 2, 16)) if data else 0):
            changed[drawn.randrange(len(data))] ^= 1 << drawn.randrange(8)
    elif kind == "cut":
        del changed[where:]
    elif kind == "empty":
        changed.clear()
    elif kind == "doubled":
        changed += data
    elif kind == "zeroed":
        changed[where : where + 64] = bytes(len(changed[where : where + 64]))
    else:
        changed[where:where] = drawn.randbytes(drawn.choice((1, 8, 64)))
    return f"{kind} at {where}", bytes(changed)


def lines_broken(text: str, drawn: random.Random) -> tuple[str, str]:
    """A text with one line changed: a name of the change, and the text."""
    lines = text.splitlines()
    where = drawn.randrange(len(lines))
    kind = drawn.choice(("deleted", "doubled", "deeper", "shallower", "moved", "a mark"))
    line = lines.pop(where)
    if kind == "doubled":
        lines[where:where] = [line, line]
    elif kind == "deeper":
        lines.insert(where, f"  {line}")
    elif kind == "shallower":
        lines.insert(where, line.removeprefix("  "))
    elif kind == "moved":
        lines.insert(drawn.randrange(len(lines) + 1), line)
    elif kind == "a mark":
        mark = drawn.choice(_MARKS)
        column = drawn.randrange(len(line) + 1)
        lines.insert(where, line[:column] + mark + line[column:])
    return f"line {where + 1} {kind}", "\n".join(lines)


_MARKS: Sequence[str] = (
    "&a ",
    "*a ",
    "!!python/object:os.system ",
    "!!binary ",
    "!!set ",
    "<<: ",
    "{",
    "[",
    "]",
    "}",
    "- ",
    "? ",
    ": ",
    "#",
    "'",
    '"',
    "|",
    ">",
    "%",
    "@",
    "\t",
    "\x00",
    "---\n",
    "...\n",
    "\x7f",
)
