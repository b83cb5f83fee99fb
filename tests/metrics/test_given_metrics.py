"""What users have that measures accuracy is taken as it is."""

from functools import partial

import keras
import numpy as np
import pytest
import sklearn.metrics
import torch
from sklearn.datasets import load_digits
from sklearn.linear_model import LogisticRegression

from neural_mp.api.user_metrics import (
    format_metric_label,
    gather_metrics,
    parse_metrics,
    qualify_metric_name,
    resolve_direction,
)
from neural_mp.config import load_settings
from neural_mp.core.criterion import AccuracyCriterion
from neural_mp.errors import ConfigurationError, MetricError
from neural_mp.metrics import METRICS, convert_to_metric


@pytest.fixture(scope="module")
def digits():
    """Logits `[N, 10]` and labels of a model that is right mostly, not always."""
    data = load_digits()
    model = LogisticRegression(max_iter=2000, C=1e-4).fit(data.data[:600], data.target[:600])
    return model.decision_function(data.data[600:]), data.target[600:]


def measured(spec, preds, labels, batch=100):
    """The value over batches, after a pass that was thrown away."""
    metric = convert_to_metric(spec)
    metric.update(preds[:7], labels[:7])
    metric.reset()
    for start in range(0, len(labels), batch):
        metric.update(preds[start : start + batch], labels[start : start + batch])
    return metric.result()


def higher_is_better(spec):
    return resolve_direction(AccuracyCriterion(), parse_metrics(spec), None, ()).prefers_higher


class StreamedAccuracy:
    """The protocol of torchmetrics: tensors in, `compute` at the end."""

    higher_is_better = True

    def __init__(self):
        self.reset()

    def reset(self):
        self.right = self.all = torch.tensor(0)

    def update(self, preds: torch.Tensor, target: torch.Tensor) -> None:
        self.right = self.right + (preds.argmax(dim=1) == target).sum()
        self.all = self.all + target.numel()

    def compute(self):
        return self.right / self.all


@pytest.mark.parametrize("given", ["accuracy", "Accuracy", "ACC", ("accuracy", {})])
def test_a_metric_goes_by_its_name_whatever_its_case(given, digits):
    logits, labels = digits
    expected = sklearn.metrics.accuracy_score(labels, logits.argmax(1))
    assert measured(given, *digits) == pytest.approx(expected)
    assert format_metric_label(parse_metrics(given), None) == "Accuracy"


@pytest.mark.parametrize(
    "given", [("topk", {"k": 3}), ("TopK", 3), {"topk": {"k": 3}}, {"topk": 3}]
)
def test_a_name_comes_with_its_options(given, digits):
    logits, labels = digits
    ((metric, weight),) = parse_metrics(given)
    metric.update(logits, labels)
    assert weight == 1
    expected = sklearn.metrics.top_k_accuracy_score(labels, logits, k=3)
    assert metric.result() == pytest.approx(expected)


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ("acuracy", "did you mean 'accuracy'"),
        ({"f1_makro": {}}, "did you mean 'f1_macro'"),
        (("topk", {"kk": 3}), "did you mean 'k'"),
        ({"weight": [1]}, "must have at least one metric"),
        ([], "must have at least one metric"),
        ({"F1": {}, "accuracy": {}, "weight": [1]}, "expected 2 weights, found 1"),
        ({"F1": {}, "accuracy": {}, "higher_is_better": "maybe"}, "expected true or false"),
        (("accuracy", {"output": 1.5}), "must be a name or a position"),
    ],
)
def test_a_mistake_names_the_nearest_word(given, words):
    with pytest.raises(ConfigurationError, match=words):
        parse_metrics(given)


def test_a_function_sees_all_predictions_and_labels_at_once(digits):
    calls = []

    def share(preds, labels):
        calls.append(len(labels))
        return float((preds.argmax(1) == labels).mean())

    logits, labels = digits
    assert measured(share, *digits) == (logits.argmax(1) == labels).mean()
    assert calls == [len(labels)]
    assert format_metric_label(parse_metrics(share), None) == "share"


def truth_first(y_true, y_pred):
    return y_true, y_pred


def truth_called_labels(labels, logits):
    return labels, logits


def truth_called_targets(targets, x):
    return targets, x


def predictions_second(a, predictions):
    return a, predictions


@pytest.mark.parametrize(
    "function", [truth_first, truth_called_labels, truth_called_targets, predictions_second]
)
def test_the_names_of_parameters_say_that_labels_come_first(function):
    metric = convert_to_metric(function)
    metric.update(np.array([[1.0, 2.0]]), np.array([7]))
    truth, predicted = metric.result()
    assert truth.tolist() == [7]
    assert predicted.tolist() == [[1.0, 2.0]]


@pytest.mark.parametrize(
    "function",
    [
        lambda preds, labels: (preds, labels),
        lambda a, b: (a, b),
        lambda *arguments: arguments,
        lambda output, target: (output, target),
        lambda eval_pred: eval_pred,
        partial(lambda a, b, power: (a, b), power=2),
    ],
)
def test_else_predictions_come_first(function):
    metric = convert_to_metric(function)
    metric.update(torch.tensor([[1.0, 2.0]]), torch.tensor([7]))
    predicted, truth = metric.result()
    assert truth.tolist() == [7]
    assert predicted.tolist() == [[1.0, 2.0]]


@pytest.mark.parametrize(
    ("given", "words"),
    [
        (lambda model: 0, "number as eval_func"),
        (lambda a, b, c: 0, "functools.partial"),
        (lambda: 0, "must take"),
        (np.float64, "create an instance"),
        (sklearn.metrics, "module sklearn.metrics"),
        (3, "int has no update"),
        ((StreamedAccuracy(), {"k": 1}), "must be output, label or value, got k"),
    ],
)
def test_what_is_no_metric_is_said(given, words):
    with pytest.raises(MetricError, match=words):
        parse_metrics(given)


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        (
            sklearn.metrics.accuracy_score,
            lambda p, y: sklearn.metrics.accuracy_score(y, p.argmax(1)),
        ),
        (
            (sklearn.metrics.f1_score, {"average": "macro"}),
            lambda p, y: sklearn.metrics.f1_score(y, p.argmax(1), average="macro"),
        ),
        ("f1_macro", lambda p, y: sklearn.metrics.f1_score(y, p.argmax(1), average="macro")),
        (
            sklearn.metrics.make_scorer(sklearn.metrics.fbeta_score, beta=2, average="micro"),
            lambda p, y: sklearn.metrics.fbeta_score(y, p.argmax(1), beta=2, average="micro"),
        ),
        (
            "neg_log_loss",
            lambda p, y: -sklearn.metrics.log_loss(y, torch.tensor(p).softmax(1).numpy()),
        ),
        (
            sklearn.metrics.get_scorer("roc_auc_ovr"),
            lambda p, y: sklearn.metrics.roc_auc_score(
                y, torch.tensor(p).softmax(1).numpy(), multi_class="ovr"
            ),
        ),
    ],
)
def test_scikit_learn_gives_what_it_gives_elsewhere(given, expected, digits):
    assert measured(given, *digits) == pytest.approx(expected(*digits))


def test_a_metric_of_keras_takes_part(digits):
    logits, labels = digits
    metric = keras.metrics.SparseCategoricalAccuracy(name="share")
    assert measured(metric, *digits) == pytest.approx((logits.argmax(1) == labels).mean())
    assert higher_is_better(metric)
    assert not higher_is_better(keras.metrics.MeanSquaredError())


def test_a_metric_with_the_protocol_of_torchmetrics_takes_part(digits):
    logits, labels = digits
    expected = (logits.argmax(1) == labels).mean()
    assert measured(StreamedAccuracy(), *digits) == pytest.approx(expected)
    assert measured(
        StreamedAccuracy(), torch.tensor(logits), torch.tensor(labels)
    ) == pytest.approx(expected)


@pytest.mark.parametrize(
    ("given", "higher"),
    [
        ("accuracy", True),
        ("MSE", False),
        ("neg_log_loss", True),
        (sklearn.metrics.mean_squared_error, False),
        (sklearn.metrics.r2_score, True),
        (sklearn.metrics.log_loss, False),
        (("mIoU", {"output": "mask"}), True),
    ],
)
def test_a_direction_that_is_known_is_taken(given, higher):
    assert higher_is_better(given) is higher


def test_a_function_that_may_be_an_error_has_to_say_its_direction():
    def squared_error(preds, labels):
        return 0.0

    with pytest.raises(ConfigurationError, match="direction of squared_error is not known"):
        higher_is_better(squared_error)
    squared_error.higher_is_better = False
    assert not higher_is_better(squared_error)


def test_a_list_is_a_mean_and_a_dict_is_met_one_by_one():
    mean = parse_metrics(["accuracy", "F1"])
    assert [weight for _, weight in mean] == [0.5, 0.5]
    assert not mean.every
    separate = parse_metrics(
        {"share": StreamedAccuracy(), "MSE": {}, "higher_is_better": [True, False]}
    )
    assert separate.every
    assert (separate.names, separate.said) == (("share", "MSE"), (True, False))
    weighted = parse_metrics({"accuracy": {}, "F1": {}, "weight": [0.7, 0.3]})
    assert not weighted.every
    assert [weight for _, weight in weighted] == [0.7, 0.3]


def test_a_history_knows_one_metric_from_another():
    texts = {
        qualify_metric_name(parse_metrics(name), None) for name in ("f1_macro", "f1_micro", "F1")
    }
    assert len(texts) == 3


def test_what_people_ask_for_most_is_built_in():
    assert {"accuracy", "topk", "F1", "mIoU", "mAP"} <= set(METRICS)


@pytest.mark.parametrize(
    ("written", "line", "words"),
    [
        ("metric: acuracy", 3, "did you mean 'accuracy'"),
        ("metric:\n      topk: {kk: 3}", 4, "did you mean 'k'"),
        ("multi_metrics:\n      F1:\n      f1_makro:", 5, "did you mean 'f1_macro'"),
        ("metric:\n      mIoU: {output: 1.5}", 4, "a name or a position"),
    ],
)
def test_a_mistake_in_a_file_is_said_with_its_line(tmp_path, written, line, words):
    path = tmp_path / "conf.yaml"
    path.write_text(f"evaluation:\n  accuracy:\n    {written}\n")
    with pytest.raises(ConfigurationError, match=words) as caught:
        gather_metrics(None, load_settings(path), None, eval_func=lambda model: 1.0)
    assert f"{path}, line {line}" in str(caught.value)


@pytest.mark.parametrize("name", ["f1_macro", "mIoU", "TopK"])
def test_a_file_names_what_python_does(tmp_path, name):
    path = tmp_path / "conf.yaml"
    path.write_text(f"evaluation:\n  accuracy:\n    metric: {name}\n")
    metrics = gather_metrics(None, load_settings(path), None, eval_func=lambda model: 1.0)
    assert qualify_metric_name(metrics, None) == qualify_metric_name(parse_metrics(name), None)
