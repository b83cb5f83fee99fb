"""The cut against all assignments there are."""

from __future__ import annotations

from itertools import product
from math import inf

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from neural_mp.search.assignment import Assignment, CutSolver, SharedCost

pytestmark = pytest.mark.slow


def every(problem: Assignment) -> list[tuple[float, float]]:
    """The time and harm of all assignments that may be."""
    nodes = list(problem.costs)
    levels = range(len(problem.costs[nodes[0]]))
    costs = (
        problem.evaluate_cost(dict(zip(nodes, chosen, strict=True)))
        for chosen in product(levels, repeat=len(nodes))
    )
    return [(time, harm) for time, harm in costs if time < inf]


def cheapest(problem: Assignment, weight: float = 0.0) -> dict:
    return CutSolver(problem).find_best_levels(weight)


@st.composite
def assignments(draw, count: int) -> Assignment:
    """A few nodes, some bound to some levels, and costs shared by any of them."""
    nodes = [f"n{i}" for i in range(draw(st.integers(1, 9 - count)))]
    number = st.integers(0, 50).map(float)
    cost = st.tuples(number, number)
    costs = {}
    for node in nodes:
        drawn = [draw(st.one_of(cost, st.just((inf, 0.0)))) for _ in range(count)]
        drawn[draw(st.integers(0, count - 1))] = draw(cost)
        costs[node] = tuple(drawn)
    shared = [
        SharedCost(
            draw(cost),
            draw(st.integers(1, count - 1)),
            tuple(draw(st.lists(st.sampled_from(nodes), min_size=1, max_size=4, unique=True))),
            draw(st.booleans()),
            draw(st.one_of(st.none(), st.sampled_from(nodes))),
        )
        for _ in range(draw(st.integers(0, 8)))
    ]
    return Assignment(costs, shared)


@pytest.mark.parametrize("count", [2, 3, 4])
@settings(max_examples=100)
@given(data=st.data())
def test_no_assignment_is_better(count, data):
    problem = data.draw(assignments(count))
    weight = data.draw(st.sampled_from([0.0, 0.25, 1.0, 3.0]))
    time, harm = problem.evaluate_cost(cheapest(problem, weight))
    assert time + weight * harm == min(t + weight * h for t, h in every(problem))


@pytest.mark.parametrize("count", [2, 3])
@settings(max_examples=80)
@given(data=st.data())
def test_the_extreme_weights_minimize_one_cost_and_break_ties_by_the_other(count, data):
    problem = data.draw(assignments(count))
    costs = every(problem)
    assert problem.evaluate_cost(cheapest(problem, inf)) == min(costs, key=lambda cost: cost[::-1])
    assert problem.evaluate_cost(cheapest(problem, 0.0)) == min(costs)


def test_of_equals_the_highest_levels():
    costs = {"a": ((1.0, 0.0),) * 3, "b": ((0.0, 0.0), (1.0, 0.0), (2.0, 0.0))}
    assert cheapest(Assignment(costs)) == {"a": 2, "b": 0}


def test_what_several_share_is_paid_once():
    costs = {"a": ((0.0, 0.0), (4.0, 0.0)), "b": ((0.0, 0.0), (4.0, 0.0))}
    noise = Assignment(costs, [SharedCost((0.0, 7.0), 1, ("a", "b"))])
    assert noise.evaluate_cost({"a": 0, "b": 0}) == (0.0, 7.0)
    assert cheapest(noise, 1.0) == {"a": 0, "b": 0}
    # To raise one of the two alone would take nothing away.
    assert cheapest(noise, 2.0) == {"a": 1, "b": 1}


def test_a_conversion_is_paid_between_two_levels_only():
    costs = {"writer": ((3.0, 0.0), (0.0, 0.0)), "reader": ((0.0, 0.0), (3.0, 0.0))}
    quantize = SharedCost((5.0, 0.0), 1, ("reader",), and_not="writer")
    dequantize = SharedCost((5.0, 0.0), 1, ("reader",), below=False, and_not="writer")
    together = Assignment(costs, [quantize, dequantize])
    levels = cheapest(together)
    assert levels["writer"] == levels["reader"]
    assert together.evaluate_cost(levels) == (3.0, 0.0)


def test_small_costs_count_beside_large_ones():
    costs = {
        "a": ((1e-6, 0.0), (2e-6, 0.0)),
        "b": ((2e-6, 0.0), (1e-6, 0.0)),
        "c": ((1.0, 0.0), (0.5, 0.0)),
    }
    assert cheapest(Assignment(costs)) == {"a": 0, "b": 1, "c": 1}


def test_no_nodes_and_no_choice():
    assert cheapest(Assignment({})) == {}
    assert cheapest(Assignment({"a": ((3.0, 0.0),)})) == {"a": 0}


def test_a_node_without_a_level_is_refused():
    with pytest.raises(ValueError, match="node 'a'"):
        CutSolver(Assignment({"a": ((inf, 0.0), (inf, 0.0))}))
    with pytest.raises(ValueError, match="node 'b'"):
        CutSolver(Assignment({"a": ((1.0, 0.0),) * 2, "b": ((1.0, 0.0),) * 3}))
