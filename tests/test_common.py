import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from neural_mp.common import DataLoader, Dataset, Metric
from neural_mp.errors import DataError


def samples(count):
    return [(np.full((2, 3), index, np.float32), index) for index in range(count)]


@given(st.integers(0, 30), st.integers(1, 8))
def test_every_sample_comes_once_and_in_order(count, batch_size):
    loader = DataLoader(samples(count), batch_size)
    labels = [label for _, batch in loader for label in batch]
    assert labels == list(range(count))
    assert len(list(loader)) == len(loader)


@given(st.integers(0, 30), st.integers(1, 8))
def test_discarding_leaves_whole_batches_only(count, batch_size):
    loader = DataLoader(samples(count), batch_size, last_batch="discard")
    assert [len(labels) for _, labels in loader] == [batch_size] * (count // batch_size)
    assert len(loader) == count // batch_size


def test_samples_are_stacked_inside_tuples_and_dicts():
    data = [({"a": np.zeros(2), "b": (np.ones(3), 1)}, 0) for _ in range(4)]
    ((inputs, labels),) = DataLoader(data, 4)
    assert inputs["a"].shape == (4, 2)
    assert inputs["b"][0].shape == (4, 3)
    assert inputs["b"][1].shape == labels.shape == (4,)


def test_shuffling_draws_new_orders_but_the_same_for_the_same_seed():
    def orders(seed):
        loader = DataLoader(samples(20), 20, shuffle=True, seed=seed)
        return [tuple(labels) for _ in range(2) for _, labels in loader]

    first, second = orders(1)
    assert sorted(first) == sorted(second) == list(range(20))
    assert first != second
    assert orders(1) == [first, second]
    assert orders(2)[0] != first


def test_an_iterable_will_do():
    def read():
        yield from samples(5)

    loader = DataLoader(read(), 2)
    for _ in range(2):  # one that can be walked only once is kept
        assert [list(labels) for _, labels in loader] == [[0, 1], [2, 3], [4]]


def test_a_collate_function_of_ones_own():
    loader = DataLoader(samples(3), 3, collate_fn=lambda batch: sum(label for _, label in batch))
    assert list(loader) == [3]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"dataset": 5}, "be iterable, got int"),
        ({"batch_size": 0}, "batch_size.*got 0"),
        ({"batch_size": 2.0}, r"batch_size.*got 2\.0"),
        ({"last_batch": "drop"}, "'drop'"),
        ({"dataset": {1, 2}, "shuffle": True}, "shuffle requires"),
        ({"collate_fn": 3}, "collate_fn must be a function"),
    ],
)
def test_wrong_arguments_are_named(arguments, message):
    with pytest.raises(DataError, match=message):
        DataLoader(**{"dataset": samples(3), **arguments})


def test_samples_of_different_shapes_are_refused_with_a_way_out():
    ragged = [(np.zeros(3), 0), (np.zeros(4), 1)]
    with pytest.raises(DataError, match=r"\(3,\), \(4,\).*collate_fn"):
        list(DataLoader(ragged, 2))


def test_the_protocols_describe_what_users_write(digits, accuracy):
    assert isinstance(digits[0], Dataset)
    assert isinstance(accuracy, Metric)
