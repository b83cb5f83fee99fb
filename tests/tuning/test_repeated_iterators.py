"""Loaders that return one iterator in every pass: accepted if it starts again, else refused."""

import numpy as np
import pytest
import torch

from neural_mp.errors import DataError
from neural_mp.tuning.evaluation.batches import Batches


def numbered(numbers):
    return [(np.full(2, number), np.full(2, number)) for number in numbers]


class Restarting:
    """A loader whose own iterator starts again in every pass."""

    def __init__(self):
        self.iterator = self.Rows()

    class Rows:
        def __iter__(self):
            return self

        def __next__(self):
            if not self.left:
                raise StopIteration
            return self.left.pop(0)

    def __iter__(self):
        self.iterator.left = numbered(range(5))
        return self.iterator


class Continuing(Restarting):
    """A loader whose iterator continues where the last pass ended."""

    def __iter__(self):
        if not hasattr(self.iterator, "left"):
            super().__iter__()
        return self.iterator


def numbers_of(batches):
    return [int(labels[0]) for _, labels in batches.iterate_pairs()]


def test_an_iterator_that_starts_again_is_a_new_pass():
    batches = Batches(Restarting(), "eval_dataloader")
    assert int(batches.first_pair[1][0]) == 0  # an interrupted pass
    assert [numbers_of(batches) for _ in range(3)] == [[0, 1, 2, 3, 4]] * 3


def test_an_iterator_that_continues_is_refused_after_an_interrupted_and_a_complete_pass():
    interrupted, complete = (Batches(Continuing(), "eval_dataloader") for _ in range(2))
    assert int(interrupted.first_pair[1][0]) == 0
    assert numbers_of(complete) == [0, 1, 2, 3, 4]
    for batches in (interrupted, complete):
        with pytest.raises(DataError, match="eval_dataloader must return a new iterator"):
            numbers_of(batches)


@pytest.mark.slow
@pytest.mark.parametrize("shuffled", [False, True])
def test_persistent_workers_of_torch_are_read_in_every_pass(shuffled):
    rows = torch.arange(23)
    loader = torch.utils.data.DataLoader(
        torch.utils.data.TensorDataset(rows, rows),
        4,
        shuffle=shuffled,
        num_workers=1,
        persistent_workers=True,
        # A fork of a process that runs other frameworks' threads may crash.
        multiprocessing_context="spawn",
    )
    batches = Batches(loader, "eval_dataloader")
    assert len(batches.first_pair[1]) == 4  # an interrupted pass
    for _ in range(3):
        labels = torch.cat([labels for _, labels in batches.iterate_pairs()]).tolist()
        assert sorted(labels) == list(range(23))
