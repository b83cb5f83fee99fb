"""Metrics of other libraries give what they give there."""

from __future__ import annotations

from collections import namedtuple
from dataclasses import dataclass

import keras
import numpy as np
import pytest
import torch
from sklearn import metrics as sklearn_metrics
from sklearn.datasets import load_diabetes, load_digits
from sklearn.linear_model import LogisticRegression, Ridge

from neural_mp.errors import MetricError
from neural_mp.metrics import build_metric, convert_to_metric
from neural_mp.metrics.coercion import get_metric_name


@pytest.fixture(scope="module")
def digits_scored():
    """Logits `[N, 10]` of a real classifier, and the true classes."""
    data = load_digits()
    fitted = LogisticRegression(max_iter=200, C=1e-4).fit(data.data[:600], data.target[:600])
    return fitted.decision_function(data.data[600:]).astype(np.float32), data.target[600:], fitted


@pytest.fixture(scope="module")
def numbers():
    """Predictions `[N, 1]` of a real regression, and the true numbers `[N, 1]`."""
    data = load_diabetes()
    fitted = Ridge().fit(data.data, data.target)
    return fitted.predict(data.data)[:, None].astype("f4"), data.target[:, None].astype("f4")


def measured(metric, preds, labels, batch=100):
    """The result over batches, twice: the second time after a reset."""
    values = []
    for _ in range(2):
        metric.reset()
        for start in range(0, len(labels), batch):
            metric.update(preds[start : start + batch], labels[start : start + batch])
        values.append(metric.result())
    assert values[0] == values[1]
    return values[0]


# functions of all predictions and labels


def test_a_function_of_one_parameter_gets_both_as_transformers_gives_them(digits_scored):
    scores, truth, _ = digits_scored

    def compute_metrics(eval_pred):
        logits, labels = eval_pred
        assert eval_pred.predictions is logits
        assert eval_pred.label_ids is labels
        return {"accuracy": float((logits.argmax(-1) == labels).mean())}

    assert measured(convert_to_metric(compute_metrics), scores, truth) == {
        "accuracy": (scores.argmax(1) == truth).mean()
    }


def test_several_outputs_reach_a_function_in_the_form_they_have():
    pair = namedtuple("pair", ["left", "right"])

    @dataclass
    class Both:
        left: object
        right: object = None

    def keep(predictions, labels):
        return predictions

    halves = np.arange(3.0), torch.arange(3.0).to(torch.bfloat16)
    for make in (
        lambda *parts: parts,
        lambda *parts: {"left": parts[0], "right": parts[1]},
        pair,
        Both,
    ):
        metric = convert_to_metric(keep)
        for _ in range(2):
            metric.update(make(*halves), np.zeros(3))
        result = metric.result()
        assert type(result) is type(make(*halves))
        parts = result.values() if isinstance(result, dict) else result
        parts = vars(result).values() if isinstance(result, Both) else parts
        assert [part.tolist() for part in parts] == [[0.0, 1.0, 2.0] * 2] * 2


def test_options_of_a_function_are_its_arguments(digits_scored):
    scores, truth, _ = digits_scored

    def hits(predictions, labels, k=1):
        best = np.argsort(predictions, axis=1)[:, -k:]
        return (best == labels[:, None]).any(1).mean()

    value = measured(convert_to_metric((hits, {"k": 3})), scores, truth)
    assert value == measured(build_metric("topk", {"k": 3}), scores, truth)


def test_a_function_of_torch_gets_tensors(digits_scored):
    scores, truth, _ = digits_scored
    value = measured(convert_to_metric(torch.nn.functional.cross_entropy), scores, truth)
    assert float(value) == pytest.approx(measured(build_metric("loss"), scores, truth), rel=1e-5)


def test_batches_that_cannot_be_put_together_are_named():
    metric = convert_to_metric(lambda predictions, labels: 1.0)
    metric.update(np.zeros((2, 3)), np.zeros(2))
    metric.update(np.zeros((2, 4)), np.zeros(2))
    with pytest.raises(MetricError, match=r"predictions of 2 batches .* \[2, 3\], \[2, 4\]"):
        metric.result()


# scikit-learn


def test_functions_of_scikit_learn_get_truth_first_and_what_they_take(digits_scored, numbers):
    scores, truth, _ = digits_scored
    classes = scores.argmax(1)
    options = {"average": "macro"}
    value = measured(convert_to_metric((sklearn_metrics.recall_score, options)), scores, truth)
    assert value == sklearn_metrics.recall_score(truth, classes, average="macro")
    assert value != sklearn_metrics.recall_score(classes, truth, average="macro")
    preds, labels = numbers
    value = measured(
        convert_to_metric(sklearn_metrics.mean_absolute_percentage_error), preds, labels
    )
    expected = sklearn_metrics.mean_absolute_percentage_error(labels[:, 0], preds[:, 0])
    assert value == pytest.approx(expected)
    chances = np.exp(scores) / np.exp(scores).sum(1, keepdims=True)
    for outputs in (scores, chances):  # logits and probabilities
        value = measured(convert_to_metric(sklearn_metrics.log_loss), outputs, truth)
        assert value == pytest.approx(sklearn_metrics.log_loss(truth, chances), rel=1e-5)


def test_the_direction_of_scikit_learns_functions_is_known():
    def higher(function):
        return convert_to_metric(function).higher_is_better

    assert higher(sklearn_metrics.f1_score) is True
    assert higher(sklearn_metrics.roc_auc_score) is True
    assert higher(sklearn_metrics.mean_squared_error) is False
    assert higher(sklearn_metrics.log_loss) is False
    assert higher(sklearn_metrics.hamming_loss) is False  # it has no scorer
    assert higher(sklearn_metrics.cohen_kappa_score) is True


class Classifier(LogisticRegression):
    """What a scorer of scikit-learn asks: its answers are the columns of X."""

    def __init__(self):
        super().__init__()
        self.classes_, self.n_features_in_ = np.arange(10), 10

    def decision_function(self, X):  # noqa: N803
        return X

    def predict(self, X):  # noqa: N803
        return X.argmax(1)

    def predict_proba(self, X):  # noqa: N803
        return np.exp(X) / np.exp(X).sum(1, keepdims=True)

    def __sklearn_is_fitted__(self):
        return True


@pytest.mark.parametrize(
    "name",
    ["f1_macro", "Balanced_Accuracy", "neg_log_loss", "roc_auc_ovr", "matthews_corrcoef"],
)
def test_a_scorer_by_name_gives_what_scikit_learn_gives(digits_scored, name):
    scores, truth, _ = digits_scored
    expected = sklearn_metrics.get_scorer(name.lower())(Classifier(), scores.astype(float), truth)
    metric = convert_to_metric(name)
    assert metric.higher_is_better is True
    assert get_metric_name(metric) == name.lower()
    assert measured(metric, scores, truth) == pytest.approx(expected, rel=1e-5)


def test_a_scorer_of_two_classes_gets_the_scores_of_the_second(digits_scored):
    scores, truth, _ = digits_scored
    two = truth < 2
    scores, truth = scores[two][:, :2], truth[two]
    truth = np.where(np.arange(len(truth)) % 7 == 0, 1 - truth, truth)  # not all are right
    for spec, name in (("roc_auc_ovr", "multi"), ("average_precision", "plain")):
        margin = scores[:, 1] - scores[:, 0]
        function = {"multi": sklearn_metrics.roc_auc_score}.get(
            name, sklearn_metrics.average_precision_score
        )
        value = measured(convert_to_metric(spec), scores, truth)
        assert value == pytest.approx(function(truth, margin), abs=1e-9)


def test_a_scorer_of_the_users_own_keeps_its_sign_and_options(digits_scored, numbers):
    scores, truth, _ = digits_scored
    scorer = sklearn_metrics.make_scorer(sklearn_metrics.fbeta_score, beta=2, average="macro")
    value = measured(convert_to_metric(scorer), scores, truth)
    assert value == sklearn_metrics.fbeta_score(truth, scores.argmax(1), beta=2, average="macro")

    def largest_miss(y_true, y_pred):
        return np.abs(y_true - y_pred).max()

    metric = convert_to_metric(sklearn_metrics.make_scorer(largest_miss, greater_is_better=False))
    preds, labels = numbers
    assert measured(metric, preds, labels) == -np.abs(labels - preds).max()
    assert metric.higher_is_better is True


# objects of other libraries


def test_a_metric_of_keras_gives_what_keras_gives(digits_scored, numbers):
    scores, truth, _ = digits_scored
    theirs = keras.metrics.SparseTopKCategoricalAccuracy(k=2)
    theirs.update_state(truth, scores)
    expected = float(theirs.result())
    metric = convert_to_metric(keras.metrics.SparseTopKCategoricalAccuracy(k=2))
    assert float(measured(metric, scores, truth)) == pytest.approx(expected)
    assert metric.higher_is_better is True
    preds, labels = numbers
    metric = convert_to_metric(keras.metrics.RootMeanSquaredError())
    expected = np.sqrt(np.mean((preds - labels) ** 2))
    assert float(measured(metric, preds, labels)) == pytest.approx(expected, rel=1e-5)
    assert metric.higher_is_better is False
    assert get_metric_name(metric) == "RootMeanSquaredError"


class TorchAccuracy(torch.nn.Module):
    """The protocol of torchmetrics: tensors in, one tensor out."""

    higher_is_better = True

    def __init__(self):
        super().__init__()
        self.reset()

    def update(self, preds: torch.Tensor, target: torch.Tensor) -> None:
        self.right += (preds.argmax(dim=1) == target).sum()
        self.count += target.numel()

    def compute(self):
        return self.right / self.count

    def reset(self):
        self.right, self.count = torch.tensor(0), 0


@pytest.mark.parametrize("kind", ["arrays", "tensors"])
def test_a_metric_with_compute_gets_tensors(digits_scored, kind):
    scores, truth, _ = digits_scored
    if kind == "tensors":
        scores, truth = torch.from_numpy(scores), torch.from_numpy(truth)
    metric = convert_to_metric(TorchAccuracy())
    assert float(measured(metric, scores, truth)) == pytest.approx(
        float((scores.argmax(1) == truth).sum()) / len(truth)
    )
    assert metric.higher_is_better is True
    assert get_metric_name(metric) == "TorchAccuracy"


def test_torchmetrics_themselves_are_taken(digits_scored):
    torchmetrics = pytest.importorskip("torchmetrics")
    scores, truth, _ = digits_scored
    f1 = torchmetrics.classification.MulticlassF1Score(num_classes=10, average="macro")
    value = float(measured(convert_to_metric(f1), scores, truth))
    expected = sklearn_metrics.f1_score(truth, scores.argmax(1), average="macro")
    assert value == pytest.approx(expected, rel=1e-5)
    assert convert_to_metric(torchmetrics.MeanSquaredError()).higher_is_better is False


class EvaluateF1:
    """The protocol of Hugging Face's `evaluate`: classes in, a dict out, forgotten after that."""

    name = "f1"

    def __init__(self):
        self._pairs = []

    def add_batch(self, *, predictions, references):
        self._pairs.append((predictions, references))

    def compute(self, **options):
        predicted, truth = (np.concatenate(part) for part in zip(*self._pairs, strict=True))
        self._pairs = []
        return {"f1": sklearn_metrics.f1_score(truth, predicted, **options)}


def test_a_metric_of_evaluate_gets_classes_and_its_options(digits_scored):
    scores, truth, _ = digits_scored
    metric = convert_to_metric((EvaluateF1(), {"average": "macro"}))
    value = measured(metric, scores, truth)
    assert value == sklearn_metrics.f1_score(truth, scores.argmax(1), average="macro")
    assert get_metric_name(metric) == "f1"


def test_options_that_come_too_late_are_refused():
    with pytest.raises(MetricError, match="must be output, label or value, got k"):
        convert_to_metric((build_metric("topk"), {"k": 5}))


def test_one_value_of_several_is_chosen(digits_scored):
    scores, truth, _ = digits_scored

    def both(predictions, labels):
        return {"low": 0.25, "high": 0.5}

    assert measured(convert_to_metric((both, {"value": "high"})), scores, truth) == 0.5
    with pytest.raises(MetricError, match="no value 'hgh'; did you mean 'high'"):
        measured(convert_to_metric((both, {"value": "hgh"})), scores, truth)
