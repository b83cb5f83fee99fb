"""What holds for every strategy on a real model: limits, resuming, the same again."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
from onnx_nets import convolutions

from neural_mp import ExitPolicy, MixedPrecision
from neural_mp.core import criterion
from neural_mp.core.precision import Precision
from neural_mp.strategies import list_strategy_classes
from neural_mp.testing import Split
from neural_mp.tuning import tuner

pytestmark = pytest.mark.slow

#: Enough trials for every strategy to get beyond its first stage.
MOST = 7
STRATEGIES = sorted(list_strategy_classes())


@pytest.fixture(scope="module")
def onnx_net(hostile_net):
    return convolutions(hostile_net)


@pytest.fixture(params=STRATEGIES)
def converter(request, hostile_net, onnx_net, digits, accuracy, all_machine):
    quantizer = MixedPrecision()
    # Of ONNX models, there are no gradients.
    quantizer.model = hostile_net if request.param == "hawq_v2" else onnx_net
    quantizer.strategy = request.param
    quantizer.precisions = "bf16" if request.param == "auto_mixed_precision" else "int8"
    quantizer.hardware = all_machine
    quantizer.objective = "modelsize"  # latencies this short are the machine's mood
    quantizer.metric = accuracy
    quantizer.eval_dataloader = Split(digits[1].images[:200], digits[1].labels[:200]).loader(50)
    quantizer.exit_policy = ExitPolicy(max_trials=MOST)
    return quantizer


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


def test_the_timeout_ends_it_within_a_batch(converter, accuracy, monkeypatch):
    """By a clock that goes on by a second a batch, the limit passes in the first trial."""
    clock, update = SimpleNamespace(seconds=0), accuracy.update

    def timed(preds, labels):
        clock.seconds += 1
        update(preds, labels)

    accuracy.update = timed
    monkeypatch.setattr(criterion, "time", SimpleNamespace(monotonic=lambda: clock.seconds))
    monkeypatch.setattr(tuner, "Deadline", lambda limit: criterion.Deadline(limit, started=0))
    converter.exit_policy = ExitPolicy(timeout=6.5, max_trials=100)
    result = converter()
    assert clock.seconds == 7
    assert any("time limit of 6.5 s" in warning for warning in result.report.warnings)
