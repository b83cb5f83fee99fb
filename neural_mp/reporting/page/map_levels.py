"""Boxes of the map: one per kernel, or one per module of the model."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from neural_mp.core.graph import Op, OpGraph
from neural_mp.errors import visible
from neural_mp.reporting.page.labels import shortened
from neural_mp.reporting.page.map_layout import Edge, Kernels, laid_out

#: Characters of a name in a box.
_ROOM = 18
_MAX_LEVELS = 5
#: Fraction of the boxes of the next finer level that a coarser one may have at most.
_FEWER = 0.8


@dataclass(frozen=True)
class MapLevel:
    """A map of the model.

    Attributes:
        title: text of the choice between the maps.
        names: box → its module, or the first op of its kernel.
        kernels: the ops of each box, and the edges between the boxes.
        modules: boxes that stand for a module.
    """

    title: str
    names: tuple[str, ...]
    kernels: Kernels
    modules: frozenset[int] = frozenset()

    def document(self) -> dict[str, Any]:
        """Return the level for the script of the page: boxes, edges and size."""
        layout = laid_out(len(self.kernels.groups), self.kernels.edges)
        names = [visible(name) for name in self.names]
        labels = shortened(names, _ROOM)
        boxes = zip(layout.boxes, self.kernels.groups, names, strict=True)
        return {
            "title": self.title,
            "boxes": [
                [*at, list(group), labels[name], *([name] if index in self.modules else [])]
                for index, (at, group, name) in enumerate(boxes)
            ],
            "edges": [
                [e.source, e.reader, [n for point in e.points for n in point], int(e.far)]
                for e in layout.edges
            ],
            "size": layout.size,
        }


def map_levels(graph: OpGraph) -> list[MapLevel]:
    """Return the map of all kernels, then maps folded by module, finest first."""
    ops = list(graph)
    kernels = Kernels.of(graph)
    names = tuple(ops[group[0]].name for group in kernels.groups)
    levels = [MapLevel("all kernels", names, kernels)]
    paths = [_containing_modules(ops[group[0]]) for group in kernels.groups]
    for depth in range(max(map(len, paths), default=0), 0, -1):
        level = _fold_at_depth(levels[0], paths, depth)
        if 1 < len(level.names) <= _FEWER * len(levels[-1].names):
            levels.append(level)
    return [levels[0], *levels[1:][-_MAX_LEVELS:]]


def _fold_at_depth(finest: MapLevel, paths: list[tuple[str, ...]], depth: int) -> MapLevel:
    """Merge the kernels of each module at a depth; kernels above that depth stay boxes."""
    box_of: dict[str | int, int] = {}
    boxes = [
        box_of.setdefault(path[depth - 1] if len(path) >= depth else index, len(box_of))
        for index, path in enumerate(paths)
    ]
    groups: list[list[int]] = [[] for _ in box_of]
    for index, group in enumerate(finest.kernels.groups):
        groups[boxes[index]].extend(group)
    names = tuple(key if isinstance(key, str) else finest.names[key] for key in box_of)
    modules = frozenset(box for key, box in box_of.items() if isinstance(key, str))
    edges: Mapping[Edge, None] = dict.fromkeys(
        (boxes[source], boxes[reader])
        for source, reader in finest.kernels.edges
        if boxes[source] != boxes[reader]
    )
    kernels = Kernels(tuple(map(tuple, groups)), tuple(edges))
    return MapLevel(f"modules, depth {depth}", names, kernels, modules)


def _containing_modules(op: Op) -> tuple[str, ...]:
    """Return the modules that contain an op, outermost first: its layers, or parts of its name."""
    if op.layers:
        return tuple(layer.name for layer in op.layers)
    ends = [match.start() for match in re.finditer(r"(?<=[^./])[./](?=[^./])", op.name)]
    return tuple(op.name[:end] for end in ends)
