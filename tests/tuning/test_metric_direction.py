"""The direction of a metric: stated by the metric or the user, never guessed from its name."""

from __future__ import annotations

from functools import partial

import numpy as np
import pytest

from neural_mp import AccuracyCriterion
from neural_mp.api.user_metrics import format_metric_label, resolve_direction
from neural_mp.errors import ConfigurationError


class RootMeanSquaredError:
    """A user's error without a direction."""


def named(name, higher=None):
    """An object of a class of this name."""
    return type(name, (), {"higher_is_better": higher})()


def weighted(*metrics):
    return [(metric, 1 / len(metrics)) for metric in metrics]


@pytest.mark.parametrize(
    ("metrics", "said", "expected"),
    [
        ([named("Score")], None, True),
        ([named("Score")], False, False),
        ([named("MyLoss", False)], None, False),
        ([named("MyLoss", False)], False, False),
        ([named("NegatedLoss", True)], None, True),
        ([named("Wins", np.bool_(False))], None, False),
        ([named("RMSE", False), named("MAE", False)], None, False),
        ([named("F1", True), named("Score")], None, True),
        ([named("RMSE", False), named("MyLoss")], False, False),
        ([], None, True),
    ],
)
@pytest.mark.parametrize("criterion", [(0.01, True), (0.02, False)])
def test_the_direction_is_that_of_the_metric_else_the_users(metrics, said, expected, criterion):
    undirected = AccuracyCriterion(*criterion, higher_is_better=said)
    result = resolve_direction(undirected, weighted(*metrics), None)
    assert result == AccuracyCriterion(*criterion, higher_is_better=expected)


NOT_KNOWN = (
    "direction of {} is not known.*set higher_is_better to False.*attribute higher_is_better"
)


@pytest.mark.parametrize(
    "name",
    [
        "MyLoss",
        "RMSE",
        "RMSEMetric",
        "MeanSquaredError",
        "WER",
        "LogLoss",
        "Logloss",
        "nrmse_score",
        "val_loss",
        "MAPE",
        "Perplexity",
        "neg_mean_squared_error",
        "CrossEntropy",
    ],
)
def test_what_may_be_an_error_and_does_not_say_so_is_asked_about(name):
    def function(model):
        return 0.0

    function.__name__ = name
    for eval_func, metrics in ((function, []), (partial(function), []), (None, [named(name)])):
        with pytest.raises(ConfigurationError, match=NOT_KNOWN.format(name, name)):
            resolve_direction(
                AccuracyCriterion(0.02, relative=False), weighted(*metrics), eval_func
            )
        criterion = AccuracyCriterion(0.02, relative=False, higher_is_better=False)
        assert resolve_direction(criterion, weighted(*metrics), eval_func) == criterion


@pytest.mark.parametrize(
    "name", ["Accuracy", "evaluate", "Answer", "power", "lossless", "terms", "Officer", "R2"]
)
def test_other_names_are_no_errors(name):
    assert (
        resolve_direction(AccuracyCriterion(), weighted(named(name)), None).higher_is_better is True
    )


def test_a_class_that_is_derived_from_an_error_is_asked_about():
    mine = type("Mine", (RootMeanSquaredError,), {})()
    with pytest.raises(ConfigurationError, match=NOT_KNOWN.format("Mine", "RootMeanSquaredError")):
        resolve_direction(AccuracyCriterion(), weighted(mine), None)


@pytest.mark.parametrize(
    ("metrics", "said", "message"),
    [
        ([named("RMSE", False)], True, "RMSE: lower.*higher_is_better: True; remove"),
        ([named("F1", True)], False, "F1: higher.*higher_is_better: False; remove"),
        (
            [named("F1", True), named("RMSE", False)],
            None,
            "one direction, got F1: higher.*RMSE: lower",
        ),
        (
            [named("F1", True), named("RMSE", False)],
            True,
            "one direction, got F1: higher.*RMSE: lower",
        ),
        ([named("Score"), named("RMSE", False)], None, "Score has no direction.*RMSE: lower"),
        ([named("Score", "no")], None, "higher_is_better of Score must be True or False"),
    ],
)
def test_what_contradicts_itself_is_an_error(metrics, said, message):
    with pytest.raises(ConfigurationError, match=message):
        resolve_direction(AccuracyCriterion(higher_is_better=said), weighted(*metrics), None)


def test_a_metric_that_weighs_nothing_does_not_count():
    metrics = [(named("F1", True), 1.0), (named("RMSE", False), 0.0)]
    assert resolve_direction(AccuracyCriterion(), metrics, None).higher_is_better is True


def test_an_evaluation_function_counts_in_place_of_the_metric():
    def score(model):
        return 0.0

    metrics = weighted(named("RMSE", False))
    assert resolve_direction(AccuracyCriterion(), metrics, score).higher_is_better is True
    assert format_metric_label(metrics, score) == "score"
    assert format_metric_label(metrics, lambda model: 0.0) == "eval_func"
    assert format_metric_label(metrics, None) == "RMSE"
    assert format_metric_label([], None) == ""
    assert format_metric_label(weighted(named("F1"), named("AUC")), None) == "0.5·F1 + 0.5·AUC"
