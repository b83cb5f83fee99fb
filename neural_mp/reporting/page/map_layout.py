"""Layout of the kernel map: layered from top to bottom, folded into columns.

A graph of 500 layers is cut at the layers with the fewest crossing edges, and the pieces are placed
side by side, so that a whole model fits a screen. Time is roughly linear in the number of edges.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from math import ceil, sqrt
from typing import Any

from neural_mp.core.graph import Op, OpGraph
from neural_mp.errors import visible
from neural_mp.reporting.page.charts import shorten_names

Edge = tuple[int, int]

#: Box width, gap between boxes, and width of a passing edge, in map units.
BOX_WIDTH, GAP, LANE = 132, 18, 18
_ORDER_SWEEPS, _PLACE_SWEEPS = 6, 10
#: Weight of a box relative to a passing edge in the placement.
_BOX_WEIGHT = 12.0


@dataclass
class Layers:
    """Layered drawing of one column of the map.

    Attributes:
        rows: nodes of each layer: boxes, and negative numbers for passing edges.
        above, below: node → its neighbours in the previous and the next layer.
        chains: edge → the nodes on its path.
    """

    rows: list[list[int]]
    above: dict[int, list[int]] = field(default_factory=lambda: defaultdict(list))
    below: dict[int, list[int]] = field(default_factory=lambda: defaultdict(list))
    chains: dict[Edge, list[int]] = field(default_factory=dict)

    @classmethod
    def from_edges(cls, row_of: Mapping[int, int], edges: Iterable[Edge]) -> Layers:
        """Create the layers of boxes and downward edges."""
        layers = cls([[] for _ in range(max(row_of.values(), default=-1) + 1)])
        for box, row in row_of.items():
            layers.rows[row].append(box)
        passing = 0
        for first, last in edges:
            chain = [first]
            for row in range(row_of[first] + 1, row_of[last]):
                passing -= 1
                layers.rows[row].append(passing)
                chain.append(passing)
            chain.append(last)
            layers.chains[first, last] = chain
            for upper, lower in pairwise(chain):
                layers.below[upper].append(lower)
                layers.above[lower].append(upper)
        return layers

    def place_nodes(self) -> dict[int, float]:
        """Return node → horizontal centre."""
        for sweep in range(_ORDER_SWEEPS):
            self._sort_layers(downwards=sweep % 2 == 0)
        centres: dict[int, float] = {}
        for row in self.rows:
            centres.update(zip(row, pack_intervals([_get_node_width(n) for n in row]), strict=True))
        for sweep in range(_PLACE_SWEEPS):
            rows = self.rows if sweep % 2 == 0 else self.rows[::-1]
            for row in rows:
                self._move_to_neighbours(row, centres, sweep)
        start = min((x - _get_node_width(node) / 2 for node, x in centres.items()), default=0.0)
        return {node: x - start for node, x in centres.items()}

    def _sort_layers(self, downwards: bool) -> None:
        """Sort each layer by the mean position of its neighbours (barycenter heuristic)."""
        neighbours = self.above if downwards else self.below
        rows = self.rows if downwards else self.rows[::-1]
        for previous, row in pairwise(rows):
            positions = {node: index for index, node in enumerate(previous)}
            order = {node: float(index) for index, node in enumerate(row)}
            means = {
                node: sum(positions[n] for n in neighbours[node]) / len(neighbours[node])
                if neighbours[node]
                else order[node]
                for node in row
            }
            row.sort(key=lambda node: (means[node], node < 0, order[node]))

    def _move_to_neighbours(self, row: list[int], centres: dict[int, float], sweep: int) -> None:
        targets, weights = [], []
        for node in row:
            above, below = self.above[node], self.below[node]
            peers = [*above, *below] if sweep > 1 else (below if sweep % 2 else above)
            alike = [peer for peer in peers if (peer < 0) == (node < 0)]  # keeps lanes straight
            peers = alike or peers
            mean = sum(centres[n] for n in peers) / len(peers) if peers else centres[node]
            targets.append(mean)
            weights.append(_BOX_WEIGHT if node >= 0 else 1.0)
        positions = separate_intervals(targets, [_get_node_width(node) for node in row], weights)
        centres.update(zip(row, positions, strict=True))


def _get_node_width(node: int) -> float:
    return BOX_WIDTH + GAP if node >= 0 else LANE


def pack_intervals(widths: Sequence[float]) -> list[float]:
    """Return the centres of adjacent intervals without gaps."""
    centres, start = [], 0.0
    for width in widths:
        centres.append(start + width / 2)
        start += width
    return centres


def separate_intervals(
    targets: Sequence[float], widths: Sequence[float], weights: Sequence[float]
) -> list[float]:
    """Return the centres nearest to `targets` (least squares), in order and without overlap.

    Algorithm: pool adjacent violators; overlapping items move as one block.
    """
    offsets = pack_intervals(widths)
    blocks: list[tuple[float, float, int]] = []  # sum of weighted positions, weight, members
    for position, offset, weight in zip(targets, offsets, weights, strict=True):
        block = ((position - offset) * weight, weight, 1)
        while blocks and blocks[-1][0] / blocks[-1][1] > block[0] / block[1]:
            total, heavy, members = blocks.pop()
            block = (block[0] + total, block[1] + heavy, block[2] + members)
        blocks.append(block)
    moved = [total / heavy for total, heavy, members in blocks for _ in range(members)]
    return [position + offset for position, offset in zip(moved, offsets, strict=True)]


@dataclass(frozen=True)
class Kernels:
    """Groups of ops that share a kernel, with their edges.

    Attributes:
        groups: box → indices of its ops in the graph.
        edges: pairs of a box and its consumer.
    """

    groups: tuple[tuple[int, ...], ...]
    edges: tuple[tuple[int, int], ...]

    @classmethod
    def from_graph(cls, graph: OpGraph) -> Kernels:
        """Group each op with its producer if the producer's kernel can fuse it."""
        box_of: dict[str, int] = {}
        groups: list[list[int]] = []
        for index, op in enumerate(graph):
            box = next(
                (box_of[s.name] for s in _list_fusible_producers(graph, op) if s.name in box_of),
                len(groups),
            )
            if box == len(groups):
                groups.append([])
            groups[box].append(index)
            box_of[op.name] = box
        pairs = (
            (box_of[source.name], box_of[op.name])
            for op in graph
            for source in graph.producers(op.name)
        )
        edges = dict.fromkeys((source, reader) for source, reader in pairs if source != reader)
        return cls(tuple(map(tuple, groups)), tuple(edges))


def _list_fusible_producers(graph: OpGraph, op: Op) -> list[Op]:
    """Return the producers that can fuse the op and have no other consumer."""
    if op.fusion_group is None:
        return []
    return [
        source
        for source in graph.producers(op.name)
        if op.fusion_group in (source.name, source.fusion_group)
        and len(graph.consumer_names(source.name)) == 1
    ]


Point = tuple[int, int]

#: Box height, gap below a box, and gap between columns, in map units.
BOX_HEIGHT, GAP_BELOW, GUTTER = 34, 20, 46
#: Aspect ratio (width / height) of the map.
_ASPECT = 2.1
#: Minimum number of layers per column.
_LEAST_TALL = 10


@dataclass(frozen=True)
class DrawnEdge:
    """Edge between two boxes with its points; `far` if it leaves its column."""

    source: int
    reader: int
    points: tuple[Point, ...]
    far: bool


@dataclass(frozen=True)
class Layout:
    """The map: centres of the boxes, edges, and total size."""

    boxes: tuple[Point, ...] = ()
    edges: tuple[DrawnEdge, ...] = ()
    size: Point = (0, 0)


def lay_out_graph(count: int, edges: Sequence[Edge]) -> Layout:
    """Compute the layout of a graph from pairs of a box and its consumer.

    Pairs must not repeat; cycles are allowed.
    """
    if not count:
        return Layout()
    ranks = rank_boxes(count, edges)
    layers = max(ranks) + 1
    wide, tall, layout = count / layers * (BOX_WIDTH + GAP) + GUTTER, 0, Layout()
    for _ in range(3):  # actual column widths differ from the estimate
        height = ceil(sqrt(layers * wide / ((BOX_HEIGHT + GAP_BELOW) * _ASPECT)))
        height = max(_LEAST_TALL, height)
        if tall and abs(height - tall) <= 0.12 * tall:
            break
        tall = height
        starts = fold_columns(ranks, edges, tall)
        layout = _Map(ranks, edges, starts).draw_layout()
        wide = layout.size[0] / len(starts)
    return layout


def rank_boxes(count: int, edges: Sequence[Edge]) -> list[int]:
    """Return the layer of each box, below all its producers; one edge of a cycle runs upwards."""
    readers: dict[int, list[int]] = defaultdict(list)
    waiting = [0] * count
    for source, reader in edges:
        readers[source].append(reader)
        waiting[reader] += 1
    ranks, done = [0] * count, [False] * count
    ready = [box for box in range(count) if not waiting[box]]
    sources, upcoming = list(ready), iter(range(count))
    while True:
        if not ready:
            stuck = next((box for box in upcoming if not done[box]), None)
            if stuck is None:
                break
            ready.append(stuck)
        box = ready.pop()
        done[box] = True
        for reader in readers[box]:
            if done[reader]:
                continue
            ranks[reader] = max(ranks[reader], ranks[box] + 1)
            waiting[reader] -= 1
            if not waiting[reader]:
                ready.append(reader)
    for box in sources:  # an input is placed just above its first consumer
        if readers[box]:
            ranks[box] = max(min(ranks[reader] for reader in readers[box]) - 1, 0)
    return ranks


def fold_columns(ranks: Sequence[int], edges: Sequence[Edge], tall: int) -> list[int]:
    """Return the first layer of each column, cut near height `tall` with the fewest crossings."""
    layers = max(ranks) + 1
    change = [0] * (layers + 2)
    for source, reader in edges:
        low, high = sorted((ranks[source], ranks[reader]))
        change[low + 1] += 1
        change[high + 1] -= 1
    crossing, open_edges = [], 0
    for step in change:
        open_edges += step
        crossing.append(open_edges)
    starts = [0]
    while layers - starts[-1] > tall * 1.25:
        at = starts[-1] + tall
        candidates = range(
            max(starts[-1] + 4, int(at - tall * 0.2)), min(layers - 3, int(at + tall * 0.2)) + 1
        )
        starts.append(min(candidates, key=lambda layer: (crossing[layer], abs(layer - at))))
    return starts


class _Map:
    """Columns side by side, and the edges between them."""

    def __init__(self, ranks: Sequence[int], edges: Sequence[Edge], starts: list[int]) -> None:
        self._ranks, self._edges, self._starts = ranks, edges, starts
        ends = [*starts[1:], max(ranks) + 1]
        self._column_of_rank = [
            column
            for column, (start, end) in enumerate(zip(starts, ends, strict=True))
            for _ in range(start, end)
        ]
        self._places: dict[int, Point] = {}
        self._paths: dict[Edge, tuple[Point, ...]] = {}
        self._left: list[int] = []
        self._foot: list[int] = []
        self._lanes: dict[int, int] = defaultdict(int)

    def draw_layout(self) -> Layout:
        """Return the complete layout."""
        boxes: dict[int, dict[int, int]] = defaultdict(dict)
        for box, rank in enumerate(self._ranks):
            column = self._column_of_rank[rank]
            boxes[column][box] = rank - self._starts[column]
        inside: dict[int, list[Edge]] = defaultdict(list)
        for source, reader in self._edges:
            column = self._column_of_box(source)
            downwards = self._ranks[reader] > self._ranks[source]
            if downwards and column == self._column_of_box(reader):
                inside[column].append((source, reader))
        offset = 0.0
        for column in range(len(self._starts)):
            offset += (
                self._place_column(Layers.from_edges(boxes[column], inside[column]), round(offset))
                + GUTTER
            )
        size = round(offset) - GUTTER, max(self._foot)
        edges = [
            DrawnEdge(
                *edge, self._paths.get(edge) or self._route_edge(edge), edge not in self._paths
            )
            for edge in self._edges
        ]
        return Layout(tuple(self._places[b] for b in range(len(self._ranks))), tuple(edges), size)

    def _column_of_box(self, box: int) -> int:
        return self._column_of_rank[self._ranks[box]]

    def _place_column(self, layers: Layers, offset: int) -> float:
        """Place the boxes and edges of a column; return its width."""
        centres = layers.place_nodes()
        points = {
            node: (round(offset + centres[node]), row * (BOX_HEIGHT + GAP_BELOW) + BOX_HEIGHT // 2)
            for row, nodes in enumerate(layers.rows)
            for node in nodes
        }
        self._places.update({node: point for node, point in points.items() if node >= 0})
        for edge, chain in layers.chains.items():
            self._paths[edge] = tuple(points[node] for node in chain)
        self._left.append(offset)
        self._foot.append(len(layers.rows) * (BOX_HEIGHT + GAP_BELOW) - GAP_BELOW)
        half = (BOX_WIDTH + GAP) / 2
        return max((centres[n] + (half if n >= 0 else GAP / 2) for n in centres), default=0)

    def _route_edge(self, edge: Edge) -> tuple[Point, ...]:
        """Route an edge to another column: below the foot of its column and up the gutter."""
        (x, y), (to_x, to_y) = (self._places[box] for box in edge)
        start, end = (self._column_of_box(box) for box in edge)
        self._lanes[end] += 1
        lane = self._lanes[end]
        gutter = self._left[end] - GUTTER // 2 - 12 + 6 * (lane % 5)
        if end == start + 1:
            foot = self._foot[start] + 8 + 5 * (lane % 4)
        else:
            foot = max(self._foot) + 10 + 5 * (lane % 6)
        half, top = BOX_WIDTH // 2, -14 - 4 * (lane % 3)
        if y + BOX_HEIGHT / 2 >= self._foot[start] - 2:  # the lowest box: straight down
            leaving, out = [(x, y)], x
        else:
            leaving, out = [(x + half, y), (x + half + 6, y + 6)], x + half + 6
        first_row = to_y < BOX_HEIGHT
        entering = (
            [(to_x, top), (to_x, to_y)] if first_row else [(gutter, to_y), (to_x - half, to_y)]
        )
        turn = (gutter, top if first_row else to_y)
        return (*leaving, (out, foot), (gutter, foot), turn, *entering)


#: Characters of a name in a box.
_ROOM = 18
_MAX_LEVELS = 5
#: Fraction of the boxes of the next finer level that a coarser one may have at most.
_FEWER = 0.8


@dataclass(frozen=True)
class MapLevel:
    """A map of the model.

    Attributes:
        names: box → its module, or the first op of its kernel.
        kernels: the ops of each box, and the edges between the boxes.
        modules: boxes that stand for a module.
    """

    title: str
    names: tuple[str, ...]
    kernels: Kernels
    modules: frozenset[int] = frozenset()

    def level_document(self) -> dict[str, Any]:
        """Return the level for the script of the page: boxes, edges and size."""
        layout = lay_out_graph(len(self.kernels.groups), self.kernels.edges)
        names = [visible(name) for name in self.names]
        labels = shorten_names(names, _ROOM)
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
    kernels = Kernels.from_graph(graph)
    names = tuple(ops[group[0]].name for group in kernels.groups)
    levels = [MapLevel("all kernels", names, kernels)]
    paths = [_list_containing_modules(ops[group[0]]) for group in kernels.groups]
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


def _list_containing_modules(op: Op) -> tuple[str, ...]:
    """Return the modules that contain an op, outermost first: its layers, or parts of its name."""
    if op.layers:
        return tuple(layer.name for layer in op.layers)
    ends = [match.start() for match in re.finditer(r"(?<=[^./])[./](?=[^./])", op.name)]
    return tuple(op.name[:end] for end in ends)
