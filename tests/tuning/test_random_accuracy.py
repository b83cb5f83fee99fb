"""Random models are said to be random, and judged by a confidence bound."""

from __future__ import annotations

import numpy as np
import pytest
from onnx_nets import dense_net

from neural_mp import AccuracyCriterion, ExitPolicy, MixedPrecision
from neural_mp.tuning.evaluation.accuracy_bounds import AccuracySpread, is_random, repeat_baseline

HIGHER = AccuracyCriterion(0.02, relative=False)
LOWER = AccuracyCriterion(0.02, relative=False, higher_is_better=False)


def converter(folder, noise):
    draw = np.random.default_rng(0)
    batches = [(draw.random((32, 6), np.float32), draw.integers(0, 4, 32)) for _ in range(4)]
    tuner = MixedPrecision(precisions="int8", objective="modelsize", metric="accuracy")
    tuner.model, tuner.workspace, tuner.eval_dataloader = dense_net(4, noise), folder, batches
    tuner.exit_policy = ExitPolicy(max_trials=1)
    tuner.early_stopping = False
    return tuner


@pytest.mark.slow
def test_a_random_model_is_evaluated_repeatedly_and_its_spread_said(tmp_path):
    tuner = converter(tmp_path, 1e6)
    tuner.accuracy_criterion = HIGHER
    result = tuner()
    warnings = " ".join(result.report.warnings)
    assert "returns other outputs for the same inputs" in warnings
    assert "over 5 passes" in warnings
    (trial,), baseline = result.trials, result.report.baseline_accuracy
    assert 0.1 < baseline < 0.4
    assert not result.met or trial.accuracy > baseline  # the spread exceeds the tolerance
    tuner.resume = True
    assert "returns other outputs" in " ".join(tuner().report.warnings)


def test_a_wide_tolerance_is_met_beyond_doubt(tmp_path):
    tuner = converter(tmp_path, 1e6)
    tuner.accuracy_criterion = AccuracyCriterion(0.4, relative=False, any_tolerance=True)
    assert tuner().met is True


@pytest.mark.parametrize("noise", [0.0, 1e-7])
def test_a_deterministic_model_is_evaluated_once(tmp_path, noise):
    result = converter(tmp_path, noise)()
    assert "same inputs" not in " ".join(result.report.warnings)


@pytest.mark.parametrize(
    ("outputs", "random"),
    [
        ([np.ones(4), np.ones(4)], False),
        ([np.ones(4), np.ones(4) + 1e-6], False),
        ([np.ones(4), np.ones(4) + 1e-3], True),
        ([np.ones(4), np.ones(5)], True),
        ([np.array([1, np.nan, np.inf])] * 2, False),
        ([np.array([1, np.nan]), np.array([1, np.inf])], True),
        ([np.array([1, 2]), np.array([1, 3])], True),
        ([{"a": np.ones(2)}, {"a": np.zeros(2)}], True),
    ],
)
def test_outputs_are_random_beyond_rounding(outputs, random):
    remaining = iter(outputs)
    assert is_random(lambda _: next(remaining), None) is random


@pytest.mark.parametrize(("criterion", "sign"), [(HIGHER, -1), (LOWER, 1)])
def test_a_model_worse_than_tolerated_is_rarely_met_and_an_equal_one_mostly(criterion, sign):
    """At the edge of the tolerance, 5 % are met by luck; without the bound, half of them."""
    draw, runs, spread = np.random.default_rng(0), 2000, 0.004
    met = {0.0: 0, 0.02: 0}
    for loss in met:
        for _ in range(runs):
            base = repeat_baseline(
                (draw.normal(0.9, spread), {}), lambda: (draw.normal(0.9, spread), {})
            )
            noise = AccuracySpread(float(np.std(base.accuracies, ddof=1)), len(base.passes))
            candidate = noise.repeat_evaluation(
                lambda loss=loss: (draw.normal(0.9 + sign * loss, spread), {}),
                criterion,
                base.mean_accuracy,
            )
            met[loss] += noise.meets_target(
                criterion, base.mean_accuracy, candidate.mean_accuracy, len(candidate.passes)
            )
    assert met[0.02] < 0.1 * runs
    assert met[0.0] > 0.9 * runs


def test_a_deterministic_spread_changes_no_verdict():
    exact = AccuracySpread()
    assert exact.meets_target(HIGHER, 0.9, 0.88)
    assert not exact.meets_target(HIGHER, 0.9, 0.8799)
