"""The share of one worker in an evaluation, and what sharing saves."""

from __future__ import annotations

import threading
from types import SimpleNamespace

import cloudpickle
import numpy as np
import pytest

from neural_mp.adaptors.pytorch.adaptor import PyTorchAdaptor
from neural_mp.core.criterion import Deadline
from neural_mp.metrics import Accuracy
from neural_mp.tuning.evaluation.batches import Batches
from neural_mp.tuning.evaluation.evaluator import Evaluator, NotShardableError, UserCodeError
from neural_mp.tuning.evaluation.sharding import Shard, estimate_sharded_seconds
from neural_mp.tuning.executors import Worker, taken
from neural_mp.tuning.executors.contract import _Package


class Failing:
    """In place of an plan_evaluator."""

    def evaluate_shard(self, share, deadline):
        raise UserCodeError(KeyError("no such class"))

    @property
    def model(self):
        return SimpleNamespace(adaptor=PyTorchAdaptor())


def test_a_worker_sends_back_what_the_users_own_code_raised():
    worker = Worker(PyTorchAdaptor, cloudpickle.dumps(_Package(None, Failing())))
    with pytest.raises(UserCodeError) as failure:
        taken(worker(Shard(None, slice(0, 4)), 0.0))
    assert repr(failure.value.error) == repr(KeyError("no such class"))


class Turned:
    """Other batches from the fourth walk on, as where the order depends on the process."""

    def __init__(self, loader):
        self.batches, self.walks = list(loader), 0

    def __len__(self):
        return len(self.batches)

    def __iter__(self):
        self.walks += 1
        return iter(self.batches if self.walks < 4 else self.batches[::-1])


class Locked(Accuracy):
    def update(self, preds, labels):
        super().update(preds, labels)
        self.lock = threading.Lock()


@pytest.mark.parametrize(
    ("loader", "metric", "words"),
    [(Turned, Accuracy, "differs between processes"), (list, Locked, "cannot be pickled")],
)
def test_a_worker_says_why_it_cannot_share(digits, loader, metric, words):
    batches = Batches(loader(digits[1].loader(100)), "eval_dataloader")
    evaluator = Evaluator(batches, [(metric(), 1.0)])

    def model(inputs):
        return np.zeros((len(inputs), 10))

    assert not batches.is_shuffled
    if loader is Turned:
        evaluator.metric_states(model, Deadline(), slice(0, 3), model)
    with pytest.raises(NotShardableError, match=words):
        evaluator.metric_states(model, Deadline(), slice(0, 3), model)


@pytest.mark.parametrize(
    ("seconds", "cpu_seconds", "width", "threads", "expected"),
    [
        (100, 100, 2, 1, 50),  # one thread of two cores was at work
        (50, 100, 2, 1, 50),  # both were: nothing is left to gain
        (50, 100, 2, 2, 25),  # two other machines of two cores
        (10, 160, 2, 1, 80),  # two small machines instead of a large one
        (100, 20, 4, 1, 25),  # waiting for data
    ],
)
def test_what_a_shared_evaluation_takes(seconds, cpu_seconds, width, threads, expected):
    assert estimate_sharded_seconds(seconds, cpu_seconds, width, threads) == expected
