"""Trials side by side in processes of their own."""

from __future__ import annotations

import pytest

from neural_mp import ExitPolicy, MixedPrecision
from neural_mp.errors import ConfigurationError
from neural_mp.metrics import build_metric


@pytest.fixture
def converter(hostile_net, digits):
    made = MixedPrecision()
    made.model = hostile_net
    made.precisions = "int8"
    made.strategy = "random"
    made.objective = "modelsize"
    made.metric = build_metric("accuracy")
    made.eval_dataloader = digits[1].loader()
    made.exit_policy = ExitPolicy(max_trials=10)
    return made


def test_two_workers_find_what_one_finds(converter):
    alone = converter()
    converter.workers = 2
    together = converter()

    def told(result):
        return [(trial.plan, trial.accuracy, trial.outcome) for trial in result.trials]

    assert told(together) == told(alone)
    assert together.plan == alone.plan
    assert together.report.accuracy == alone.report.accuracy
    assert together.report.evaluations == alone.report.evaluations


def test_what_the_users_own_code_raises_in_a_worker_comes_through(converter):
    class Broken:
        def __init__(self):
            self.passes = 0

        def reset(self):
            self.passes += 1

        def update(self, preds, labels):
            if self.passes == 2:
                raise KeyError("no such class")

        def result(self):
            return 1.0

    converter.workers = 2
    converter.metric = Broken()
    with pytest.raises(KeyError, match="no such class"):
        converter()


def test_what_cannot_be_sent_to_a_worker_is_named(converter, digits):
    import threading

    class Locked:
        def __init__(self):
            self.lock = threading.Lock()

        def __iter__(self):
            return iter(digits[1].loader())

    converter.workers = 2
    converter.eval_dataloader = Locked()
    with pytest.raises(ConfigurationError, match=r"workers = 2 needs .* use workers = 1"):
        converter()
