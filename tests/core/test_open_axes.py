"""Shapes with free axes: given by a user, and seen in batches."""

import numpy as np
import pytest

from neural_mp.util.open_axes import find_differing_axes, parse_given_shapes


class _Specification:
    """Descriptions of an input, as frameworks write them."""

    def __init__(self, shape):
        self.shape, self.dtype = shape, "float32"


@pytest.mark.parametrize(
    ("given", "shapes"),
    [
        ((None, None), [(None, None)]),
        ([(None, 8), [None, None, 3]], [(None, 8), (None, None, 3)]),
        ({"x": (None, 8), "y": (4,)}, {"x": (None, 8), "y": (4,)}),
        (_Specification((None, None)), [(None, None)]),
        ([_Specification((None, 3)), (None, 8)], [(None, 3), (None, 8)]),
    ],
)
def test_shapes_are_read_from_tuples_and_specifications(given, shapes):
    assert parse_given_shapes(given) == shapes


@pytest.mark.parametrize(
    "given", [None, "x, y", ["x", "y"], np.zeros((2, 3)), {"x": np.zeros(3)}, [(None, 2), "y"], ()]
)
def test_names_and_arrays_are_no_shapes(given):
    assert parse_given_shapes(given) is None


def _zeros(*shape):
    return np.zeros(shape)


def test_axes_in_which_batches_differ_are_free():
    batches = [_zeros(8, 32, 4), _zeros(8, 32, 4), _zeros(8, 20, 4), _zeros(3, 44, 4)]
    shapes, unlike = find_differing_axes(batches)
    assert shapes == [(None, None, 4)]
    assert unlike is batches[2]


def test_axes_are_compared_by_name_without_labels():
    batches = [
        {"ids": _zeros(2, size), "kind": _zeros(2, 3), "labels": _zeros(2, size + 1)}
        for size in (5, 6)
    ]
    shapes, unlike = find_differing_axes(batches)
    assert shapes == {"ids": (None, None), "kind": (None, 3)}
    assert unlike is batches[1]


@pytest.mark.parametrize(
    "batches",
    [
        [],
        [_zeros(8, 4), _zeros(2, 4)],
        [_zeros(8, 4), _zeros(8, 4, 1)],
        [[_zeros(8, 4)], [_zeros(8, 5), _zeros(8, 5)]],
        [{"x": _zeros(8, 4)}, {"y": _zeros(8, 5)}],
        [{"x": _zeros(8, 4)}, [_zeros(8, 5)]],
    ],
)
def test_batches_alike_or_of_other_structure_free_nothing(batches):
    assert find_differing_axes(batches) is None
