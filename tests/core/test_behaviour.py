"""Whether two metrics measure the same, whatever they have taken in, told in another process."""

from __future__ import annotations

import enum
import functools
import hashlib
import os
import subprocess
import sys
import time
import types
from types import SimpleNamespace

import keras
import numpy as np
import pytest
import torch  # noqa: F401 - as for every metric of torchmetrics
from sklearn import metrics as sklearn_metrics

from neural_mp.metrics import METRICS, build_metric, convert_to_metric
from neural_mp.util import fingerprint
from neural_mp.util.fingerprint import code_fingerprint

FACTOR = 0.5
calls = []


def scaled(value, factor=1):
    calls.append(value)
    return value * FACTOR * factor


def top(k):
    return lambda scores: sorted(scores)[-k:]


def made(body, name="metric", **names):
    exec(body, names)
    return names[name]


class Counting:
    """A metric that remembers much."""

    best = 0.0
    passes = 0

    def __init__(self, k=1, log=None):
        self.k, self.log = k, log
        self.seen, self.right, self.all = [], 0, 0

    def reset(self):
        self.seen.clear()
        self.right = self.all = 0
        Counting.passes += 1

    def update(self, preds, labels):
        self.seen.append(len(labels))
        self.right += int(np.sum(preds == labels))
        self.all += len(labels)
        type(self).best = max(self.best, self.right)

    def result(self):
        return self.right / self.all + self.k


class Torchmetric:
    """As a metric of torchmetrics holds itself."""

    def __init__(self, top_k=1):
        self.top_k, self._update_count = top_k, 0
        self.add_state("right")

    def add_state(self, name):
        setattr(self, name, np.zeros(1))

    def update(self, preds, target):
        self._update_count += 1
        self.right = self.right + int((preds == target).sum())

    def compute(self):
        return self.right

    def reset(self):
        self._update_count = 0
        self.right = np.zeros(1)


def digest(value):
    fingerprint = code_fingerprint(value)
    assert fingerprint is not None
    return fingerprint.digest


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (lambda model: 0.1, lambda model: 0.2),
        (lambda model: model + 1, lambda model: model - 1),
        (lambda model: "/data/a", lambda model: "/data/b"),
        (lambda model: model in (10**9, {"a"}), lambda model: model in (10**9, {"b"})),
        (top(1), top(5)),
        (build_metric("topk", 1), build_metric("topk", 5)),
        ([build_metric("topk", 1)], [build_metric("topk", 5)]),
        (
            convert_to_metric(("topk", {"k": 1, "output": 0})),
            convert_to_metric(("topk", {"k": 1, "output": 1})),
        ),
        (build_metric("F1"), build_metric("F1", {"average": "macro"})),
        (Counting(1), Counting(5)),
        (Counting(1).update, Counting(5).update),
        (convert_to_metric(Torchmetric(1)), convert_to_metric(Torchmetric(5))),
        (
            convert_to_metric(keras.metrics.TopKCategoricalAccuracy(k=1)),
            convert_to_metric(keras.metrics.TopKCategoricalAccuracy(k=5)),
        ),
        (functools.partial(scaled, factor=1), functools.partial(scaled, factor=2)),
        (
            convert_to_metric(sklearn_metrics.f1_score),
            convert_to_metric(sklearn_metrics.recall_score),
        ),
        (
            convert_to_metric((sklearn_metrics.fbeta_score, {"beta": 1})),
            convert_to_metric((sklearn_metrics.fbeta_score, {"beta": 2})),
        ),
        (
            convert_to_metric(sklearn_metrics.make_scorer(sklearn_metrics.fbeta_score, beta=1)),
            convert_to_metric(sklearn_metrics.make_scorer(sklearn_metrics.fbeta_score, beta=2)),
        ),
        (np.mean, np.max),
        (made("def metric(a, b=1): return a"), made("def metric(a, b=2): return a")),
        (made("def metric(a): return a + N", N=1), made("def metric(a): return a + N", N=2)),
        (
            made("def inner(a): return a\ndef metric(a): return inner(a)"),
            made("def inner(a): return -a\ndef metric(a): return inner(a)"),
        ),
        (
            made("class metric:\n k = 1\n def result(self): return self.k", __name__="m"),
            made("class metric:\n k = 2\n def result(self): return self.k", __name__="m"),
        ),
    ],
)
def test_what_measures_something_else_is_told_apart(one, other):
    assert digest(one) != digest(other)


class Scored:
    """A metric that has an object of the user's do the work."""

    def __init__(self, scorer):
        self.scorer = scorer

    def update(self, preds, labels):
        self.scorer.take(preds, labels)

    def result(self):
        return self.scorer.score()


def test_the_code_of_an_object_that_a_metric_was_given_counts():
    first, second = (
        made(f"class scorer:\n def score(self): return {k}", "scorer", __name__="m") for k in (1, 2)
    )
    assert digest(Scored(first())) != digest(Scored(second()))
    assert digest(Scored(first())) == digest(Scored(first()))


def test_what_a_package_of_the_users_holds_in_its_modules_counts():
    package, part = types.ModuleType("package"), types.ModuleType("package.part")
    package.part, part.package = part, package
    part.score = made("def score(a): return a", "score")

    def evaluate(model):
        return package.part.score(model)

    initial = digest(evaluate)
    assert digest(evaluate) == initial
    part.score = made("def score(a): return -a", "score")
    assert digest(evaluate) != initial


def test_a_member_of_an_enumeration_counts_by_its_value():
    def evaluate(model, how):
        return how

    kinds = [enum.Enum("Kind", {"BEST": value}) for value in (1, 2, object(), object())]
    first, second, third, fourth = (
        digest(functools.partial(evaluate, how=kind.BEST)) for kind in kinds
    )
    assert first != second
    assert third == fourth  # its address is no part of it


def test_what_is_computed_once_and_kept_does_not_count():
    class Kept(Counting):
        @functools.cached_property
        def scale(self):
            return 10

    metric = Kept()
    initial = digest(metric)
    assert metric.scale == 10
    assert digest(metric) == initial


SCORES = np.eye(10, dtype=np.float32)[np.arange(40) % 10] + 0.01


@pytest.mark.parametrize("name", ["accuracy", "topk", "F1", "loss", "MAE", "RMSE", "mIoU"])
def test_what_a_metric_of_ours_has_taken_in_does_not_count(name):
    options = {"num_classes": 10} if name == "mIoU" else None
    metric = build_metric(name, options)
    initial = digest(metric)
    metric.reset()
    labels = np.arange(40) % 10
    preds, truth = (SCORES[:, :1], labels[:, None]) if name in ("MAE", "RMSE") else (SCORES, labels)
    metric.update(preds, truth)
    assert digest(metric) == initial
    metric.result()
    assert digest(metric) == initial == digest(build_metric(name, options))


@pytest.mark.parametrize("name", sorted({*METRICS} - {"mAP", "COCOmAP"}))
def test_every_metric_of_ours_is_told(name):
    metric = build_metric(name)
    assert digest(metric) == digest(build_metric(name))


@pytest.mark.parametrize(
    "metric",
    [
        Counting(3),
        convert_to_metric(Torchmetric(3)),
        convert_to_metric(keras.metrics.SparseCategoricalAccuracy()),
        convert_to_metric(lambda preds, labels: float(np.mean(calls.append(1) is None))),
    ],
)
def test_what_a_metric_of_the_users_has_taken_in_does_not_count(metric):
    initial = digest(metric)
    metric.reset()
    metric.update(SCORES, np.arange(40)[:, None] % 10)
    metric.result()
    assert digest(metric) == initial
    metric.reset()
    assert digest(metric) == initial


def test_keras_numbers_its_metrics_which_does_not_count():
    first, second = (keras.metrics.MeanSquaredError(name=name) for name in ("mse", "mse_1"))
    assert digest(convert_to_metric(first)) == digest(convert_to_metric(second))


def test_what_is_there_for_a_function_to_change_does_not_count():
    started, folder, counted = time.time(), "/tmp/abc", 0

    def evaluate(model):
        nonlocal counted
        counted += 1
        calls.append((started, folder, os.getpid()))
        return scaled(model)

    initial = digest(evaluate)
    evaluate(1)
    started, folder = time.time(), "/tmp/def"
    assert digest(evaluate) == initial


def test_large_data_costs_nothing(tmp_path, monkeypatch):
    hashed = 0

    class Recorded:
        """A digest that counts the bytes of all."""

        def __init__(self, data=b""):
            self.digest = hashlib.sha256()
            self.update(data)

        def update(self, data):
            nonlocal hashed
            hashed += len(data)
            self.digest.update(data)

        def hexdigest(self):
            return self.digest.hexdigest()

    monkeypatch.setattr(fingerprint, "hashlib", SimpleNamespace(sha256=Recorded))
    data, model = np.zeros((1000, 1000, 10)), {n: np.zeros(10) for n in range(1000)}
    with (tmp_path / "open").open("w") as file:
        assert digest(lambda net: float(data.mean()) + len(model) + file.tell())
        assert digest(Counting(1, file))
    assert 0 < hashed < data.nbytes / 1000


def test_a_change_is_told_in_words():
    assert dict(code_fingerprint([build_metric("topk", 5)]).options) == {"k": "5"}
    started, secret = 0.25, "a word"
    assert dict(code_fingerprint(lambda model: (started, secret, FACTOR)).options) == {
        "started": "0.25",
        "FACTOR": "0.5",
    }


def test_of_what_refuses_to_be_looked_at_nothing_is_told():
    class Refusing:
        __slots__ = ("k",)

        def __getattribute__(self, name):
            raise RuntimeError(name)

    assert code_fingerprint(Refusing()) is None


PROGRAM = """
import functools, time, tempfile, os
import numpy as np, sklearn.metrics as of_others
from neural_mp.util import fingerprint
from neural_mp.util.fingerprint import code_fingerprint
from neural_mp.metrics import METRICS, build_metric, convert_to_metric

LABELS, STARTED, FOLDER = frozenset(("cat", "dog", "bird", "fish")), time.time(), tempfile.mkdtemp()
PLACES = {"cat", "dog", "bird"}

class Mine:
    def __init__(self, k):
        self.k, self.labels, self.lock, self.seen = k, LABELS, object(), set(LABELS)
    def update(self, p, l): self.seen |= set(l)
    def reset(self): self.seen = set()
    def result(self): return self.k if "cat" in {"dog", "cat", "fish"} else FOLDER

def evaluate(model, mine=Mine(3)):
    return mine.result() + STARTED + sum(x in {1, 2, "three", None} for x in PLACES)

told = [evaluate, Mine(3), Mine(3).result, functools.partial(evaluate, 3), lambda m: evaluate(m)]
told += [convert_to_metric(x) for x in (Mine(3), of_others.f1_score, "f1_macro", lambda p, l: 0.5)]
for name in sorted(METRICS):
    try:
        told.append(build_metric(name))
    except Exception:
        continue
print([code_fingerprint(one).digest for one in told])
"""


@pytest.mark.slow
def test_another_process_tells_the_same(tmp_path):
    (tmp_path / "program.py").write_text(PROGRAM)
    digests = {
        subprocess.run(
            [sys.executable, "program.py"],
            capture_output=True,
            text=True,
            check=True,
            env={**os.environ, "PYTHONHASHSEED": str(seed)},
            cwd=tmp_path,
        ).stdout
        for seed in range(2)
    }
    assert len(digests) == 1
