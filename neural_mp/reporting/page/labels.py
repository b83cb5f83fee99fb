"""Names shortened to the width of a label so that they stay distinct."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence

_DOTS = "…"


def shortened(names: Iterable[str], room: int) -> dict[str, str]:
    """Return name → label of at most `room` characters; the labels of different names differ.

    A label keeps the end of its name. Names with the same end also keep as much of the start as
    distinguishes them, or else the part in which they differ, before the end if there is room.

    Raises:
        ValueError: the room is below 8 characters.
    """
    if room < 8:
        raise ValueError(f"the room must be at least 8 characters, got {room}")
    groups: dict[str, list[str]] = defaultdict(list)
    for name in dict.fromkeys(names):
        groups[_elide_middle(name, 0, room)].append(name)
    result: dict[str, str] = {}
    for label, group in groups.items():
        labels = [label] if len(group) == 1 else _distinct_labels(group, room)
        result.update(zip(group, labels, strict=True))
    return _number_duplicates(result, room)


def _distinct_labels(group: Sequence[str], room: int) -> list[str]:
    """Return labels for names with the same end."""
    for head in range(1, room - 3):
        labels = [_elide_middle(name, head, room) for name in group]
        if len(set(labels)) == len(group):
            return labels
    start = _first_difference(group)
    for width in range(1, room - 5):
        parts = (f"{_DOTS}{name[start:][:width]}{_DOTS}" for name in group)
        labels = [part + name[len(part) - room :] for part, name in zip(parts, group, strict=True)]
        if len(set(labels)) == len(group):
            return labels
    return [f"{_DOTS}{name[start:][: room - 2]}{_DOTS}" for name in group]


def _first_difference(group: Sequence[str]) -> int:
    """Return the start of the first word or number in which names differ."""
    columns = enumerate(zip(*group, strict=False))
    different = (at for at, letters in columns if len(set(letters)) > 1)
    start = next(different, min(map(len, group)))
    while start and group[0][start - 1].isalnum():
        start -= 1
    return start


def _elide_middle(name: str, head: int, room: int) -> str:
    if len(name) <= room:
        return name
    return f"{name[:head]}{_DOTS}{name[head + 1 - room :]}"


def _number_duplicates(labels: dict[str, str], room: int) -> dict[str, str]:
    counts: dict[str, int] = defaultdict(int)
    used = set(labels.values())
    numbered = {}
    for name, label in labels.items():
        counts[label] += 1
        while counts[label] > 1 and (candidate := f"{label[: room - 5]}~{counts[label]}") in used:
            counts[label] += 1
        numbered[name] = label if counts[label] == 1 else candidate
        used.add(numbered[name])
    return numbered
