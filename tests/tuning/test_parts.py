"""Some of a loader's batches, and what is read for them."""

import json
import subprocess
import sys
from pathlib import Path

import keras
import numpy as np
import pytest
import torch

from neural_mp.common import DataLoader
from neural_mp.tuning.evaluation.batches import Batches

SAMPLES, SIZE = 23, 4
WHOLE = [list(range(start, min(start + SIZE, SAMPLES))) for start in range(0, SAMPLES, SIZE)]


class Samples(torch.utils.data.Dataset):
    """Sample `i` is `(i, i)`; keeps which were read."""

    def __init__(self):
        self.read = []

    def __len__(self):
        return SAMPLES

    def __getitem__(self, index):
        if index >= SAMPLES:
            raise IndexError(index)
        self.read.append(index)
        return np.float32(index), index


class Indexed:
    """Batches by their number, without a way to walk them."""

    def __init__(self, samples):
        self.samples = samples

    def __len__(self):
        return len(WHOLE)

    def __getitem__(self, index):
        batch = [self.samples[i] for i in WHOLE[index]]
        return np.array([inputs for inputs, _ in batch]), np.array([label for _, label in batch])


class KerasBatches(Indexed, keras.utils.PyDataset):
    def __init__(self, samples):
        keras.utils.PyDataset.__init__(self)
        self.samples = samples


class Walked(DataLoader):
    """A loader that walks in a way of its own."""

    def __iter__(self):
        return super().__iter__()


class Stream(torch.utils.data.IterableDataset):
    def __init__(self, samples):
        self.samples = samples

    def __iter__(self):
        return (self.samples[index] for index in range(SAMPLES))


def drawn(samples):
    order = torch.utils.data.BatchSampler(range(SAMPLES), SIZE, drop_last=False)
    return torch.utils.data.DataLoader(samples, batch_sampler=order)


SKIPPING = {
    "loader": lambda samples: DataLoader(samples, SIZE),
    "indexed": Indexed,
    "keras": KerasBatches,
    "torch": lambda samples: torch.utils.data.DataLoader(samples, SIZE),
    "torch by a sampler": drawn,
}
WALKING = {
    "list": lambda samples: list(DataLoader(samples, SIZE)),
    "generator function": lambda samples: lambda: iter(DataLoader(samples, SIZE)),
    "a walk of its own": lambda samples: Walked(samples, SIZE),
    "stream": lambda samples: torch.utils.data.DataLoader(Stream(samples), SIZE),
}
PARTS = [slice(0, 2), slice(2, 4), slice(4, None)]


def labels(pairs):
    return [np.asarray(values).tolist() for _, values in pairs]


@pytest.mark.parametrize("make", (SKIPPING | WALKING).values(), ids=(SKIPPING | WALKING).keys())
def test_parts_together_are_all_batches_in_their_order(make):
    batches = Batches(make(Samples()), "eval_dataloader")
    assert labels(batches.iterate_pairs()) == WHOLE
    assert [batch for part in PARTS for batch in labels(batches.iterate_pairs(part))] == WHOLE
    assert labels(batches.iterate_pairs(PARTS[1])) == WHOLE[2:4]


@pytest.mark.slow
def test_parts_together_are_all_batches_of_a_loader_with_processes():
    """In a process of its own: a fork of one with all frameworks may crash."""
    script = Path(__file__).with_name("loader_with_processes.py")
    done = subprocess.run([sys.executable, script], capture_output=True, text=True, check=True)
    whole, *parts = json.loads(done.stdout)
    assert whole == WHOLE
    assert [batch for part in parts for batch in part] == WHOLE
    assert parts[1] == WHOLE[2:4]


@pytest.mark.parametrize("name", SKIPPING)
def test_batches_of_others_are_not_read(name):
    samples = Samples()
    batches = Batches(SKIPPING[name](samples), "eval_dataloader")
    list(batches.iterate_pairs(PARTS[1]))
    assert samples.read == [*range(2 * SIZE, 4 * SIZE)]


def test_an_incomplete_last_batch_that_is_dropped_stays_out_of_the_last_part():
    batches = Batches(DataLoader(Samples(), SIZE, last_batch="discard"), "eval_dataloader")
    assert labels(batches.iterate_pairs(PARTS[2])) == WHOLE[4:5]


def test_the_count_is_known_once_they_were_walked():
    batches = Batches(lambda: iter(DataLoader(Samples(), SIZE)), "eval_dataloader")
    assert batches.batch_count == 0
    assert len(list(batches)) == batches.batch_count == len(WHOLE)
    list(batches.iterate_pairs(PARTS[0]))
    next(iter(batches))
    assert batches.batch_count == len(WHOLE)


@pytest.mark.parametrize("shuffle", [False, True])
@pytest.mark.parametrize("known", [False, True])
def test_another_order_each_time_is_seen(shuffle, known):
    batches = Batches(DataLoader(Samples(), SIZE, shuffle=shuffle), "eval_dataloader")
    if known:
        batches.data_fingerprint()
    assert batches.is_shuffled is shuffle
