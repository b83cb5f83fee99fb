"""The map folded by module."""

import page_records

from neural_mp.core.graph import Layer, Op, OpGraph
from neural_mp.reporting.page.map_layout import map_levels


def test_every_level_holds_every_op_once_and_is_coarser_than_the_one_before():
    graph = page_records.transformer(450)
    levels = map_levels(graph)
    assert levels[0].title == "all kernels"
    assert len(levels) > 1
    for level in levels:
        assert sorted(op for group in level.kernels.groups for op in group) == list(
            range(len(graph))
        )
    counts = [len(level.names) for level in levels]
    assert counts == sorted(counts, reverse=True)
    assert len(set(counts)) == len(counts)


def test_a_module_is_one_box_and_its_edges_lead_to_its_neighbours():
    folded = map_levels(page_records.transformer(450))[-1]
    assert folded.names[:2] == ("encoder.layer.0.attention", "encoder.layer.1.attention")
    assert folded.modules == frozenset(range(50))
    assert folded.kernels.edges == tuple((i, i + 1) for i in range(49))


def test_layers_decide_where_the_graph_has_them():
    first, second = Layer("stem", "Stem"), Layer("body", "Body")
    ops = [
        Op("a", "linear", ("x",), layers=(first,)),
        Op("b", "linear", ("a",), layers=(first,)),
        Op("c", "linear", ("b",), layers=(second,)),
        Op("d", "linear", ("c",), layers=(second,)),
        Op("e", "linear", ("d",)),
    ]
    folded = map_levels(OpGraph(ops, ["x"], ["e"]))[-1]
    assert folded.names == ("stem", "body", "e")
    assert folded.kernels.groups == ((0, 1), (2, 3), (4,))
    assert folded.modules == {0, 1}


def test_a_graph_without_modules_has_one_map():
    assert len(map_levels(page_records.chain(12))) == 1


def test_boxes_have_different_labels_and_modules_their_names():
    document = map_levels(page_records.transformer(450))[-1].level_document()
    labels = [box[3] for box in document["boxes"]]
    assert len(set(labels)) == 50
    assert document["boxes"][7][4] == "encoder.layer.7.attention"
