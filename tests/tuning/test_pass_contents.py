"""Accuracies are compared on the same samples only: counts and labels of every pass are checked."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from onnx_nets import dense_net

from neural_mp import ExitPolicy, MixedPrecision
from neural_mp.common import DataLoader
from neural_mp.core.criterion import Deadline
from neural_mp.errors import DataError
from neural_mp.metrics import Accuracy
from neural_mp.tuning.evaluation.batches import Batches
from neural_mp.tuning.evaluation.evaluator import Evaluator
from neural_mp.tuning.evaluation.pass_contents import PassContents

SAMPLES, CLASSES = 48, 4


def samples(count=SAMPLES):
    draw = np.random.default_rng(0)
    return draw.random((count, 6), np.float32), draw.integers(0, CLASSES, count)


def contents_of(batches):
    contents = PassContents()
    for inputs, labels in batches:
        contents = contents.with_batch(inputs, labels)
    return contents


def split(inputs, labels, size=16):
    return [(inputs[i : i + size], labels[i : i + size]) for i in range(0, len(inputs), size)]


class EachPass:
    """A loader with other batches in every pass, the last of them again and again."""

    def __init__(self, *passes):
        self.passes, self.walked = passes, 0

    def __iter__(self):
        self.walked += 1
        return iter(self.passes[min(self.walked, len(self.passes)) - 1])


def evaluator_of(*passes):
    return Evaluator(Batches(EachPass(*passes), "eval_dataloader"), [(Accuracy(), 1.0)])


def model(inputs):
    return np.asarray(inputs)[:, :CLASSES]


def evaluate_twice(first, second):
    evaluator = evaluator_of(first, second)
    evaluator(model, Deadline())
    evaluator.expected = evaluator.contents
    return evaluator(model, Deadline())


X, Y = samples()
MIXED = np.random.default_rng(1).permutation(SAMPLES)


@pytest.mark.parametrize(
    ("second", "words"),
    [
        (split(X, Y)[1:], r"eval_dataloader must yield the same samples .* got 32 samples, 48 in"),
        (split(*samples(64)), "got more than the 48 samples of the baseline"),
        (split(X, (Y + 1) % CLASSES), "got 48 samples with labels other than the baseline's"),
        (split(np.r_[X[:16]] * 3, np.r_[Y[:16], Y[:16], Y[:16]]), "labels other|samples"),
    ],
)
def test_other_data_in_a_later_pass_are_refused(second, words):
    with pytest.raises(DataError, match=words):
        evaluate_twice(split(X, Y), second)


@pytest.mark.parametrize("size", [16, 7, 1, SAMPLES])
def test_the_same_samples_in_another_order_and_other_batches_are_taken(size):
    evaluate_twice(split(X, Y), split(X[MIXED], Y[MIXED], size))


def boxes(count):
    return [{"boxes": np.full((i % 3, 4), i, np.float32), "name": f"{i}.png"} for i in range(count)]


@pytest.mark.parametrize(
    "labels",
    [
        Y,
        Y.astype(np.float32),
        np.eye(CLASSES, dtype=np.float32)[Y],
        (Y[:, None, None] == np.arange(25).reshape(5, 5)).astype(np.uint8),
        np.array([f"class {y}" * (1 + y) for y in Y]),
        torch.tensor(Y),
        {"class": Y, "box": np.outer(Y, [1.0, 2.0])},
        (Y, np.arange(SAMPLES)),
        Y.tolist(),
        boxes(SAMPLES),
    ],
    ids=lambda labels: type(labels).__name__,
)
def test_a_digest_changes_with_any_label_but_not_with_order(labels):
    def at(order):
        if isinstance(labels, dict):
            return {name: values[order] for name, values in labels.items()}
        if isinstance(labels, tuple):
            return tuple(values[order] for values in labels)
        return [labels[i] for i in order] if isinstance(labels, list) else labels[order]

    order = np.arange(SAMPLES)
    whole = contents_of([(X, at(order))])
    halves = contents_of([(X[:20], at(MIXED[:20])), (X[20:], at(MIXED[20:]))])
    assert whole.labels is not None
    assert (whole.samples, whole.labels) == (halves.samples, halves.labels)
    changed = contents_of([(X, at(np.r_[order[:-1], np.flatnonzero(Y[-1] != Y)[0]]))])
    assert changed.samples == whole.samples
    assert changed.labels != whole.labels


def test_labels_padded_to_the_longest_of_each_batch_are_not_compared():
    padded = [(X[:4], np.zeros((4, 5))), (X[:4], np.zeros((4, 7)))]
    assert contents_of(padded).labels is None
    assert contents_of(padded).samples == 8


def test_shards_add_up_to_the_whole():
    parts = [contents_of([batch]) for batch in split(X, Y)]
    assert sum(parts, PassContents()) == contents_of([(X, Y)])


class TwoPasses(EachPass):
    """The whole data for FP32, other data for plans."""

    def __iter__(self):
        return iter(self.passes[Seen.of_plan])


class Seen(Accuracy):
    of_plan = has_baseline = False

    def reset(self):
        super().reset()
        Seen.of_plan = Seen.has_baseline

    def result(self):
        Seen.has_baseline = True
        return super().result()


@pytest.mark.parametrize("second", [split(X, Y)[2:], split(X, (Y + 1) % CLASSES)])
@pytest.mark.parametrize("resumed", [False, True])
def test_a_run_ends_with_an_error_instead_of_a_target_met_on_other_data(tmp_path, second, resumed):
    Seen.of_plan = Seen.has_baseline = False
    converter = MixedPrecision(precisions="int8", objective="modelsize", metric=Seen())
    converter.model, converter.workspace = dense_net(CLASSES), tmp_path
    converter.calib_dataloader = split(X, Y)
    converter.exit_policy = ExitPolicy(max_trials=1)
    converter.eval_dataloader = TwoPasses(split(X, Y), second)
    with pytest.raises(DataError, match="eval_dataloader must yield the same samples"):
        converter()
    if resumed:
        converter.resume, Seen.of_plan = True, False
        with pytest.raises(DataError, match="eval_dataloader must yield the same samples"):
            converter()


def dropping(count, size, **options):
    """A shuffled loader of PyTorch that drops its incomplete last batch."""
    inputs, labels = samples(count)
    pairs = list(zip(inputs, labels, strict=True))
    return torch.utils.data.DataLoader(pairs, size, shuffle=True, drop_last=True, **options)


class AnyLabels(Accuracy):
    """A metric that takes every label."""

    def update(self, preds, labels):
        self.take_in(np.ones(len(labels)))


def warnings_of(loader, passes=3, metric=None):
    evaluator = Evaluator(Batches(loader, "eval_dataloader"), [(metric or Accuracy(), 1.0)])
    warnings = []
    evaluator.warn = warnings.append
    evaluator(model, Deadline())
    evaluator.expected = evaluator.contents
    for _ in range(passes):
        evaluator(model, Deadline())
    return warnings


@pytest.mark.parametrize(("count", "size"), [(63, 16), (50, 16), (1000, 64), (31, 30)])
def test_a_shuffled_loader_that_drops_its_last_batch_is_warned_of(count, size):
    torch.manual_seed(0)
    warnings = warnings_of(dropping(count, size))
    assert warnings
    for warning in warnings:
        assert warning.startswith(f"eval_dataloader yields {count // size * size} samples in every")
        assert "drop_last=False" in warning


def test_the_loader_of_the_library_is_warned_of_as_well():
    class Shuffled(DataLoader):
        passes = 0

        def __iter__(self):
            Shuffled.passes += 1
            order = np.random.default_rng(Shuffled.passes).permutation(60)[:48]
            return iter(split(inputs[order], labels[order]))

    inputs, labels = samples(60)
    loader = Shuffled(list(zip(inputs, labels, strict=True)), batch_size=16, last_batch="discard")
    assert any("last_batch='rollover'" in warning for warning in warnings_of(loader))


def test_nothing_is_said_if_no_sample_is_dropped():
    assert not warnings_of(dropping(64, 16))


def test_a_loader_that_does_not_declare_dropping_may_exchange_few_samples():
    inputs, labels = samples(1000)
    changed = np.r_[labels[:-20], (labels[-20:] + 1) % CLASSES]
    evaluator = evaluator_of(split(inputs, labels), split(inputs, changed))
    evaluator.warn = (warnings := []).append
    evaluator(model, Deadline())
    evaluator.expected = evaluator.contents
    evaluator(model, Deadline())
    assert len(warnings) == 1


@pytest.mark.parametrize("distinct", [False, True], ids=["one class", "distinct labels"])
def test_labels_that_clearly_differ_are_refused_of_a_dropping_loader(distinct):
    class Easy(EachPass):
        drop_last = True

    changed = np.arange(100, 100 + SAMPLES) if distinct else np.zeros_like(Y)
    labels = np.arange(SAMPLES) if distinct else Y
    with pytest.raises(DataError, match="labels other than the baseline's"):
        warnings_of(Easy(split(X, labels), split(X, changed)), metric=AnyLabels())


def test_a_run_on_a_loader_that_drops_ends_with_a_single_warning(tmp_path):
    torch.manual_seed(0)
    converter = MixedPrecision(precisions="int8", objective="modelsize", metric="accuracy")
    converter.model, converter.workspace = dense_net(CLASSES), tmp_path
    converter.exit_policy = ExitPolicy(max_trials=3)
    converter.eval_dataloader = dropping(60, 16)
    result = converter()
    assert sum("but not the same ones" in warning for warning in result.report.warnings) == 1


def test_a_shuffled_loader_is_taken(tmp_path):
    converter = MixedPrecision(precisions="int8", objective="modelsize", metric="accuracy")
    converter.model, converter.workspace = dense_net(CLASSES), tmp_path
    converter.exit_policy = ExitPolicy(max_trials=1)
    converter.eval_dataloader = torch.utils.data.DataLoader(list(zip(X, Y, strict=True)), 7, True)
    assert converter().trials
