"""The lower hull of time against harm: every assignment that is the best for some weight."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from math import inf

from neural_mp.search.cut import Assignment, Cut, Node

#: Differences smaller than this share of the whole are rounding.
_ROUNDING = 1e-6


@dataclass(frozen=True)
class Point:
    """One assignment of the front.

    Attributes:
        levels: node → level.
        time, harm: what it costs.
    """

    levels: Mapping[Node, int]
    time: float
    harm: float


def front(problem: Assignment) -> list[Point]:
    """The hull, the fastest first and what does least harm last.

    Between two neighbours lies no assignment that is better than both for some weight. Each point
    takes about two cuts.
    """
    cut = Cut(problem)

    def best(weight: float) -> Point:
        levels = cut.best(weight)
        return Point(levels, *problem.cost(levels))

    harmless, fastest = best(inf), best(0.0)
    if _is_better(harmless, fastest):
        return [harmless]
    return [fastest, *_between(best, fastest, harmless), harmless]


def chord(faster: Point, safer: Point) -> float | None:
    """The weight at which two points are equally good; None if one is better in every way."""
    time, harm = safer.time - faster.time, faster.harm - safer.harm
    return time / harm if time > 0 and harm > 0 else None


def _is_better(point: Point, than: Point) -> bool:
    return point.harm <= than.harm and point.time <= than.time * (1 + _ROUNDING)


def _between(best: Callable[[float], Point], faster: Point, safer: Point) -> Iterator[Point]:
    """The points of the hull between two of its points."""
    waiting = [(faster, safer)]
    while waiting:
        left, right = waiting.pop()
        weight = chord(left, right)
        if weight is not None:
            found = best(weight)
            gain = (left.time + weight * left.harm) - (found.time + weight * found.harm)
            new = found.levels not in (left.levels, right.levels)
            if new and gain > 2 * _ROUNDING * (right.time - left.time):
                waiting += [(found, right), (left, found)]
                continue
        if left is not faster:
            yield left
