"""Metrics that were given parts of the data, put together."""

import itertools
import pickle

import cloudpickle
import numpy as np
import pytest
from sklearn.metrics import make_scorer, mean_pinball_loss, recall_score

from neural_mp.common import can_merge
from neural_mp.compat.inc.components import load_vocabulary
from neural_mp.metrics import METRICS, Accuracy, build_metric, convert_to_metric

GENERATOR = np.random.default_rng(0)
COUNT = 40
SCORES = GENERATOR.normal(size=(COUNT, 4))
CLASSES = GENERATOR.integers(4, size=COUNT)
NUMBERS = GENERATOR.normal(size=(2, COUNT, 3))
PIXELS = GENERATOR.integers(3, size=(2, COUNT, 5, 5))
LOGITS = GENERATOR.normal(size=(COUNT, 6, 9))
TOKENS = GENERATOR.integers(9, size=(COUNT, 6))
CLASSIFIED = SCORES, CLASSES
MEASURED = NUMBERS[0], NUMBERS[1]
SEGMENTED = PIXELS[0], PIXELS[1]


def boxes():
    """Two boxes an image, found not quite where they are, with ties among the scores."""
    corners = GENERATOR.uniform(0, 50, (COUNT, 2, 2))
    truth = np.concatenate([corners, corners + 20], axis=2)
    predictions = truth + GENERATOR.normal(0, 3, truth.shape)
    kinds = GENERATOR.integers(1, 3, (COUNT, 2))
    scores = GENERATOR.integers(1, 5, (COUNT, 2)) / 5
    return {"boxes": predictions, "labels": kinds, "scores": scores}, {
        "boxes": truth,
        "labels": kinds,
    }


#: Four answers a question, the third one right.
ANSWERS = {
    "tokens": TOKENS,
    "question": np.arange(COUNT) // 4,
    "correct": (np.arange(COUNT) % 4 == 2).astype(int),
    "characters": GENERATOR.integers(1, 20, COUNT),
}
#: The documents of ten queries, spread over the batches.
RANKED = {"query": np.arange(COUNT) % 10, "relevance": (np.arange(COUNT) < 15).astype(int)}
LINES = [f"the dog number {number} lies on the mat" for number in range(COUNT)]
SAID = LINES, LINES[:20] + LINES[1:21]
BOXES = boxes()
FOUND, THERE = BOXES
IMAGES = np.array([f"image {number}" for number in range(COUNT)])
DETECTED = (
    (FOUND["boxes"] / 80, FOUND["scores"], FOUND["labels"]),
    (THERE["boxes"] / 80, np.full((COUNT, 2), ""), THERE["labels"], IMAGES),
)
#: Of every metric by name: options, and predictions and labels that it takes.
OURS = {
    "accuracy": ({}, CLASSIFIED),
    "topk": ({"k": 2}, CLASSIFIED),
    "F1": ({}, CLASSIFIED),
    "AUC": ({}, CLASSIFIED),
    "loss": ({}, CLASSIFIED),
    "MSE": ({}, MEASURED),
    "RMSE": ({}, MEASURED),
    "MAE": ({}, MEASURED),
    "R2": ({}, MEASURED),
    "mIoU": ({}, SEGMENTED),
    "mAP": ({}, BOXES),
    "perplexity": ({}, (LOGITS, TOKENS)),
    "kl_divergence": ({}, (LOGITS, LOGITS[::-1])),
    "multiple_choice": ({"normalized": True}, (LOGITS, ANSWERS)),
    "spearman": ({}, (SCORES[:, 0], SCORES[:, 1])),
    "pearson": ({}, (SCORES[:, 0], SCORES[:, 1])),
    "cosine": ({}, MEASURED),
    "ndcg@k": ({"k": 2}, (SCORES, np.eye(4)[CLASSES])),
    "mrr@k": ({}, (SCORES[:, 0], RANKED)),
    "recall@k": ({"k": 1}, (SCORES[:, 0], RANKED)),
    "wer": ({}, SAID),
    "cer": ({}, SAID),
    "bleu": ({}, SAID),
    "rouge": ({}, SAID),
    "exact_match": ({}, SAID),
    "answer_f1": ({}, SAID),
    "span_f1": ({"names": ["O", "B-A", "I-A", "B-B"]}, (CLASSES[:, None], CLASSES[::-1, None])),
}
SENTENCES = [f"the cat number {number} sits on the mat" for number in range(COUNT)]
THEIRS = {
    "topk": ({}, CLASSIFIED),
    "Accuracy": ({}, CLASSIFIED),
    "ROC": ({}, (np.abs(SCORES[:, 0]), CLASSES % 2)),
    "F1": ({}, (CLASSES, CLASSES[::-1])),
    "mIOU": ({"num_classes": 3}, SEGMENTED),
    "MAE": ({}, MEASURED),
    "MSE": ({}, MEASURED),
    "RMSE": ({}, MEASURED),
    "Loss": ({}, (NUMBERS[0][:, 0], NUMBERS[1][:, 0])),
    "GLUE": ({"task": "sts-b"}, (SCORES[:, 0], SCORES[:, 1])),
    "mAP": ({}, DETECTED),
    "BLEU": ({}, (SENTENCES, SENTENCES[:20] + SENTENCES[1:21])),
}
#: Metrics of other packages.
PACKAGES = {"wer": "jiwer", "cer": "jiwer", "bleu": "sacrebleu", "rouge": "rouge_score"}
#: A sum of floats in another order may end in another last digit.
SUMS = ("cosine", "loss", "MSE", "RMSE", "MAE", "Loss", "perplexity", "kl_divergence")


def part(values, start, stop):
    if isinstance(values, dict):
        return {key: value[start:stop] for key, value in values.items()}
    if isinstance(values, tuple):
        return tuple(value[start:stop] for value in values)
    return values[start:stop]


def fed(metric, data, start, stop, batch=4):
    metric.reset()
    for first in range(start, stop, batch):
        last = min(first + batch, stop)
        metric.update(part(data[0], first, last), part(data[1], first, last))
    return metric


def merged(metric, data):
    """What workers with 12, 20, 8 and no samples find, sent from process to process."""
    ends = (0, 12, 32, COUNT, COUNT)
    shares = [
        cloudpickle.dumps(fed(metric, data, start, stop))
        for start, stop in itertools.pairwise(ends)
    ]
    metric.reset()
    for share in shares:
        metric.merge(pickle.loads(share))
    return metric.result()


def check(metric, data, name):
    assert can_merge(metric)
    whole = fed(metric, data, 0, COUNT).result()
    tolerance = 1e-12 if name in SUMS else 0.0
    assert merged(metric, data) == pytest.approx(whole, rel=tolerance, abs=0)
    assert abs(whole) > 0
    assert fed(metric, data, 0, 12).result() != whole


@pytest.mark.parametrize("name", OURS)
def test_parts_merged_give_what_the_whole_gives(name):
    if name in PACKAGES:
        pytest.importorskip(PACKAGES[name])
    options, data = OURS[name]
    check(build_metric(name, options), data, name)


def test_no_metric_of_ours_was_left_out():
    assert {METRICS.find_factory(name) for name in METRICS} == {
        METRICS.find_factory(name) for name in OURS
    }


@pytest.mark.parametrize("name", THEIRS)
def test_parts_merged_give_what_the_whole_gives_in_files_of_inc(name):
    options, data = THEIRS[name]
    check(build_metric(name, options, load_vocabulary(None).metrics), data, name)


def largest_error(predictions, labels):
    return float(np.abs(predictions - labels).max())


@pytest.mark.parametrize(
    ("given", "data"),
    [
        (largest_error, MEASURED),
        (make_scorer(recall_score, average="macro"), CLASSIFIED),
        (mean_pinball_loss, MEASURED),
        ("balanced_accuracy", CLASSIFIED),
        (("accuracy", {"output": 0}), CLASSIFIED),
    ],
)
def test_functions_and_scorers_merge_in_the_order_of_the_data(given, data):
    if given == ("accuracy", {"output": 0}):
        data = {"logits": SCORES}, CLASSES
    check(convert_to_metric(given), data, "")


class Foreign:
    """What torchmetrics calls a metric."""

    def update(self, preds, target): ...

    def compute(self): ...

    def reset(self): ...


class Counting(Accuracy):
    """Collects something that the metric it is made from does not know."""

    def update(self, preds, labels):
        super().update(preds, labels)
        self.seen = getattr(self, "seen", 0) + len(labels)


class CountingAndMerging(Counting):
    def merge(self, other):
        super().merge(other)
        self.seen += other.seen


class Doubting(CountingAndMerging):
    """Changes what the user's own merge knows of."""

    def result(self):
        return super().result() / 2


def test_who_cannot_merge_says_so():
    assert not can_merge(convert_to_metric(Foreign()))
    assert not can_merge(convert_to_metric((Foreign(), {"output": 0})))
    assert not can_merge(Counting())
    assert can_merge(CountingAndMerging())
    assert can_merge(Doubting())
