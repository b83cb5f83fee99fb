import pytest
from hypothesis import given
from hypothesis import strategies as st

from neural_mp.core.graph import Op, OpGraph
from neural_mp.errors import UnknownOperatorError


def test_ops_come_in_topological_order_whatever_the_order_given():
    graph = OpGraph(
        [Op("c", "add", ("a", "b")), Op("b", "relu", ("a",)), Op("a", "conv", ("x",))], ["x"]
    )
    assert [op.name for op in graph] == ["a", "b", "c"]


def test_an_order_that_is_already_topological_is_kept():
    ops = [Op("z", "t"), Op("a", "t"), Op("m", "t", ("z",)), Op("b", "t", ("a",))]
    assert list(OpGraph(ops)) == ops


@given(st.lists(st.lists(st.integers(0, 30), max_size=4), max_size=30), st.randoms())
def test_every_op_comes_after_what_it_reads(edges, random):
    ops = [
        Op(str(i), "t", tuple(str(j) for j in sources if j < i)) for i, sources in enumerate(edges)
    ]
    random.shuffle(ops)
    sorted_names = set()
    for op in OpGraph(ops):
        assert set(op.inputs) <= sorted_names
        sorted_names.add(op.name)


def test_producers_and_consumers_are_found_on_both_sides():
    graph = OpGraph(
        [Op("a", "conv", ("x",)), Op("b", "add", ("a", "a")), Op("c", "add", ("a", "x"))], ["x"]
    )
    assert [op.name for op in graph.consumers("a")] == ["b", "c"]
    assert [op.name for op in graph.consumers("x")] == ["a", "c"]
    assert [op.name for op in graph.producers("c")] == ["a"]


def test_a_loop_keeps_all_its_ops():
    graph = OpGraph(
        [
            Op("enter", "Enter", ("x",)),
            Op("body", "Add", ("enter", "next")),
            Op("next", "Next", ("body",)),
        ],
        ["x"],
    )
    assert [op.name for op in graph] == ["enter", "body", "next"]


def test_an_unknown_name_is_answered_with_the_nearest():
    graph = OpGraph([Op("layer1.conv", "conv2d")])
    with pytest.raises(UnknownOperatorError, match=r"'layer1.cnv'.*did you mean 'layer1.conv'"):
        graph["layer1.cnv"]
    with pytest.raises(UnknownOperatorError, match="'nothing'"):
        graph.consumers("nothing")


def test_edges_to_nowhere_and_repeated_names_are_refused():
    with pytest.raises(UnknownOperatorError, match="'a' reads 'y'"):
        OpGraph([Op("a", "conv", ("y",))])
    with pytest.raises(UnknownOperatorError, match="two ops are named 'a'"):
        OpGraph([Op("a", "conv"), Op("a", "relu")])
