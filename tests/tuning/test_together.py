"""Every metric of a dict has to meet the target, each in its own direction."""

import io
import math

import numpy as np
import pytest
import sklearn.metrics
import torch
from rich.console import Console

from neural_mp import AccuracyCriterion, ExitPolicy, MixedPrecision
from neural_mp.errors import ConfigurationError, MetricError
from neural_mp.reporting import result_tables
from neural_mp.runs.report import Report
from neural_mp.tuning.evaluation.metric_values import MetricAggregation

pytestmark = pytest.mark.slow

BOTH = {"share": True, "error": False}


def together(baseline, **criterion):
    aggregation = MetricAggregation(tuple(BOTH), True, AccuracyCriterion(**criterion), BOTH)
    return aggregation.with_baseline(baseline, True)


@pytest.mark.parametrize(
    ("values", "met"),
    [
        ({"share": 0.9, "error": 0.2}, True),
        ({"share": 0.99, "error": 0.1}, True),
        ({"share": 0.8911, "error": 0.2019}, True),
        ({"share": 0.8909, "error": 0.2}, False),
        ({"share": 0.9, "error": 0.2021}, False),
        ({"share": 1.0, "error": 0.21}, False),
        ({"share": 0.1, "error": 0.0}, False),
    ],
)
def test_the_worst_loss_decides(values, met):
    criterion = AccuracyCriterion(0.01)
    aggregation = together({"share": 0.9, "error": 0.2}, tolerance=0.01)
    assert aggregation.aggregate_score(aggregation.baseline) == 1
    assert criterion.met(1.0, aggregation.aggregate_score(values)) is met
    assert aggregation.metric_targets() == pytest.approx({"share": 0.891, "error": 0.202})


def test_an_amount_is_lost_by_each_in_its_own_unit():
    aggregation = together({"share": 0.9, "error": 20.0}, tolerance=0.02, relative=False)
    assert aggregation.metric_targets() == pytest.approx({"share": 0.88, "error": 20.02})
    assert aggregation.aggregate_score({"share": 0.89, "error": 20.03}) == pytest.approx(0.97)


def test_a_value_that_is_no_number_never_meets():
    assert math.isnan(
        together({"share": 0.9, "error": 0.2}).aggregate_score({"share": 0.9, "error": math.nan})
    )


def test_a_metric_that_gives_other_values_than_for_fp32_is_said():
    with pytest.raises(MetricError, match="got share, for FP32 share, error"):
        together({"share": 0.9, "error": 0.2}).aggregate_score({"share": 0.9})


def tuned(net, digits, tmp_path, metric, tolerance):
    converter = MixedPrecision()
    converter.model = net
    converter.precisions = "int8"
    converter.metric = metric
    converter.eval_dataloader = digits[1].loader()
    converter.accuracy_criterion = tolerance
    converter.exit_policy = ExitPolicy(max_trials=3)
    converter.workspace = tmp_path
    return converter()


def brier_loss(labels, logits):
    shares = np.exp(logits - logits.max(1, keepdims=True))
    shares /= shares.sum(1, keepdims=True)
    return float(((shares - np.eye(10)[labels]) ** 2).sum(1).mean())


brier_loss.higher_is_better = False


@pytest.fixture(scope="module")
def run(net, digits, tmp_path_factory):
    metric = {"F1": {"average": "macro"}, "brier": brier_loss}
    return tuned(net, digits, tmp_path_factory.mktemp("each"), metric, AccuracyCriterion(0.45))


def test_every_value_is_in_the_report_and_the_trials(run):
    metrics = run.report.metrics
    assert list(metrics) == ["F1", "brier"]
    assert metrics["F1"].higher_is_better
    assert not metrics["brier"].higher_is_better
    assert metrics["F1"].target == pytest.approx(0.55 * metrics["F1"].baseline)
    assert metrics["brier"].target == pytest.approx(1.45 * metrics["brier"].baseline)
    assert (run.report.baseline_accuracy, run.report.metric) == (1, "F1, brier")
    assert all(set(trial.metrics) == {"F1", "brier"} for trial in run.trials if trial.met)
    assert Report.from_dict(run.report.to_dict()).metrics == metrics


def test_a_result_that_is_met_is_met_by_each(run):
    assert run.met
    metrics = run.report.metrics
    assert metrics["F1"].value >= metrics["F1"].target
    assert metrics["brier"].value <= metrics["brier"].target


def test_every_value_is_in_the_table_with_its_target(run):
    console = Console(width=140, file=io.StringIO())
    console.print(result_tables(run.report, run.met))
    printed = console.file.getvalue()
    for name, figures in run.report.metrics.items():
        (line,) = [line for line in printed.splitlines() if name in line]
        assert f"target {figures.target:.5g}" in line
        assert f"{figures.value:.5g}" in line
    assert "lower is better" in printed


def test_the_page_shows_the_value_of_a_metric_before_the_score(run, tmp_path):
    run.report.save_html(tmp_path / "page.html")
    page = (tmp_path / "page.html").read_text(encoding="utf-8")
    first = next(iter(run.report.metrics.values()))
    assert page.index(f"{first.value:.5g}") < page.index(">score ")


def test_one_metric_that_misses_is_enough_to_refuse(net, digits, tmp_path):
    calls = []

    def worse_each_time(preds, labels):
        calls.append(None)
        return 1.0 / len(calls)

    metric = {"accuracy": None, "fading": worse_each_time}
    result = tuned(net, digits, tmp_path, metric, AccuracyCriterion(0.05))
    assert not result.met
    (warning,) = [w for w in result.report.warnings if "target of every metric" in w]
    assert "fading" in warning
    assert "accuracy" not in warning.partition("with ")[2]


def test_values_by_name_of_one_function_are_met_one_by_one(net, digits, tmp_path):
    def compute_metrics(eval_pred):
        predicted = eval_pred.predictions.argmax(-1)
        return {
            "f1": sklearn.metrics.f1_score(eval_pred.label_ids, predicted, average="macro"),
            "accuracy": (predicted == eval_pred.label_ids).mean(),
        }

    result = tuned(net, digits, tmp_path, compute_metrics, AccuracyCriterion(0.05))
    assert set(result.report.metrics) == {"f1", "accuracy"}
    assert all(figures.target is not None for figures in result.report.metrics.values())


def test_a_direction_that_is_contradicted_or_unknown_is_an_error(net, digits, tmp_path):
    def squared_error(preds, labels):
        return 0.0

    for metric, message in [
        (
            {"accuracy": {}, "MSE": {}, "higher_is_better": [True, True]},
            "MSE.* remove higher_is_better",
        ),
        ({"accuracy": {}, "mine": squared_error}, "direction of mine is not known"),
    ]:
        with pytest.raises(ConfigurationError, match=message):
            tuned(net, digits, tmp_path, metric, AccuracyCriterion(0.05))


def test_a_dict_of_one_number_is_that_number(net, digits, tmp_path):
    def compute_metrics(eval_pred):
        return {"accuracy": (eval_pred.predictions.argmax(-1) == eval_pred.label_ids).mean()}

    report = tuned(net, digits, tmp_path, compute_metrics, AccuracyCriterion(0.05)).report
    images, labels = digits[1].images, digits[1].labels
    with torch.no_grad():
        expected = (net(torch.from_numpy(images)).argmax(1).numpy() == labels).mean()
    assert report.baseline_accuracy == pytest.approx(expected)
    assert report.target == pytest.approx(0.95 * expected)
    assert report.metrics == {}


def test_a_number_by_name_has_the_direction_of_its_metric(net, digits, tmp_path):
    class Distance:
        higher_is_better = False

        def reset(self):
            self.values = []

        def update(self, preds, labels):
            self.values.append(np.square(preds - np.eye(10)[labels]).mean())

        def result(self):
            return {"distance": float(np.mean(self.values))}

    report = tuned(net, digits, tmp_path, Distance(), AccuracyCriterion(0.05)).report
    assert not report.higher_is_better
    assert report.target == pytest.approx(1.05 * report.baseline_accuracy)
    assert report.baseline_accuracy != 1


def test_metrics_for_which_lower_is_better_are_refused_if_one_grows(net, digits, tmp_path):
    calls = []

    def doubling(preds, labels):
        calls.append(None)
        return float(len(calls))

    def distance(preds, labels):
        return float(np.square(preds - np.eye(10)[labels]).mean())

    criterion = AccuracyCriterion(0.05, higher_is_better=False)
    result = tuned(net, digits, tmp_path, {"distance": distance, "own": doubling}, criterion)
    assert not result.met
