"""Of a dict of metrics every one has to meet the target, each in its own direction."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from onnx_nets import graph, op
from rich.console import Console

import neural_mp
from neural_mp import AccuracyCriterion, ExitPolicy, MixedPrecision
from neural_mp.api.user_metrics import parse_metrics
from neural_mp.config import parse_settings
from neural_mp.errors import ConfigurationError, HistoryError, MetricError
from neural_mp.reporting import LiveListener, result_tables

BOTH = {"accuracy": None, "loss": None}


@pytest.fixture
def converter(net, digits):
    tuner = MixedPrecision()
    tuner.model = net
    tuner.precisions = "int8"
    tuner.strategy = "basic"
    tuner.objective = "modelsize"  # latencies this short are the machine's mood
    tuner.exit_policy = ExitPolicy(max_trials=2)
    tuner.accuracy_criterion = AccuracyCriterion(0.05, relative=False, any_tolerance=True)
    tuner.eval_dataloader = digits[1].loader()
    return tuner


def shown(renderable):
    console = Console(width=150, record=True, file=open("/dev/null", "w"))  # noqa: PTH123, SIM115
    console.print(renderable)
    return console.export_text()


def test_tables_show_every_metric_with_its_target(converter):
    console = Console(width=150, record=True, file=open("/dev/null", "w"))  # noqa: PTH123, SIM115
    converter.metric = BOTH
    converter.listener = LiveListener(console)
    result = converter()
    text = console.export_text()
    for name, figures in result.report.metrics.items():
        assert f"{name}: FP32 {figures.baseline:.5g}, target {figures.target:.5g}" in text
        assert f"{name} {figures.value:.5g}" in text  # the trial's line
    rows = shown(result_tables(result.report, result.met)).splitlines()
    for name, figures in result.report.metrics.items():
        (row,) = [row for row in rows if row.strip("│ ").startswith(f"{name} (target")]
        assert f"{figures.baseline:.5g}" in row
        assert f"{figures.value:.5g}" in row


@pytest.mark.slow
def test_a_run_taken_up_again_goes_by_the_same_baseline(converter):
    passes = []

    def accuracy(predictions, labels):
        passes.append(len(labels))
        return float((predictions.argmax(1) == labels).mean())

    converter.metric = {"accuracy": accuracy, "loss": "loss"}
    first = converter()
    count = len(passes)
    converter.resume = True
    again = converter()
    assert len(passes) == count  # not even FP32 is evaluated again
    assert again.report.metrics == first.report.metrics
    assert [t.accuracy for t in again.trials] == [t.accuracy for t in first.trials]
    assert [t.metrics for t in again.trials] == [t.metrics for t in first.trials]
    converter.metric = {"accuracy": accuracy, "F1": None}
    with pytest.raises(HistoryError, match="the metric of this run differ"):
        converter()


@pytest.mark.slow
def test_workers_find_what_one_process_finds(converter, digits):
    # A linear classifier for ONNX Runtime: a worker imports PyTorch for seconds.
    images, targets = digits[0].images.reshape(-1, 64), np.eye(10)[digits[0].labels]
    weights = np.linalg.lstsq(images, targets, rcond=None)[0].astype(np.float32)
    nodes = [op("Flatten", "x", "flat"), op("MatMul", "flat w", "scores")]
    converter.model = graph(nodes, {"x": ["n", 1, 8, 8]}, ["scores"], {"w": weights})
    converter.metric = BOTH
    converter.strategy = "random"
    converter.exit_policy = ExitPolicy(max_trials=4)
    single = converter()
    converter.workers = 2
    side_by_side = converter()
    for expected, actual in zip(single.trials, side_by_side.trials, strict=True):
        assert expected.metrics == pytest.approx(actual.metrics)
        assert (expected.accuracy, expected.outcome) == (
            pytest.approx(actual.accuracy),
            actual.outcome,
        )


@pytest.mark.slow
def test_figures_are_kept_with_a_saved_model(converter, tmp_path):
    converter.metric = BOTH
    result = converter()
    result.save(tmp_path / "saved")
    assert neural_mp.load(tmp_path / "saved").report.metrics == result.report.metrics


def test_an_eval_func_may_give_several_values(converter, digits):
    images, labels = torch.from_numpy(digits[1].images), digits[1].labels

    def evaluate(model):
        with torch.no_grad():
            right = model(images).argmax(1).numpy() == labels
        return {
            "accuracy": float(right.mean()),
            "first half": float(right[: len(right) // 2].mean()),
        }

    converter.eval_func = evaluate
    result = converter()
    assert result.met
    assert list(result.report.metrics) == ["accuracy", "first half"]


@pytest.mark.slow
def test_a_value_whose_direction_is_not_known_is_asked_about(converter):
    converter.metric = lambda predictions, labels: {"accuracy": 1.0, "my_error": 1.0}
    with pytest.raises(ConfigurationError, match="the direction of my_error is not known"):
        converter()
    converter.metric = {"accuracy": None, "my_error": lambda predictions, labels: 1.0}
    with pytest.raises(ConfigurationError, match="the direction of my_error is not known"):
        converter()
    converter.accuracy_criterion = AccuracyCriterion(0.05, higher_is_better=False)
    assert converter().report.metrics["my_error"].higher_is_better is False


# how they are given


def test_a_dict_names_metrics_or_names_what_is_given():
    metrics = parse_metrics(
        {"topk": {"k": 5}, "top3": ("topk", {"k": 3}), "F1": None, "mine": lambda a, b: 1.0}
    )
    assert metrics.names == ("topk", "top3", "F1", "mine")
    assert [getattr(metric, "k", None) for metric, _ in metrics] == [5, 3, None, None]
    assert metrics.every


def test_a_dict_of_one_is_that_metric():
    metrics = parse_metrics({"topk": {"k": 5}})
    assert (metrics.every, metrics.names, metrics[0][0].k) == (False, ("topk",), 5)


def test_with_weights_a_dict_is_a_sum(converter):
    converter.metric = {"accuracy": None, "F1": None, "weight": [0.25, 0.75]}
    result = converter()
    figures = result.report.metrics
    expected = 0.25 * figures["accuracy"].baseline + 0.75 * figures["F1"].baseline
    assert result.report.baseline_accuracy == pytest.approx(expected)
    assert [metric.target for metric in figures.values()] == [None, None]
    assert result.report.metric == "0.25·Accuracy + 0.75·F1"


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({}, "must have at least one metric"),
        ([], "must have at least one metric"),
        ({"acuracy": None, "F1": None}, "unknown metric 'acuracy'; did you mean 'accuracy'"),
        ({"accuracy": None, "F1": None, "weight": [1]}, "weight: expected 2 weights, found 1"),
        ({"accuracy": None, "F1": None, "higher_is_better": "x"}, "higher_is_better: expected tr"),
    ],
)
def test_a_wrong_dict_is_refused(given, words):
    with pytest.raises(ConfigurationError) as caught:
        parse_metrics(given)
    assert words in str(caught.value)


EVALUATION = "evaluation: {{accuracy: {{multi_metrics: {{topk: 1, MSE: {rest}}}}}}}"


def test_files_of_ours_say_each_and_theirs_leave_out_the_weights():
    def weights(text):
        return [item.weight for item in parse_settings(text).evaluation.metrics]

    assert weights(EVALUATION.format(rest=" , weight: each")) == [None, None]
    assert weights(EVALUATION.format(rest="")) == [0.5, 0.5]
    assert weights("version: 1.0\n" + EVALUATION.format(rest="")) == [None, None]
    assert weights("version: 1.0\n" + EVALUATION.format(rest=" , weight: [1, 0]")) == [1, 0]


def test_a_list_of_directions_is_taken_from_files_of_theirs():
    text = "version: 1.0\n" + EVALUATION.format(rest=" , higher_is_better: [true, false]")
    settings = parse_settings(text)
    assert [item.higher_is_better for item in settings.evaluation.metrics] == [True, False]
    assert parse_settings(neural_mp.config.settings_to_yaml(settings)) == settings


# the number


def test_fp32_that_gives_nan_in_one_metric_is_named(converter):
    converter.metric = {"accuracy": None, "broken": lambda predictions, labels: math.nan}
    with pytest.raises(MetricError, match=r"FP32 model is nan \(accuracy 0\.\d+, broken nan\)"):
        converter()
