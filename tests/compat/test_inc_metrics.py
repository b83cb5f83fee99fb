"""Metrics over classes and numbers, named in a file of Intel Neural Compressor."""

import numpy as np
import pytest
from sklearn.metrics import accuracy_score, jaccard_score, roc_auc_score, top_k_accuracy_score

from neural_mp import AccuracyCriterion, ExitPolicy, MixedPrecision
from neural_mp.compat.inc.components import load_vocabulary
from neural_mp.errors import ConfigurationError, MetricError
from neural_mp.metrics import build_metric

FRAMEWORKS = ("pytorch", "tensorflow", "onnxrt")


def named(name, options=None, framework="pytorch"):
    return build_metric(name, options, load_vocabulary(framework).metrics)


def value(metric, *batches):
    for predictions, labels in batches:
        metric.update(predictions, labels)
    return metric.result()


def drawn(seed=0, samples=50, classes=7):
    random = np.random.default_rng(seed)
    return random.normal(size=(samples, classes)), random.integers(classes, size=samples)


@pytest.mark.parametrize("framework", FRAMEWORKS)
@pytest.mark.parametrize("k", [1, 3])
def test_topk_is_the_share_of_labels_among_the_best_scores(framework, k):
    scores, labels = drawn()
    metric = named("topk", k, framework)
    expected = top_k_accuracy_score(labels, scores, k=k, labels=range(7))
    assert value(metric, (scores[:20], labels[:20]), (scores[20:], labels[20:])) == expected


@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_topk_takes_all_forms_of_scores_and_labels(framework):
    scores = [[0, 0.2, 0.9, 0.3], [0, 0.9, 0.8, 0]]
    top1, top2 = (named("topk", {"k": k}, framework) for k in (1, 2))
    forms = [
        (scores, [2, 2]),
        (np.array(scores), np.array([[2], [2]])),
        ([np.array(scores)], [np.array([2, 2])]),
        ({"logits": np.array(scores)}, (2, 2)),
        (np.array(scores)[:, :, None, None], np.array([2.0, 2.0])),
        (scores, [(2, 2)]),
        (scores, [[0, 0, 1, 0], [0, 0, 1, 0]]),
    ]
    for form in forms:
        top1.reset()
        top2.reset()
        assert (value(top1, form), value(top2, form)) == (0.5, 1.0)
    top1.reset()
    assert value(top1, ([0, 0.2, 0.9, 0.3], 2)) == 1.0


def test_topk_counts_equal_scores_as_the_framework_does():
    tensorflow = pytest.importorskip("tensorflow")
    random = np.random.default_rng(0)
    scores = random.integers(3, size=(200, 6)).astype(np.float32)
    scores[::9, 2] = np.nan
    scores[1::9, 2] = np.inf
    labels = random.integers(-1, 8, size=200)
    for k in (1, 2, 4):
        hits = tensorflow.math.in_top_k(labels.astype(np.int32), scores, k).numpy()
        assert value(named("topk", k, "tensorflow"), (scores, labels)) == hits.mean()
    equal = np.zeros((3, 5))
    assert value(named("topk", 1, "onnxrt"), (equal, np.array([4, 4, 0]))) == pytest.approx(2 / 3)
    assert value(named("topk", 1, "tensorflow"), (equal, np.array([4, 4, 0]))) == 1.0


def test_topk_is_zero_before_any_sample():
    assert named("topk", 1, "tensorflow").result() == 0.0
    assert named("topk", 1, "pytorch").result() == 0.0


def test_topk_says_what_does_not_fit():
    scores, labels = drawn()
    with pytest.raises(MetricError, match="a label for each row"):
        named("topk", 1).update(scores, labels[:10])
    with pytest.raises(MetricError, match="must be classes"):
        named("topk", 1).update(scores, labels + 0.5)
    with pytest.raises(ConfigurationError, match="topk: k must be a whole number from 1"):
        named("topk", 0)


def test_accuracy_of_classes_is_that_of_scikit_learn():
    scores, labels = drawn()
    best = scores.argmax(axis=1)
    expected = accuracy_score(labels, best)
    for form in (scores, best, [scores]):
        assert value(named("Accuracy"), (form, labels)) == expected
    assert value(named("Accuracy"), (best[:, None], labels[:, None])) == expected
    assert value(named("Accuracy"), (best[:, None], labels)) == expected
    assert value(named("Accuracy"), (1, 1), (0, 1)) == 0.5


def test_accuracy_of_many_labels_is_the_share_of_right_ones():
    assert value(named("Accuracy"), ([[0, 0], [0, 0]], [[0, 1], [1, 1]])) == 0.25
    predicted = np.array([[[0, 1], [0, 0], [0, 1]], [[0, 1], [0, 1], [0, 1]]])
    labels = np.array([[[0, 1], [0, 1], [1, 0]], [[1, 0], [1, 0], [1, 0]]])
    assert value(named("Accuracy"), (predicted, labels)) == 0.25
    assert (
        value(named("Accuracy"), (predicted[:1], labels[:1]), (predicted[1:], labels[1:])) == 0.25
    )


def test_accuracy_of_images_counts_the_right_pixels_of_each():
    scores = np.random.default_rng(0).normal(size=(4, 3, 5, 5))
    labels = np.random.default_rng(1).integers(3, size=(4, 5, 5))
    right = (scores.argmax(axis=1) == labels).sum(axis=(1, 2))
    metric = named("Accuracy")
    assert metric.best_value is None
    assert value(metric, (scores[:3], labels[:3]), (scores[3:], labels[3:])) == right.mean()
    assert metric.best_value == 25


def test_accuracy_refuses_labels_of_another_form():
    scores, labels = drawn()
    for wrong in (labels[:10], labels[:, None], labels[:, None, None]):
        with pytest.raises(MetricError, match=r"Accuracy: predictions must be \[N, …\]"):
            named("Accuracy").update(scores, wrong)
    with pytest.raises(MetricError, match="must be one array, got 2"):
        named("Accuracy").update((scores, scores[:, :2]), labels)


def test_f1_compares_lists_of_tokens():
    assert value(named("F1"), ([1, 1, 1, 1], [0, 1, 1, 0])) == 0.5
    assert value(named("F1"), ([1, 1], [2, 1, 1])) == pytest.approx(0.8)
    tokens = ["the", "red", "house"], ["a", "house", "that", "is", "red"]
    # Two of three words are right, of five that should be there.
    assert value(named("F1"), tokens) == pytest.approx(2 * (2 / 3) * (2 / 5) / (2 / 3 + 2 / 5))
    assert value(named("F1"), (np.array([1, 2]), [np.array([3])]), ([4], [4])) == 0.5


def test_f1_of_classes_keeps_its_own_name():
    metric = named("f1_score")
    metric.update(np.array([1, 1, 0]), np.array([1, 0, 0]))
    assert metric.result() == pytest.approx(2 / 3)
    with pytest.raises(MetricError, match="name f1_score instead"):
        named("F1").update(np.zeros((3, 2)), np.zeros(3))


def test_roc_is_the_accuracy_of_rounded_scores():
    random = np.random.default_rng(0)
    scores, labels = random.random((40, 1)), random.integers(2, size=(40, 1))
    roc = value(named("ROC", {"task": "dien"}), (scores[:9], labels[:9]), (scores[9:], labels[9:]))
    assert roc == accuracy_score(labels, np.round(scores))
    assert roc != roc_auc_score(labels, scores)
    assert value(named("ROC"), (np.array([0.5, 0.51]), np.array([0.0, 1.0]))) == 1.0


@pytest.mark.parametrize(("metric", "near"), [("ROC", "wide_deep"), ("GLUE", "sts-b")])
def test_an_unknown_task_is_told_the_nearest(metric, near):
    with pytest.raises(ConfigurationError, match=f"did you mean .*'{near}'"):
        named(metric, {"task": near.replace("_", "").replace("-", "")})


def test_miou_is_the_jaccard_score_of_classes_that_appear():
    random = np.random.default_rng(0)
    labels, predicted = random.integers(5, size=(2, 3, 8, 8))
    metric = named("mIOU", {"num_classes": 21}, "tensorflow")
    expected = jaccard_score(labels.ravel(), predicted.ravel(), average="macro")
    halves = [(predicted[:1], labels[:1, ..., None]), ([predicted[1:]], labels[1:])]
    assert value(metric, *halves) == pytest.approx(expected)
    metric.update(predicted[:1], np.full((1, 8, 8), 255))
    assert metric.result() == pytest.approx(expected)


def test_miou_refuses_what_is_no_class():
    metric = named("mIOU", {"num_classes": 3})
    with pytest.raises(MetricError, match="classes from 0 to 2, got 0 to 5"):
        metric.update(np.array([0, 5]), np.array([0, 1]))
    with pytest.raises(MetricError, match="a prediction for each pixel"):
        metric.update(np.zeros((2, 3, 4, 4)), np.zeros((2, 4, 4)))
    with pytest.raises(MetricError, match="no result before"):
        metric.result()


REFERENCES = {
    "MAE": lambda difference: np.abs(difference).mean(),
    "MSE": lambda difference: (difference**2).mean(),
    "RMSE": lambda difference: np.sqrt((difference**2).mean()),
}


@pytest.mark.parametrize("name", REFERENCES)
def test_errors_are_means_over_all_numbers_of_all_outputs(name):
    random = np.random.default_rng(0)
    first, second = random.normal(size=(2, 6, 3)), random.normal(size=(2, 6))
    errors = np.concatenate([(first[0] - first[1]).ravel(), second[0] - second[1]])
    outputs = [first[0], second[0]], [first[1], second[1]]
    assert value(named(name), outputs) == pytest.approx(REFERENCES[name](errors))
    expected = REFERENCES[name](first[0] - first[1])
    for labels in (first[1], [first[1]], list(first[1])):
        assert value(named(name), (first[0], labels)) == pytest.approx(expected)
    assert not named(name).higher_is_better


def test_errors_of_unsigned_numbers_do_not_wrap_around():
    low, high = np.zeros(3, np.uint8), np.full(3, 255, np.uint8)
    assert value(named("MAE"), (low, high)) == value(named("MAE"), (high, low)) == 255


def test_errors_say_what_does_not_fit():
    with pytest.raises(MetricError, match="must be the same"):
        named("MSE").update(np.zeros((4, 2)), np.zeros((4, 3)))
    with pytest.raises(MetricError, match="the predictions must be one array, got 2"):
        named("MSE").update([np.zeros((4, 2)), np.zeros(4)], np.zeros((4, 2)))
    with pytest.raises(ConfigurationError, match="MSE: compare_label must be true or false"):
        named("MSE", {"compare_label": "no"})


def test_loss_is_the_mean_of_what_it_is_given():
    losses = np.array([0.5, 1.5, 4.0])
    assert value(named("Loss"), (losses, np.zeros(3))) == 2.0
    assert value(named("Loss"), ([losses], [np.zeros(3)]), ([losses[:1]], [np.zeros(1)])) == 1.625
    assert value(named("Loss"), ([1, 2, 3], [0, 0, 0])) == 2.0
    assert named("Loss").higher_is_better is False


def test_loss_takes_an_array_for_a_list_of_its_rows():
    rows = np.arange(12.0).reshape(3, 4)
    assert value(named("Loss"), (rows, rows)) == rows.sum() / 4
    assert value(named("Loss"), ([rows], [rows])) == rows.sum() / 3


def test_names_in_our_own_files_keep_their_meaning():
    labels, scores = np.array([0, 0, 1, 1]), np.array([0.1, 0.4, 0.35, 0.8])
    ours = build_metric("ROC")
    ours.update(scores, labels)
    assert ours.result() == roc_auc_score(labels, scores)


def test_predictions_of_pytorch_and_tensorflow_are_taken_as_they_are():
    torch = pytest.importorskip("torch")
    scores, labels = drawn()
    tensors = torch.tensor(scores), torch.tensor(labels)
    for name in ("topk", "Accuracy"):
        assert value(named(name), tensors) == value(named(name), (scores, labels))
    assert value(named("MAE"), (tensors[0], tensors[0] + 1)) == pytest.approx(1.0)
    assert value(named("mIOU"), (tensors[1], tensors[1])) == 1.0


def test_sample_weights_are_taken_and_of_no_effect():
    scores, labels = drawn()
    for name in ("topk", "Accuracy"):
        metric = named(name)
        metric.update(scores, labels, None)
        assert metric.result() == value(named(name), (scores, labels))


@pytest.mark.slow
def test_without_labels_predictions_are_compared_with_those_of_fp32(digits, all_machine):
    torch = pytest.importorskip("torch")
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(64, 10)).eval()
    converter = MixedPrecision()
    converter.model, converter.precisions, converter.hardware = model, "bf16", all_machine
    converter.metric = named("MSE", {"compare_label": False})
    converter.eval_dataloader = digits[1].loader()
    converter.accuracy_criterion = AccuracyCriterion(tolerance=1.0, relative=False)
    converter.exit_policy = ExitPolicy(max_trials=1)
    result = converter()
    inputs = torch.cat([torch.as_tensor(batch) for batch, _ in digits[1].loader()])
    with torch.no_grad():
        expected = ((result.model(inputs) - model(inputs)) ** 2).mean().item()
    assert result.report.baseline_accuracy == 0.0
    assert result.trials[0].accuracy == pytest.approx(expected, rel=1e-3)
    assert expected > 0
