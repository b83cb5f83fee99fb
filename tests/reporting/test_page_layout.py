"""Where the boxes of the map lie."""

from __future__ import annotations

import random

import pytest

from neural_mp.core.graph import Op, OpGraph
from neural_mp.reporting.page.map_layout import (
    BOX_HEIGHT,
    BOX_WIDTH,
    Kernels,
    fold_columns,
    lay_out_graph,
    rank_boxes,
    separate_intervals,
)


def random_edges(count: int, seed: int) -> list[tuple[int, int]]:
    draw = random.Random(seed)
    edges = [(draw.randrange(max(0, i - 6), i), i) for i in range(1, count)]
    edges += [(a, b) for a, b in (sorted(draw.sample(range(count), 2)) for _ in range(count // 3))]
    return list(dict.fromkeys(edges))


@pytest.mark.parametrize("seed", range(5))
def test_no_two_boxes_overlap(seed):
    count = 80
    boxes = lay_out_graph(count, random_edges(count, seed)).boxes
    for index, (x, y) in enumerate(boxes):
        for other_x, other_y in boxes[:index]:
            assert abs(x - other_x) >= BOX_WIDTH or abs(y - other_y) >= BOX_HEIGHT


@pytest.mark.parametrize("seed", range(5))
def test_every_edge_begins_and_ends_at_its_boxes(seed):
    edges = random_edges(60, seed)
    layout = lay_out_graph(60, edges)
    assert [(edge.source, edge.reader) for edge in layout.edges] == edges
    for edge in layout.edges:
        for box, (x, y) in ((edge.source, edge.points[0]), (edge.reader, edge.points[-1])):
            at_x, at_y = layout.boxes[box]
            assert abs(x - at_x) <= BOX_WIDTH / 2
            assert abs(y - at_y) <= BOX_HEIGHT / 2


def test_a_box_stands_below_all_that_it_reads():
    edges = random_edges(100, 1)
    ranks = rank_boxes(100, edges)
    assert all(ranks[source] < ranks[reader] for source, reader in edges)


def test_a_loop_has_a_place_too():
    layout = lay_out_graph(4, [(0, 1), (1, 2), (2, 1), (2, 3)])
    assert len(set(layout.boxes)) == 4
    assert len(layout.edges) == 4


def test_a_long_chain_is_folded_into_columns_that_fill_a_screen():
    count = 500
    layout = lay_out_graph(count, [(i, i + 1) for i in range(count - 1)])
    assert len({x for x, _ in layout.boxes}) > 5
    assert 1 < layout.size[0] / layout.size[1] < 4


def test_a_strip_is_cut_where_fewest_edges_cross():
    skipping = [(i, i + 2) for i in range(38) if i not in (15, 16)]  # none passes layer 17's top
    edges = [*((i, i + 1) for i in range(39)), *skipping]
    assert fold_columns(list(range(40)), edges, 20) == [0, 17]


def test_things_that_want_one_place_are_pushed_apart_evenly():
    assert separate_intervals([0.0, 0.0, 0.0], [10.0, 10.0, 10.0], [1.0, 1.0, 1.0]) == [
        -10.0,
        0.0,
        10.0,
    ]
    assert separate_intervals([0.0, 50.0], [10.0, 10.0], [1.0, 1.0]) == [0.0, 50.0]


def test_nothing_has_an_empty_map():
    assert lay_out_graph(0, []).boxes == ()


def test_an_op_whose_result_others_read_too_ends_its_box():
    graph = OpGraph(
        [
            Op("conv", "conv2d", ("x",)),
            Op("relu", "relu", ("conv",), fusion_group="conv"),
            Op("also", "add", ("conv", "relu")),
        ],
        ["x"],
        ["also"],
    )
    assert Kernels.from_graph(graph).groups == ((0,), (1,), (2,))
