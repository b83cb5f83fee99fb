"""The batches of one evaluation shared among workers; these workers are no processes."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import ClassVar

import pytest
import torch

from neural_mp import ExitPolicy, MixedPrecision
from neural_mp.common import DataLoader
from neural_mp.core.criterion import Deadline, DeadlineExceededError
from neural_mp.core.trial import Outcome
from neural_mp.errors import ConfigurationError, TuningError
from neural_mp.metrics import Accuracy, build_metric
from neural_mp.testing import Accuracy as WithoutMerge
from neural_mp.tuning import executors, trial_runner
from neural_mp.tuning.evaluation import sharding
from neural_mp.tuning.evaluation.evaluator import NotShardableError
from neural_mp.tuning.executors import Executor, WorkerPayload
from neural_mp.tuning.executors.contract import crashed_evaluation
from neural_mp.tuning.listener import Listener

WIDTH = 3
#: Of twelve batches.
SHARES = [slice(0, 4), slice(4, 8), slice(8, None)]


class Here(Executor):
    """Evaluates in this process, where `answer` does not say something else."""

    name = "here"
    made: ClassVar[list[Here]] = []
    answer = staticmethod(lambda number: None)
    tasks: ClassVar[list] = []

    def __init__(self, work, workers, warn):
        super().__init__(work, workers, warn)
        self.open = True
        self.made.append(self)

    @property
    def capacity(self):
        return WIDTH

    def submit(self, task, seconds):
        self.tasks.append(task)
        return task, seconds, len(self.tasks) - 1

    def assessment(self, ticket):
        task, seconds, number = ticket
        result = self.answer(number)
        if result is None:
            result = self.work.evaluate_shard(task, Deadline(seconds))
            result = replace(result, node=f"node {number % WIDTH}")
        return result

    def close(self):
        self.open = False


@pytest.fixture
def here(monkeypatch):
    monkeypatch.setattr(Here, "made", [])
    monkeypatch.setattr(Here, "tasks", [])
    monkeypatch.setattr(executors, "list_executor_classes", lambda: {"here": Here})
    monkeypatch.setattr(
        WorkerPayload, "pack_run", lambda load, plan_evaluator, workers: plan_evaluator
    )
    return Here


@pytest.fixture
def always(monkeypatch):
    """However little it saves."""
    monkeypatch.setattr(trial_runner, "STARTING", 0.0)
    monkeypatch.setattr(trial_runner, "SENDING", 0.0)


@pytest.fixture
def converter(hostile_net, digits, here):
    tuner = MixedPrecision()
    tuner.model = hostile_net
    tuner.precisions = "int8"
    tuner.strategy = "basic"  # one plan after the other
    tuner.objective = "modelsize"
    tuner.metric = build_metric("accuracy")
    tuner.eval_dataloader = digits[1].loader(50)
    tuner.exit_policy = ExitPolicy(max_trials=2)
    tuner.early_stopping = False
    tuner.workers = {"engine": "here"}
    return tuner


def told(result):
    return [(trial.plan, trial.accuracy, trial.outcome, trial.loss) for trial in result.trials]


def said(result):
    return [
        warning for warning in result.report.warnings if "not sharded among the workers" in warning
    ]


@pytest.fixture(scope="module")
def found_alone():
    return []


@pytest.fixture
def alone(converter, found_alone):
    """What one process finds, with the metric accuracy; it is evaluated once."""
    if not found_alone:
        found_alone.append(without_workers(converter))
    return found_alone[0]


def without_workers(converter):
    converter.workers = 1
    result = converter()
    converter.workers = {"engine": "here"}
    return result


@pytest.mark.slow
def test_a_shared_evaluation_finds_what_one_process_finds(converter, here, always, alone):
    assert not here.tasks
    together = converter()
    assert told(together) == told(alone)
    assert {trial.outcome for trial in alone.trials} == {Outcome.MISSED}
    assert together.report.evaluations == alone.report.evaluations == 3
    assert [task.batches for task in here.tasks] == SHARES * 2
    assert {trial.node for trial in together.trials} == {"node 0, node 1, node 2"}
    assert not said(together)
    assert len(here.made) == 1
    assert not here.made[0].open


@pytest.mark.slow
def test_several_metrics_are_merged_each(converter, here, always):
    converter.metric = {"accuracy": {}, "loss": {}, "F1": {}}
    single, together = without_workers(converter), converter()
    assert len(here.tasks) == WIDTH * 2
    for expected, actual in zip(single.trials, together.trials, strict=True):
        assert expected.outcome is actual.outcome
        assert set(expected.metrics) == {"accuracy", "loss", "F1"}
        assert actual.metrics == pytest.approx(expected.metrics, rel=1e-12)


@pytest.mark.slow
def test_batches_of_unknown_number_are_counted_while_fp32_is_evaluated(converter, here, always):
    loader = converter.eval_dataloader
    converter.eval_dataloader = lambda: iter(loader)
    converter()
    assert [task.batches for task in here.tasks] == SHARES * 2


@pytest.mark.slow
def test_what_is_evaluated_quickly_is_not_shared_as_the_log_says(converter, here, caplog):
    caplog.set_level("INFO", "neural_mp")
    result = converter()
    assert not here.made
    assert not said(result)
    assert re.search(r"one takes \d\.\d s, sharding costs 15 s", caplog.text)


@pytest.mark.slow
def test_what_would_save_too_little_is_not_shared_as_the_log_says(
    converter, here, always, monkeypatch, caplog
):
    monkeypatch.setattr(sharding, "estimate_sharded_seconds", lambda seconds, *arguments: seconds)
    caplog.set_level("INFO", "neural_mp")
    result = converter()
    assert not here.tasks
    assert not said(result)
    assert "3 workers would save 0.0 s" in caplog.text


@pytest.mark.slow
def test_how_many_share_is_announced(converter, here, always):
    phases = []

    class Hearing(Listener):
        def phase(self, name, total=None):
            phases.append((name, total))

    converter.listener = Hearing()
    converter()
    assert ("Trial 2, sharded among 3 workers", WIDTH) in phases


class Random(DataLoader):
    def __init__(self, data):
        super().__init__(data, 50, shuffle=True)


class HoldingBack:
    def reset(self): ...

    def __call__(self, sample):
        return sample


class Louder(Accuracy):
    """Made from a metric that merges, without a merge of its own."""

    def result(self):
        return super().result() * 100


def metric_without_merge(converter, data):
    converter.metric = WithoutMerge()


def metric_made_from_one_that_merges(converter, data):
    converter.metric = {"accuracy": {}, "mine": Louder()}


def function_of_the_model(converter, data):
    converter.metric = converter.eval_dataloader = None
    converter.calib_dataloader = data.loader(50)
    images, labels = torch.from_numpy(data.images), torch.from_numpy(data.labels)
    converter.eval_func = lambda model: float((model(images).argmax(1) == labels).float().mean())


def random_order(converter, data):
    converter.eval_dataloader = Random(data)


def state_in_the_postprocess(converter, data):
    converter.postprocess = HoldingBack()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("change", "words"),
    [
        (metric_without_merge, r"the metric Accuracy has no method merge\(other\)"),
        (metric_made_from_one_that_merges, r"the metric mine has no method merge\(other\)"),
        (function_of_the_model, "eval_func reads the data"),
        (random_order, "order of the evaluation data differs"),
        (state_in_the_postprocess, "the postprocess has a method reset"),
    ],
)
def test_what_cannot_be_shared_runs_whole_and_it_is_said_once(
    converter, here, always, digits, change, words
):
    change(converter, digits[1])
    result = converter()
    assert len(result.trials) > 1
    assert not here.made
    (warning,) = said(result)
    assert re.search(words, warning)


@pytest.mark.slow
def test_a_plan_fails_with_the_share_whose_process_died(converter, here, always, monkeypatch):
    answers = {4: crashed_evaluation("node 1")}
    monkeypatch.setattr(here, "answer", staticmethod(answers.get))
    first, second = converter().trials
    assert (second.outcome, second.node) == (Outcome.FAILED, "node 1")
    assert "a worker process crashed" in second.error
    assert first.outcome is Outcome.MISSED


class Merging(WithoutMerge):
    """What a user writes; `trouble` is raised where batches of other processes are merged."""

    trouble: Exception | None = None

    def merge(self, other):
        if self.trouble is not None:
            raise self.trouble
        self.right += other.right
        self.all += other.all


@pytest.mark.slow
def test_a_metric_of_the_users_merges(converter, here, always, alone):
    converter.metric = Merging()
    together = converter()
    assert told(together) == told(alone)
    assert len(here.tasks) == WIDTH * 2


def test_what_the_users_merge_raises_comes_through(converter, always):
    converter.metric = Merging()
    converter.metric.trouble = KeyError("no such class")
    with pytest.raises(KeyError, match="no such class"):
        converter()


class BrokenInShares(Merging):
    def update(self, preds, labels):
        super().update(preds, labels)
        if Here.tasks:
            raise KeyError("no such class")


def test_what_the_users_own_code_raises_in_a_share_comes_through(converter, here, always):
    converter.metric = BrokenInShares()
    with pytest.raises(KeyError, match="no such class"):
        converter()
    assert len(here.tasks) == WIDTH
    assert not here.made[0].open


def raising(error):
    def answer(number):
        if number == 4:
            raise error
        return

    return staticmethod(answer)


@pytest.mark.slow
def test_the_time_limit_holds_for_shares(converter, here, always, monkeypatch):
    monkeypatch.setattr(here, "answer", raising(DeadlineExceededError()))
    result = converter()
    assert len(result.trials) == 1
    assert any("time limit" in warning for warning in result.report.warnings)
    assert not here.made[0].open


@pytest.mark.slow
@pytest.mark.parametrize("error", [NotShardableError("of the order"), TuningError("of the order")])
def test_what_turns_out_not_to_be_shared_is_evaluated_whole(
    converter, here, always, monkeypatch, alone, error
):
    monkeypatch.setattr(here, "answer", raising(error))
    result = converter()
    assert told(result) == told(alone)
    assert len(here.tasks) == 2 * WIDTH
    (warning,) = said(result)
    assert warning.endswith(": of the order")
    assert not here.made[0].open


@pytest.mark.slow
def test_what_cannot_be_sent_to_workers_is_evaluated_whole(converter, always, monkeypatch, alone):
    def refuse(load, plan_evaluator, workers):
        raise ConfigurationError("it cannot be copied")

    monkeypatch.setattr(WorkerPayload, "pack_run", refuse)
    result = converter()
    assert told(result) == told(alone)
    (warning,) = said(result)
    assert warning.endswith(": it cannot be copied")
