"""Boxes of a graph in layers, one under the other: their order, and where they lie.

The layered drawing of Sugiyama, Tagawa and Toda (1981): an edge that passes a layer has a place of
its own there, layers are ordered by the means of their neighbours, and then moved towards them.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

Edge = tuple[int, int]

#: Sizes in the map's own units: a box, the gap beside it, and an edge that passes by.
BOX_WIDTH, GAP, LANE = 132, 18, 18
_ORDER_SWEEPS, _PLACE_SWEEPS = 6, 10
#: How much more a box pulls at what it is joined to than a passing edge does.
_BOX_WEIGHT = 12.0


@dataclass
class Layers:
    """A column of the map.

    Attributes:
        rows: the nodes of every layer: boxes, and negative numbers for edges that pass.
        above, below: node → its neighbours in the layer before, and behind.
        chains: edge → the nodes it runs through.
    """

    rows: list[list[int]]
    above: dict[int, list[int]] = field(default_factory=lambda: defaultdict(list))
    below: dict[int, list[int]] = field(default_factory=lambda: defaultdict(list))
    chains: dict[Edge, list[int]] = field(default_factory=dict)

    @classmethod
    def of(cls, row_of: Mapping[int, int], edges: Iterable[Edge]) -> Layers:
        """Boxes in their rows, joined by edges that run downwards."""
        made = cls([[] for _ in range(max(row_of.values(), default=-1) + 1)])
        for box, row in row_of.items():
            made.rows[row].append(box)
        passing = 0
        for first, last in edges:
            chain = [first]
            for row in range(row_of[first] + 1, row_of[last]):
                passing -= 1
                made.rows[row].append(passing)
                chain.append(passing)
            chain.append(last)
            made.chains[first, last] = chain
            for upper, lower in pairwise(chain):
                made.below[upper].append(lower)
                made.above[lower].append(upper)
        return made

    def placed(self) -> dict[int, float]:
        """Node → its centre, from the left."""
        for sweep in range(_ORDER_SWEEPS):
            self._sort(downwards=sweep % 2 == 0)
        centres: dict[int, float] = {}
        for row in self.rows:
            centres.update(zip(row, packed([_width(node) for node in row]), strict=True))
        for sweep in range(_PLACE_SWEEPS):
            rows = self.rows if sweep % 2 == 0 else self.rows[::-1]
            for row in rows:
                self._move(row, centres, sweep)
        left = min((x - _width(node) / 2 for node, x in centres.items()), default=0.0)
        return {node: x - left for node, x in centres.items()}

    def _sort(self, downwards: bool) -> None:
        """Order every layer by the mean place of its neighbours in the one before."""
        near = self.above if downwards else self.below
        rows = self.rows if downwards else self.rows[::-1]
        for before, row in pairwise(rows):
            place = {node: index for index, node in enumerate(before)}
            here = {node: float(index) for index, node in enumerate(row)}
            means = {
                node: sum(place[n] for n in near[node]) / len(near[node])
                if near[node]
                else here[node]
                for node in row
            }
            row.sort(key=lambda node: (means[node], node < 0, here[node]))

    def _move(self, row: list[int], centres: dict[int, float], sweep: int) -> None:
        """Move the nodes of a layer towards their neighbours, as far as there is room."""
        wanted, weights = [], []
        for node in row:
            above, below = self.above[node], self.below[node]
            near = [*above, *below] if sweep > 1 else (below if sweep % 2 else above)
            alike = [other for other in near if (other < 0) == (node < 0)]  # lanes stay straight
            near = alike or near
            mean = sum(centres[n] for n in near) / len(near) if near else centres[node]
            wanted.append(mean)
            weights.append(_BOX_WEIGHT if node >= 0 else 1.0)
        found = apart(wanted, [_width(node) for node in row], weights)
        centres.update(zip(row, found, strict=True))


def _width(node: int) -> float:
    return BOX_WIDTH + GAP if node >= 0 else LANE


def packed(widths: Sequence[float]) -> list[float]:
    """Centres of things side by side without a gap."""
    centres, left = [], 0.0
    for width in widths:
        centres.append(left + width / 2)
        left += width
    return centres


def apart(
    wanted: Sequence[float], widths: Sequence[float], weights: Sequence[float]
) -> list[float]:
    """Centres nearest to those wanted, by least squares, in their order and without overlap.

    By pooling of adjacent violators: things that push at each other move as one block.
    """
    offsets = packed(widths)
    blocks: list[tuple[float, float, int]] = []  # sum of weighted places, weight, members
    for place, offset, weight in zip(wanted, offsets, weights, strict=True):
        block = ((place - offset) * weight, weight, 1)
        while blocks and blocks[-1][0] / blocks[-1][1] > block[0] / block[1]:
            total, heavy, members = blocks.pop()
            block = (block[0] + total, block[1] + heavy, block[2] + members)
        blocks.append(block)
    moved = [total / heavy for total, heavy, members in blocks for _ in range(members)]
    return [place + offset for place, offset in zip(moved, offsets, strict=True)]
