"""What holds for every strategy on a real model: limits, resuming, the same again."""

from __future__ import annotations

import time

import pytest

from neural_mp import ExitPolicy, MixedPrecision
from neural_mp.core.precision import Precision
from neural_mp.strategies import strategy_classes
from neural_mp.testing import Split

pytestmark = pytest.mark.slow

#: Enough trials for every strategy to get beyond its first stage.
MOST = 7
STRATEGIES = sorted(strategy_classes())


@pytest.fixture(params=STRATEGIES)
def converter(request, hostile_net, digits, accuracy, all_machine):
    made = MixedPrecision()
    made.model = hostile_net
    made.strategy = request.param
    made.precisions = "bf16" if request.param == "auto_mixed_precision" else "int8"
    made.hardware = all_machine
    made.objective = "modelsize"  # latencies this short are the machine's mood
    made.metric = accuracy
    made.eval_dataloader = Split(digits[1].images[:200], digits[1].labels[:200]).loader(50)
    made.exit_policy = ExitPolicy(max_trials=MOST)
    return made


def test_a_run_cut_off_is_taken_up_without_a_trial_twice_and_ends_the_same(converter, accuracy):
    """The whole run, the run interrupted in its third evaluation, and the rest of it."""
    whole = converter()
    assert len(whole.trials) <= MOST
    assert len({trial.plan for trial in whole.trials}) == len(whole.trials)
    plans = [trial.plan for trial in whole.trials]
    assert all(set(plan.precisions.values()) != {Precision.FP32} for plan in plans)

    converter.workspace = "interrupted"
    update, begun = accuracy.update, accuracy.evaluations

    def interrupted(preds, labels):
        if accuracy.evaluations == begun + 2:
            raise KeyboardInterrupt
        update(preds, labels)

    accuracy.update = interrupted
    first = converter()
    accuracy.update = update
    assert [trial.plan for trial in first.trials] == plans[: len(first.trials)]

    converter.resume = True
    resumed = converter()
    assert [trial.plan for trial in resumed.trials] == plans
    assert resumed.plan == whole.plan
    assert accuracy.evaluations == begun + 1 + len(plans)  # each plan once, FP32 once


def test_the_timeout_ends_it_within_a_batch(converter, accuracy):
    class Slow(type(accuracy)):
        begun = ()

        def update(self, preds, labels):
            self.begun = (*self.begun, time.monotonic())
            time.sleep(0.05)
            super().update(preds, labels)

    converter.metric = Slow()
    converter.exit_policy = ExitPolicy(timeout=0.6, max_trials=100)
    result = converter()
    first, *later = converter.metric.begun
    assert sum(begun > first + 0.6 for begun in later) <= 1
    stopped = any("time limit" in warning for warning in result.report.warnings)
    assert stopped or len(result.trials) <= 3
