"""A metric that remembers batches of before its `reset` is refused, and no other."""

from __future__ import annotations

import threading

import numpy as np
import pytest
from onnx_nets import dense_net

from neural_mp import ExitPolicy, MixedPrecision
from neural_mp.errors import MetricError
from neural_mp.metrics import Accuracy
from neural_mp.metrics.coercion import convert_to_metric
from neural_mp.tuning.evaluation.metric_values import MetricBatch, ResetWatch, check_reset

LABELS = np.arange(8) % 4
RIGHT = np.eye(4, dtype=np.float32)[LABELS]


class Counting:
    def __init__(self):
        self.right = self.all = 0
        self.resets = 0

    def reset(self):
        self.resets += 1
        self.right = self.all = 0

    def update(self, preds, labels):
        self.right += int((np.asarray(preds).argmax(1) == labels).sum())
        self.all += len(labels)

    def result(self):
        return self.right / self.all


class Remembering(Counting):
    def reset(self):
        pass


class OfTheClass(Counting):
    right = all = 0

    def __init__(self):
        self.lock = threading.Lock()  # has no copy

    def reset(self):
        self.lock = threading.Lock()

    def update(self, preds, labels):
        OfTheClass.right += int((np.asarray(preds).argmax(1) == labels).sum())
        OfTheClass.all += len(labels)


class Named(Remembering):
    def result(self):
        return {"accuracy": super().result(), "samples": 1.0}


class BestSoFar(Counting):
    best = 0.0

    def result(self):
        self.best = max(self.best, super().result() + 1e-3 * self.resets)
        return self.best


class Random(Counting):
    def result(self):
        return float(np.random.default_rng().random())


class InPlace(Counting):
    def update(self, preds, labels):
        labels += 0 if self.all else 1
        super().update(preds, labels - 1)


class AllAtOnce(Counting):
    def result(self):
        if self.all < 100:
            raise ValueError("all the data are needed")
        return super().result()


def batch(predictions=RIGHT):
    return MetricBatch(predictions.copy(), LABELS.copy(), "batch 1 of eval_dataloader")


@pytest.mark.parametrize("predictions", [RIGHT, RIGHT[::-1]], ids=["all right", "some right"])
@pytest.mark.parametrize("kind", [Remembering, OfTheClass, Named, BestSoFar])
def test_a_metric_that_remembers_is_refused(kind, predictions):
    metric = kind()
    metric.update(RIGHT, LABELS)
    with pytest.raises(MetricError, match=r"mine.reset\(\) must clear the metric, got .* and then"):
        check_reset(metric, "mine", batch(predictions))


@pytest.mark.parametrize("kind", [Counting, Random, InPlace, AllAtOnce])
@pytest.mark.parametrize("predictions", [RIGHT, RIGHT[::-1]], ids=["all right", "some right"])
def test_any_other_is_taken_and_its_batch_stays(kind, predictions):
    metric, samples = kind(), batch(predictions)
    check_reset(metric, "mine", samples)
    np.testing.assert_array_equal(samples.labels, LABELS)


class Keeping(Counting):
    """Keeps all predictions; forgets only the labels."""

    def __init__(self):
        self.preds, self.labels = [], []

    def reset(self):
        self.labels = []

    def update(self, preds, labels):
        self.preds.append(preds)
        self.labels.append(labels)

    def result(self):
        classes = np.concatenate(self.preds).argmax(1)[: sum(map(len, self.labels))]
        return float((classes == np.concatenate(self.labels)).mean())


class Clean(Keeping):
    def reset(self):
        self.preds, self.labels = [], []


class CountingPasses(Counting):
    """Writes of its own are counted, and right all the same."""

    def result(self):
        self.results = getattr(self, "results", 0) + 1
        return super().result()


@pytest.mark.parametrize(
    ("kind", "suspect"),
    [
        (Counting, False),
        (CountingPasses, False),
        (Clean, False),
        (Accuracy, False),
        (lambda: convert_to_metric(recall), False),
        (Remembering, True),
        (OfTheClass, True),
        (Keeping, True),
    ],
)
def test_states_tell_suspects_without_calls(kind, suspect):
    metric, watch = kind(), ResetWatch()
    metrics = [(metric, 1.0)]
    for _ in range(3):
        metric.reset()
        watch.handle_reset(metrics)
        metric.update(RIGHT, LABELS)
        watch.handle_update(metrics)
        metric.update(RIGHT, LABELS)
        metric.result()
    assert watch.suspects == ((0,) if suspect else ())


def recall(preds, labels):
    return float((preds.argmax(1) == labels).mean())


@pytest.mark.parametrize("kind", [Counting, Remembering, OfTheClass])
def test_a_run_refuses_it_before_the_search(kind, tmp_path):
    draw = np.random.default_rng(0)
    converter = MixedPrecision(precisions="int8", objective="modelsize", metric=kind())
    converter.model, converter.workspace = dense_net(4), tmp_path
    converter.exit_policy = ExitPolicy(max_trials=1)
    converter.eval_dataloader = [
        (draw.random((16, 6), np.float32), draw.integers(0, 4, 16)) for _ in range(3)
    ]
    if kind is Counting:
        assert converter().trials
        assert converter.metric.resets == 3  # FP32, the check, the trial
        return
    with pytest.raises(MetricError, match=r"reset\(\) must clear the metric"):
        converter()
