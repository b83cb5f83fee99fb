"""Symbolic sizes compute with unknown integers as Python does with known ones."""

from __future__ import annotations

import operator

import pytest
from hypothesis import given
from hypothesis import strategies as st
from symbolic_values import value_of

from neural_mp.adaptors.common.symbolic_sizes import (
    Expression,
    broadcast_size,
    ceil_div,
    is_nonnegative,
    mark_as_size,
    maximum,
    minimum,
    unknown_size,
)

N, M = unknown_size("n"), unknown_size("m")
#: Operator → the same for integers.
_OPERATORS = {
    operator.add: operator.add,
    operator.sub: operator.sub,
    operator.mul: operator.mul,
    maximum: max,
    minimum: min,
}
_DIVISIONS = [operator.floordiv, operator.mod]

#: Tree of an expression: a name, an integer, or a tuple of operator and operands.
_LEAVES = st.sampled_from(["n", "m"]) | st.integers(-20, 20)
_TREES = st.recursive(
    _LEAVES,
    lambda trees: (
        st.tuples(st.sampled_from(list(_OPERATORS)), trees, trees)
        | st.tuples(st.sampled_from(_DIVISIONS), trees, st.integers(1, 9))
    ),
    max_leaves=12,
)


def symbolic(tree):
    if isinstance(tree, tuple):
        return tree[0](*map(symbolic, tree[1:]))
    return {"n": N, "m": M}.get(tree, tree)


def numeric(tree, values):
    if isinstance(tree, tuple):
        compute = _OPERATORS.get(tree[0], tree[0])
        return compute(*(numeric(operand, values) for operand in tree[1:]))
    return values.get(tree, tree)


@given(_TREES, st.fixed_dictionaries({"n": st.integers(0, 60), "m": st.integers(0, 60)}))
def test_expressions_have_the_values_of_their_operators(tree, values):
    size, number = symbolic(tree), numeric(tree, values)
    assert value_of(size, values) == number
    assert number >= 0 or not is_nonnegative(size)


@given(st.integers(1, 9), st.integers(1, 9), st.integers(-30, 30))
def test_strides_in_a_row_are_one_stride(first, second, shift):
    size = N * 2 + shift
    assert ceil_div(ceil_div(size, first), second) == ceil_div(size, first * second)


@given(st.integers(1, 9))
def test_padding_to_a_multiple_and_cropping_restores_the_size(block):
    around = -N % block
    assert (N + around) // block * block - around == N


def test_sizes_that_differ_for_some_values_are_not_equal():
    assert maximum(0, 15600 - N) + N != 15600
    assert ceil_div(N, 4096) != 1
    assert (N + 2) - 2 == N
    assert minimum(1, N + 2) == 1
    assert N * M * 64 // (N * M) == 64
    assert N // M != 1


def test_axes_combined_elementwise():
    assert broadcast_size(N, N) == N
    assert broadcast_size(1, N) == broadcast_size(N, 1) == N
    assert broadcast_size(8, N) == 8
    assert broadcast_size(broadcast_size(N, M), M) == broadcast_size(M, N) != N
    with pytest.raises(ValueError, match="got 3 and 4"):
        broadcast_size(3, 4)


def test_the_size_of_an_axis_is_not_negative():
    assert not is_nonnegative(N - 2)
    assert is_nonnegative(mark_as_size(N - 2))
    assert is_nonnegative(mark_as_size(N - 2) * M)


def test_expressions_of_any_graph_stay_small():
    size = N
    for index in range(200):
        size = size * (size + unknown_size(f"x{index}"))
    assert isinstance(size, Expression)
    assert len(str(size)) < 10_000
