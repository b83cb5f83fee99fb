"""What evaluates plans outside of the process of a run."""

from __future__ import annotations

import importlib.util
import os
import sys
import time
from collections import Counter
from dataclasses import dataclass
from types import SimpleNamespace

import cloudpickle
import pytest
import torch

from neural_mp import MixedPrecision
from neural_mp.adaptors.onnxrt.adaptor import OnnxRuntimeAdaptor
from neural_mp.adaptors.pytorch.adaptor import PyTorchAdaptor
from neural_mp.core.criterion import DeadlineExceededError
from neural_mp.core.hardware import detect
from neural_mp.core.trial import Outcome
from neural_mp.errors import ConfigurationError, MissingFrameworkError
from neural_mp.tuning.evaluation.plan_evaluator import PlanEvaluation
from neural_mp.tuning.executors import WorkerPayload, read_workers
from neural_mp.tuning.executors.contract import DIED, Workers, _Package
from neural_mp.tuning.executors.local import LocalExecutor, count_possible_processes

# A worker that imported this file would import PyTorch for seconds.
cloudpickle.register_pickle_by_value(sys.modules[__name__])


@dataclass
class Obedient:
    """In place of an plan_evaluator: a plan is a function that is called in the worker."""

    adaptor: type

    @property
    def model(self):
        return SimpleNamespace(adaptor=self.adaptor())

    def __call__(self, plan, deadline):
        return PlanEvaluation(Outcome.MISSED, float(plan())), None


@pytest.fixture
def started():
    executors = []

    def start(adaptor=OnnxRuntimeAdaptor, **setting):
        work = WorkerPayload(adaptor, cloudpickle.dumps(_Package(None, Obedient(adaptor))))
        warnings = []
        executors.append(LocalExecutor(work, Workers(**setting), warnings.append))
        return executors[-1], warnings

    yield start
    for executor in executors:
        executor.close()


def die():
    os._exit(3)


def late():
    time.sleep(1)
    return 1


def soon():
    return 2


@pytest.mark.slow
def test_assessments_come_in_the_order_of_the_round_and_a_death_harms_no_other_plan(started):
    executor, _ = started(count=2)
    arrived = []
    executor.arrived = lambda plan, assessment: arrived.append(plan)
    tickets = [executor.submit(plan, 0.0) for plan in (late, soon, die, soon, late)]
    assessments = [executor.assessment(ticket) for ticket in tickets]
    assert [result.accuracy for result in assessments] == [1, 2, None, 2, 1]
    assert [result.error for result in assessments] == [None, None, DIED, None, None]
    assert assessments[2].outcome is Outcome.FAILED
    assert not any(result.node for result in assessments)  # no name of this machine
    # What is there is told at once, so that it can be kept.
    assert Counter(arrived) == {late: 2, soon: 2, die: 1}


@pytest.mark.slow
def test_processes_share_the_cores(started):
    executor, _ = started(PyTorchAdaptor, count=detect().cores)
    assert executor.threads == 1
    executor, _ = started(PyTorchAdaptor, count=1, threads=3)
    assert executor.assessment(executor.submit(torch.get_num_threads, 0.0)).accuracy == 3


@pytest.mark.slow
def test_what_waits_longer_than_its_time_is_not_begun(started):
    executor, _ = started(count=1)
    first, second = executor.submit(late, 0.0), executor.submit(late, 0.5)
    executor.assessment(first)
    with pytest.raises(DeadlineExceededError):
        executor.assessment(second)


def test_a_billion_workers_are_as_many_as_there_are_cores(started):
    executor, warnings = started(count=10**9)
    assert 1 <= len(list(executor.list_places())) <= detect().cores
    (warning,) = warnings
    assert warning.startswith("workers = 1000000000: this machine has ")


GIGABYTE = 1 << 30


@pytest.mark.parametrize(
    ("setting", "count", "words"),
    [
        ({"count": 4}, 4, ""),
        ({"count": None}, 8, ""),
        ({"count": 9}, 8, "8 cores; 8 processes are used"),
        ({"count": 8, "threads": 4}, 2, "8 cores for 4 threads each; 2 processes are used"),
        ({"count": None, "threads": 16}, 1, ""),
    ],
)
def test_cores_bound_the_processes(setting, count, words):
    processes, reason = count_possible_processes(
        Workers(**setting), cores=8, free=100 * GIGABYTE, each=GIGABYTE
    )
    assert processes == count
    assert reason.endswith(words)
    assert bool(reason) == bool(words)


def test_memory_bounds_the_processes():
    count, reason = count_possible_processes(
        Workers(count=4), cores=8, free=3 * GIGABYTE, each=GIGABYTE
    )
    assert count == 3
    assert "3072 MiB of free memory, and a process needs about 1024 MiB" in reason
    assert count_possible_processes(Workers(count=4), cores=8, free=0, each=GIGABYTE)[0] == 1


def workers(value):
    tuner = MixedPrecision(model=torch.nn.Linear(2, 2))
    tuner.workers = value
    return tuner


@pytest.mark.parametrize(
    ("value", "words"),
    [
        ({"engine": "rai"}, r"no engine 'rai' for workers.*ray"),
        ({"engine": "ray", "adress": "auto"}, r"no key 'adress'.*address"),
        ({"threads": 10**9}, r"workers: threads must be a whole number from 1 to 4096, got 10{9}"),
        ({"count": 0}, r"workers: count must be a whole number from 1 to \d+, got 0"),
        ({"threads": "two"}, r"workers: threads must be a whole number from 1 to 4096, got 'two'"),
        ({"engine": "ray", "address": "ray://10.0.0.1:10001"}, r"address must be .*ray://"),
        ({"engine": "ray", "address": 6379}, r"address must be .* got 6379"),
        ("0", r"workers must be a whole number from 1 to \d+, got 0"),
        ("rai:auto", r"no engine 'rai' for workers.*ray"),
        ("local:10.0.0.1:6379", r"workers of engine 'local' must be given without an address"),
        ("ray:", r"address must be .* got ''"),
    ],
)
def test_a_setting_that_means_nothing_is_named(value, words):
    with pytest.raises(ConfigurationError, match=words):
        workers(value)()


@pytest.mark.parametrize(
    ("word", "value"),
    [
        ("4", 4),
        ("local", {"engine": "local"}),
        ("ray", {"engine": "ray"}),
        ("ray:local", {"engine": "ray", "address": "local"}),
        ("ray:10.0.0.1:6379", {"engine": "ray", "address": "10.0.0.1:6379"}),
    ],
)
def test_a_word_says_what_a_number_or_a_mapping_says(word, value):
    assert read_workers(word) == read_workers(value)


def test_without_ray_it_is_said_how_to_install_it(monkeypatch):
    find = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name: None if name == "ray" else find(name)
    )
    with pytest.raises(MissingFrameworkError, match=r"pip install .*\[ray\]"):
        workers({"engine": "ray"})()


def test_where_processes_share_no_memory_it_is_said_before_anything_is_computed(monkeypatch):
    def read_only(*_, **__):
        raise OSError(30, "Read-only file system")

    monkeypatch.setattr("multiprocessing.synchronize.SemLock.__init__", read_only)
    with pytest.raises(
        ConfigurationError, match=r"workers = 2 requires shared memory.* set workers = 1"
    ):
        workers(2)()


@pytest.mark.parametrize("engine", [["local"], {"local": 1}, 3, None, "lokal"])
def test_what_is_no_name_of_an_engine_is_said(engine):
    with pytest.raises(ConfigurationError, match="there is no engine"):
        read_workers({"engine": engine})
