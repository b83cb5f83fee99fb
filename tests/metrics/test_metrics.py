import numpy as np
import pytest
import sklearn.metrics as reference
from sklearn.datasets import load_breast_cancer, load_diabetes, load_digits
from sklearn.linear_model import LinearRegression, LogisticRegression
from sklearn.preprocessing import StandardScaler

from neural_mp.common import Metric
from neural_mp.errors import ConfigurationError, MetricError
from neural_mp.metrics import METRICS, build_metric


@pytest.fixture(scope="module")
def digits():
    """Logits `[N, 10]` and labels of a model that is right mostly, not always."""
    data = load_digits()
    model = LogisticRegression(max_iter=2000, C=1e-4).fit(data.data[:600], data.target[:600])
    return model.decision_function(data.data[600:]), data.target[600:]


@pytest.fixture(scope="module")
def cancer():
    """Logits `[N]` and labels 0 and 1."""
    data = load_breast_cancer()
    inputs = StandardScaler().fit_transform(data.data)[:, :3]
    return LogisticRegression().fit(inputs[:100], data.target[:100]).decision_function(
        inputs[100:]
    ), data.target[100:]


@pytest.fixture(scope="module")
def diabetes():
    """Predictions and targets of a regression."""
    data = load_diabetes()
    return LinearRegression().fit(data.data[:200], data.target[:200]).predict(
        data.data
    ), data.target


def softmax(logits):
    powers = np.exp(logits - logits.max(axis=1, keepdims=True))
    return powers / powers.sum(axis=1, keepdims=True)


def sigmoid(logits):
    return 1 / (1 + np.exp(-logits))


def measure(name, preds, labels, batch=100, **options):
    """The result over batches of unequal size, the last one smaller."""
    metric = build_metric(name, options)
    for start in range(0, len(labels), batch):
        metric.update(preds[start : start + batch], labels[start : start + batch])
    return metric.result()


# against scikit-learn


def test_accuracy_of_scores_classes_and_one_hot_labels(digits):
    logits, labels = digits
    expected = reference.accuracy_score(labels, logits.argmax(axis=1))
    assert 0.5 < expected < 1
    assert measure("accuracy", logits, labels) == pytest.approx(expected)
    assert measure("Accuracy", logits.argmax(axis=1), labels) == pytest.approx(expected)
    assert measure("acc", logits, np.eye(10)[labels]) == pytest.approx(expected)
    assert measure("accuracy", logits, labels[:, np.newaxis]) == pytest.approx(expected)


def test_accuracy_of_two_classes_with_one_score(cancer):
    logits, labels = cancer
    expected = reference.accuracy_score(labels, logits > 0)
    assert measure("accuracy", sigmoid(logits), labels) == pytest.approx(expected)
    column = sigmoid(logits)[:, np.newaxis]
    assert measure("accuracy", column, labels[:, np.newaxis]) == pytest.approx(expected)
    assert measure("accuracy", logits, labels, threshold=0) == pytest.approx(expected)


@pytest.mark.parametrize("k", [1, 2, 5, 9])
def test_topk(digits, k):
    logits, labels = digits
    expected = reference.top_k_accuracy_score(labels, logits, k=k)
    assert measure("topk", logits, labels, k=k) == pytest.approx(expected)
    metric = build_metric("top_k", k)
    metric.update(softmax(logits), labels)
    assert metric.result() == pytest.approx(expected)


def test_topk_of_one_is_accuracy_even_where_scores_are_equal():
    scores = np.random.default_rng(0).integers(-3, 3, (500, 7)).astype(np.int8)
    labels = np.random.default_rng(1).integers(0, 7, 500)
    assert measure("topk", scores, labels) == measure("accuracy", scores, labels)


@pytest.mark.parametrize("average", ["macro", "micro", "weighted"])
def test_f1_of_many_classes(digits, average):
    logits, labels = digits
    expected = reference.f1_score(labels, logits.argmax(axis=1), average=average)
    assert measure("F1", logits, labels, average=average) == pytest.approx(expected)
    if average == "macro":
        assert measure("f1_score", logits, labels) == pytest.approx(expected)


def test_f1_of_two_classes_is_that_of_class_one(cancer):
    logits, labels = cancer
    expected = reference.f1_score(labels, logits > 0)
    assert measure("F1", sigmoid(logits), labels) == pytest.approx(expected)
    two = np.stack([-logits, logits], axis=1)
    assert measure("F1", two, labels, average="binary") == pytest.approx(expected)


def test_auc(cancer, digits):
    logits, labels = cancer
    expected = reference.roc_auc_score(labels, logits)
    assert measure("AUC", logits, labels) == pytest.approx(expected)
    shifted = np.stack([np.arange(len(labels)) - logits, np.arange(len(labels))], axis=1)
    assert measure("roc_auc", shifted, labels) == pytest.approx(expected)
    logits, labels = digits
    for multi_class in ("ovr", "ovo"):
        chances = softmax(logits)
        expected = reference.roc_auc_score(labels, chances, multi_class=multi_class)
        assert measure("AUC", logits, labels, multi_class=multi_class) == pytest.approx(expected)
        rounded = chances.astype(np.float32)
        result = measure("AUC", rounded, labels, multi_class=multi_class, from_logits=False)
        assert result == pytest.approx(expected, abs=1e-6)


def test_loss(cancer, digits):
    logits, labels = digits
    expected = reference.log_loss(labels, softmax(logits))
    assert measure("loss", logits, labels) == pytest.approx(expected)
    assert measure("loss", logits, np.eye(10)[labels]) == pytest.approx(expected)
    assert measure("loss", softmax(logits), labels, from_logits=False) == pytest.approx(expected)
    logits, labels = cancer
    expected = reference.log_loss(labels, sigmoid(logits))
    assert measure("cross_entropy", logits, labels) == pytest.approx(expected)
    result = measure("loss", sigmoid(logits)[:, np.newaxis], labels, from_logits=False)
    assert result == pytest.approx(expected)


def test_loss_stays_finite_for_huge_logits():
    logits = np.array([[1e4, -1e4], [-1e4, 1e4]])
    assert measure("loss", logits, np.array([0, 1])) == 0
    assert measure("loss", logits, np.array([1, 0])) == pytest.approx(2e4)
    assert measure("loss", logits[:, 0].astype(np.float32), np.array([0, 1])) == pytest.approx(1e4)
    certain = np.array([[1.0, 0.0]])
    assert np.isfinite(measure("loss", certain, np.array([1]), from_logits=False))


def test_regression(diabetes):
    preds, labels = diabetes
    mse = reference.mean_squared_error(labels, preds)
    assert measure("MSE", preds, labels) == pytest.approx(mse)
    assert measure("RMSE", preds[:, np.newaxis], labels) == pytest.approx(mse**0.5)
    assert measure("mae", preds, labels) == pytest.approx(
        reference.mean_absolute_error(labels, preds)
    )
    assert measure("R2", preds, labels[:, np.newaxis]) == pytest.approx(
        reference.r2_score(labels, preds)
    )


def test_regression_of_several_outputs():
    preds, labels = np.random.default_rng(0).normal(size=(2, 50, 4))
    assert measure("mse", preds, labels) == pytest.approx(np.mean((preds - labels) ** 2))
    assert measure("r2", preds, labels) == pytest.approx(reference.r2_score(labels, preds))


def test_small_dtypes_do_not_overflow():
    preds, labels = np.full(4000, 200, np.uint8), np.full(4000, 100, np.uint8)
    assert measure("MSE", preds, labels) == 10000
    assert measure("MSE", labels.astype(np.float16), preds) == 10000
    assert measure("accuracy", np.ones(100_000, np.float16), np.ones(100_000, np.int8)) == 1


# what every metric promises


#: Those that take one array of predictions and one of labels.
OF_TEXTS = ("wer", "cer", "bleu", "rouge", "exact_match", "answer_f1")
OF_ARRAYS = [name for name in METRICS if name not in ("mAP", "multiple_choice", *OF_TEXTS)]
#: Those whose labels are classes or numbers, one per sample.
OF_SAMPLES = [
    name
    for name in OF_ARRAYS
    if name not in ("perplexity", "kl_divergence", "cosine", "span_f1") and "@" not in name
]


@pytest.mark.parametrize("name", OF_SAMPLES)
def test_every_metric_resets_and_needs_an_update(name):
    metric = build_metric(name, {})
    assert isinstance(metric, Metric)
    assert type(metric).higher_is_better is (name not in ("MSE", "RMSE", "MAE", "loss"))
    with pytest.raises(MetricError, match="has no result before the first sample"):
        metric.result()
    labels = np.array([0, 1, 1, 0])
    preds = np.array([[1.0, -2], [0, 4], [3, 1], [1, 0]])
    if name in ("MSE", "RMSE", "MAE", "R2", "spearman", "pearson"):
        preds = preds[:, 1]
    metric.update(preds, labels)
    first = metric.result()
    assert isinstance(first, float)
    metric.update(-preds, labels)
    assert metric.result() != first
    metric.reset()
    with pytest.raises(MetricError, match="no result"):
        metric.result()
    metric.update(preds, labels)
    assert metric.result() == first


@pytest.mark.parametrize("name", OF_ARRAYS)
@pytest.mark.parametrize(
    "shapes", [((4, 3), (5,)), ((4, 3), (4, 2)), ((2, 3, 4), (2,)), ((3,), ())]
)
def test_shapes_that_do_not_fit_are_both_named(name, shapes):
    preds, labels = np.zeros(shapes[0]), np.zeros(shapes[1], dtype=int)
    with pytest.raises(MetricError) as caught:
        build_metric(name).update(preds, labels)
    assert str(shapes[0]) in str(caught.value)
    assert str(shapes[1]) in str(caught.value)


@pytest.mark.parametrize("name", ["accuracy", "topk", "F1"])
@pytest.mark.parametrize("label", [0, 1])
def test_nan_never_counts_as_right(name, label):
    labels = np.array([label] * 3)
    assert measure(name, np.full((3, 2), np.nan), labels) == 0
    if name != "topk":
        assert measure(name, np.full(3, np.nan), labels) == 0


@pytest.mark.parametrize("name", ["MSE", "RMSE", "MAE", "R2", "AUC", "loss"])
def test_nan_predictions_give_nan(name):
    assert np.isnan(measure(name, np.array([np.nan, 1, 2]), np.array([0, 1, 1])))


def test_overflowed_logits_give_nan_loss_without_a_warning(recwarn):
    assert np.isnan(measure("loss", np.array([[np.inf, 1.0]]), np.array([0])))
    assert not recwarn.list


def test_tensors_are_taken_as_they_are():
    torch = pytest.importorskip("torch")
    logits = torch.tensor([[0.5, 2], [3, 1], [0, 1]], requires_grad=True)
    labels = torch.tensor([1, 0, 0])
    assert measure("accuracy", logits, labels) == pytest.approx(2 / 3)
    assert measure("accuracy", logits.bfloat16(), labels) == pytest.approx(2 / 3)
    assert measure("topk", logits.half(), labels.numpy()) == pytest.approx(2 / 3)


def test_a_collected_batch_may_be_overwritten_by_its_owner():
    preds, labels = np.array([0.1, 0.9]), np.array([0, 1])
    metric = build_metric("AUC")
    metric.update(preds, labels)
    preds[:] = 0
    labels[:] = 0
    assert metric.result() == 1


def test_one_output_may_come_in_a_list_or_a_dict():
    scores, labels = np.array([[0.0, 1], [1, 0]]), np.array([1, 1])
    for preds in ([scores], (scores,), {"logits": scores}, scores.tolist()):
        metric = build_metric("accuracy")
        metric.update(preds, labels)
        assert metric.result() == 0.5


# errors


@pytest.mark.parametrize(
    ("name", "preds", "labels", "message"),
    [
        ("accuracy", [np.zeros((2, 2))] * 2, [0, 1], "predictions must be one array, got 2"),
        ("accuracy", np.zeros((2, 2)), np.array([None, None]), "does the dataset have labels"),
        ("accuracy", ["a", "b"], [0, 1], "predictions must be numbers"),
        ("accuracy", [[1, 2], [3]], [0, 1], "predictions do not form one array"),
        (
            "accuracy",
            np.zeros((2, 3)),
            [0, 3],
            "classes from 0 to 2, as the predictions, got 0 to 3",
        ),
        ("accuracy", np.zeros((2, 3)), [-1, 2], "got -1 to 2"),
        ("accuracy", np.zeros(2), [0, 7], "predicted classes, instead of scores, must be integers"),
        ("accuracy", np.zeros((2, 3)), [0, 0.5], "labels must be classes, .* got 0.5"),
        ("accuracy", np.zeros((2, 3)), [0, np.nan], "labels must be classes, .* got nan"),
        ("accuracy", np.zeros((2, 3)), np.full((2, 3), 0.3), "one-hot"),
        ("accuracy", np.zeros((2, 3)), np.zeros((2, 1, 1), int), "one-hot"),
        ("topk", np.zeros(2), [0, 1], r"topk with k=1 needs predictions \[N, C\]"),
        ("loss", np.zeros(2), [0, 2], r"must be classes from 0 to 1, got \[0, 2\]"),
        ("MSE", np.zeros((3, 2)), np.zeros(3), "they must be the same"),
    ],
)
def test_what_cannot_be_measured_is_refused(name, preds, labels, message):
    with pytest.raises(MetricError, match=message):
        build_metric(name).update(preds, labels)


def test_topk_refuses_fewer_classes_than_k():
    with pytest.raises(MetricError, match=r"k=5 needs .* at least 5 classes, got .* \(2, 3\)"):
        build_metric("topk", {"k": 5}).update(np.zeros((2, 3)), [0, 1])


@pytest.mark.parametrize("name", ["loss", "AUC"])
def test_logits_and_probabilities_are_not_confused(name, digits):
    logits, labels = digits
    with pytest.raises(MetricError, match="for probabilities set from_logits: false"):
        measure(name, softmax(logits), labels)
    with pytest.raises(MetricError, match="for logits set from_logits: true"):
        measure(name, logits, labels, from_logits=False)


def test_auc_needs_every_class_among_the_labels():
    with pytest.raises(MetricError, match=r"each of 0 to 1 and no other, got \[1\]"):
        measure("AUC", np.array([0.1, 0.2]), np.array([1, 1]))
    with pytest.raises(MetricError, match=r"each of 0 to 2 and no other, got \[0, 1\]"):
        measure("AUC", np.eye(3)[:2], np.array([0, 1]))


def test_r2_needs_two_samples_and_f1_binary_two_classes(digits):
    with pytest.raises(MetricError, match="R2 needs at least two samples"):
        measure("R2", np.zeros(1), np.zeros(1))
    with pytest.raises(MetricError, match="set average to macro, micro or weighted"):
        measure("F1", *digits, average="binary")


def test_batches_of_different_width_are_refused():
    metric = build_metric("R2")
    metric.update(np.zeros((2, 3)), np.zeros((2, 3)))
    with pytest.raises(MetricError, match=r"earlier batches, \(2, 3\), .* got \(2, 4\)"):
        metric.update(np.zeros((2, 4)), np.zeros((2, 4)))


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("acuracy", {}, "unknown metric 'acuracy'; did you mean 'accuracy'"),
        ("topk", {"n": 1}, "metric 'topk' has no option 'n'; known are k"),
        ("topk", {"k": 0}, "topk: k must be a whole number from 1"),
        ("topk", True, "topk: k must be a whole number from 1"),
        ("accuracy", 1, "options of metric 'accuracy' must be written as option: value"),
        ("accuracy", {"threshold": "x"}, "accuracy: threshold must be a finite number"),
        ("F1", {"average": "marco"}, "did you mean 'macro'"),
        ("loss", {"from_logits": "no"}, "loss: from_logits must be true or false"),
        ("AUC", {"multi_class": "all"}, "multi_class must be 'ovr' or 'ovo', got 'all'"),
        ("MSE", {"squared": True}, "no option 'squared'; it takes no options"),
        ("no_such_module_here:M", {}, "there is no module 'no_such_module_here'"),
    ],
)
def test_wrong_names_and_options_are_refused(name, options, message):
    with pytest.raises(ConfigurationError, match=message):
        build_metric(name, options)


def test_a_metric_of_the_users_own_is_built_and_checked(tmp_path, monkeypatch):
    (tmp_path / "own_metrics_here.py").write_text(
        "class Count:\n"
        "    def __init__(self, step=1):\n"
        "        self.step, self.total = step, 0\n"
        "    def update(self, preds, labels):\n"
        "        self.total += self.step * len(labels)\n"
        "    def reset(self):\n"
        "        self.total = 0\n"
        "    def result(self):\n"
        "        return float(self.total)\n"
        "class Half:\n"
        "    def update(self, preds, labels): ...\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    metric = build_metric("own_metrics_here:Count", {"step": 2})
    metric.update(np.zeros(3), np.zeros(3))
    assert metric.result() == 6
    with pytest.raises(
        MetricError, match=r"Half has no reset\(\) and result\(\); a metric must have update"
    ):
        build_metric("own_metrics_here:Half")
    with pytest.raises(ConfigurationError, match="no option 'stpe'; did you mean 'step'"):
        build_metric("own_metrics_here:Count", {"stpe": 2})
