"""Loaders that may have no end: a limit, the time, or one error; never all of the memory."""

from __future__ import annotations

import itertools
import pickle

import numpy as np
import pytest

from neural_mp import ExitPolicy, MixedPrecision
from neural_mp.common import DataLoader
from neural_mp.errors import ConfigurationError, DataError
from neural_mp.tuning.evaluation import batches as batches_module
from neural_mp.tuning.evaluation.batches import Batches
from neural_mp.util import batch_cache
from neural_mp.util.batch_cache import BatchCache
from neural_mp.util.system import memory

pytestmark = pytest.mark.usefixtures("quick_runs")


def batch(number):
    return np.full((4, 8), number, np.float32), np.full(4, number)


def endless():
    for number in itertools.count():
        yield batch(number)


@pytest.fixture
def converter(net, digits):
    tuner = MixedPrecision(precisions="int8", metric="accuracy", objective="modelsize")
    tuner.model = net
    tuner.exit_policy = ExitPolicy(max_trials=1)
    return tuner


def endless_digits(split):
    while True:
        yield from split.loader()


@pytest.mark.slow
@pytest.mark.parametrize("running", [True, False])
def test_an_endless_loader_is_read_as_far_as_max_batches(converter, digits, running):
    split = digits[1]
    converter.eval_dataloader = endless_digits(split) if running else lambda: endless_digits(split)
    converter.max_batches = 6  # of the 100, 100, 100, 100, 100, 97 that there are
    result = converter()
    converter.eval_dataloader = split.loader()
    converter.max_batches = None
    assert result.report.baseline_accuracy == converter().report.baseline_accuracy


def test_a_file_sets_the_limit(net, digits):
    settings = {"evaluation": {"accuracy": {"metric": "accuracy", "max_batches": 2}}}
    assert MixedPrecision(settings).max_batches == 2
    with pytest.raises(ConfigurationError, match="max_batches"):
        MixedPrecision({"evaluation": {"accuracy": {"max_batches": 0}}})
    with pytest.raises(ConfigurationError, match=r"max_batches must be .* from 1 to .*, got 0"):
        MixedPrecision(model=net, max_batches=0)()


@pytest.mark.parametrize("has_length", [False, True])
def test_a_long_first_pass_without_a_length_is_said_once(monkeypatch, caplog, has_length):
    monkeypatch.setattr(batches_module, "_PATIENCE_SECONDS", 0.0)
    source = [batch(number) for number in range(3)]
    data = Batches(source if has_length else lambda: iter(source), "eval_dataloader")
    for _ in range(2):
        assert len(list(data)) == 3
    messages = [record.getMessage() for record in caplog.records]
    if has_length:
        assert not messages
        return
    (message,) = messages
    assert message.startswith(
        "eval_dataloader has no length, and the first pass has read 1 batch in"
    )
    assert "max_batches" in message


def test_the_time_limit_ends_the_first_pass(converter, digits):
    converter.eval_dataloader = endless_digits(digits[1])
    converter.exit_policy = ExitPolicy(timeout=1)
    result = converter()
    assert "time limit" in " ".join(result.report.warnings)
    assert result.report.baseline_accuracy is None
    assert not result.trials


def test_an_endless_generator_is_refused_before_it_fills_the_memory(converter, digits, monkeypatch):
    monkeypatch.setattr(batch_cache, "free_memory", lambda: 1 << 21)
    converter.eval_dataloader = endless_digits(digits[1])
    with pytest.raises(DataError, match="eval_dataloader can be read only once.*max_batches"):
        converter()


def test_a_metric_that_keeps_all_is_stopped_before_the_memory_is_full(
    converter, digits, monkeypatch
):
    free = itertools.count(1 << 40, -(1 << 37))
    used = itertools.count(0, 1 << 38)
    monkeypatch.setattr(memory, "free_memory", lambda: max(0, next(free)))
    monkeypatch.setattr(memory, "_resident_memory_bytes", lambda: next(used))
    monkeypatch.setattr(memory, "_CHECK_SECONDS", 0.0)
    converter.eval_dataloader = lambda: endless_digits(digits[1])
    converter.metric = lambda labels, preds: 0.5
    with pytest.raises(DataError, match="batches of eval_dataloader .* set max_batches"):
        converter()


def test_a_generator_is_read_only_as_far_as_it_is_asked_for():
    numbers = []

    def give():
        for number in range(5):
            numbers.append(number)
            yield batch(number)

    batches = Batches(give(), "it")
    assert not numbers
    assert batches.first_inputs[0, 0] == 0
    assert numbers == [0]
    assert [int(labels[0]) for _, labels in batches.iterate_pairs()] == [0, 1, 2, 3, 4]
    assert [int(labels[0]) for _, labels in batches.iterate_pairs()] == [0, 1, 2, 3, 4]
    assert len(batches) == 5


def test_what_a_generator_fills_anew_is_kept_as_it_was():
    def give():
        array = np.zeros(3)
        for number in range(3):
            array[:] = number
            yield array, number

    batches = Batches(give(), "it")
    for _ in range(2):
        assert [array[0] for array, _ in map(list, batches)] == [0, 1, 2]


def test_a_generator_that_raised_is_not_taken_for_one_that_ended():
    def give():
        yield batch(0)
        raise KeyError("mine")

    batches = Batches(give(), "it")
    for _ in range(2):
        with pytest.raises(KeyError, match="mine"):
            list(batches)


def test_a_copy_for_another_process_has_all_batches():
    cache = BatchCache(endless(), "it", 4)
    next(iter(cache))
    assert len(list(pickle.loads(pickle.dumps(cache)))) == 4


def test_two_passes_at_the_same_time_see_the_same():
    cache = BatchCache(endless(), "it", 4)
    pairs = zip(cache, cache, strict=True)
    assert [int(a[1][0]) for a, b in pairs if a[1][0] == b[1][0]] == [0, 1, 2, 3]


@pytest.mark.parametrize("part", [slice(0, 2), slice(2, None), slice(1, 9)])
def test_a_part_ends_with_the_limit_too(part):
    batches = Batches(lambda: endless(), "it", most=4)
    numbers = [int(labels[0]) for _, labels in batches.iterate_pairs(part)]
    assert numbers == list(range(9))[slice(part.start, min(part.stop or 4, 4))]


def test_a_dataset_without_end_is_refused_before_it_fills_the_memory(monkeypatch):
    monkeypatch.setattr(batch_cache, "free_memory", lambda: 1 << 20)
    with pytest.raises(DataError, match=r"the dataset can be read only once.*__getitem__"):
        DataLoader(endless(), batch_size=4)
