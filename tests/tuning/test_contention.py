"""Latencies while other processes use the CPUs."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from contextlib import nullcontext
from dataclasses import dataclass, replace
from types import SimpleNamespace

import numpy as np
import pytest
from still_clock import StillClock

from neural_mp.profiling import measure_cpu_share, read_other_cpu_seconds
from neural_mp.profiling import measurement as timing
from neural_mp.tuning.measurement import objectives
from neural_mp.tuning.measurement.objectives import Contention, Measurement

#: Seconds of a wait.
SECONDS = 0.003
#: Measurements of the share of a CPU, in one of which the other process runs, too.
TRIES = 20


class Clocks(StillClock):
    """A clock that shows all seconds, and one of the CPU, which shows those of computing."""

    computed = 0.0

    def process_time(self):
        return self.computed

    def compute(self, seconds):
        self.computed += seconds
        self.now += seconds


@dataclass
class Model:
    """A model that waits, as behind another process, and computes."""

    clocks: Clocks
    waiting: float = SECONDS
    computing: float = 0.0

    adaptor = SimpleNamespace(framework="waiting", threads=lambda count: nullcontext())

    def __call__(self, inputs):
        self.clocks.sleep(self.waiting)
        self.clocks.compute(self.computing)


@pytest.fixture
def clocks(monkeypatch):
    clocks = Clocks()
    clocks.keep_time_of(monkeypatch, timing, objectives)
    monkeypatch.setattr(objectives, "time_interleaved_rounds", timing.time_interleaved_rounds)
    return clocks


@pytest.fixture
def measured(monkeypatch, clocks):
    """Seconds of a model that waits and computes, by the threads, callers and share of a CPU."""

    def measure(share, **options):
        monkeypatch.setattr(objectives, "measure_cpu_share", lambda: share)
        measurement = Measurement(np.zeros((2, 1)), warmup=1, iterations=3, time_limit=0.1)
        measurement = replace(measurement, **options)
        (seconds,) = measurement.measure_interleaved([Model(clocks, computing=SECONDS)])
        return max(seconds), measurement.contention.was_seen

    return measure


def test_one_thread_is_timed_in_cpu_seconds_on_a_busy_machine(measured):
    seconds, was_seen = measured(0.4, threads=1)
    assert seconds == pytest.approx(SECONDS)
    assert was_seen


@pytest.mark.parametrize(
    ("share", "options"),
    [(0.99, {"threads": 1}), (0.4, {"threads": 2})],
    ids=["idle machine", "threads that wait for each other"],
)
def test_other_runs_are_timed_by_the_wall_clock(measured, share, options):
    seconds, was_seen = measured(share, **options)
    assert seconds == pytest.approx(2 * SECONDS)
    assert not was_seen


def test_a_cpu_is_shared_with_other_processes():
    cpus = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {min(cpus)})  # of this thread, and of the process that it starts
    command = [sys.executable, "-c", "print(flush=True)\nwhile True: pass"]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as process:
        try:
            assert process.stdout.readline()
            share = min(measure_cpu_share() for _ in range(TRIES))
        finally:
            process.kill()
            os.sched_setaffinity(0, cpus)
    assert share < 0.8


def test_concurrent_callers_are_timed_by_the_wall_clock(monkeypatch):
    monkeypatch.setattr(objectives, "measure_cpu_share", lambda: 0.4)
    inputs = np.zeros((2, 1))
    assert Measurement(inputs, threads=1).uses_cpu_seconds
    assert not Measurement(inputs, threads=1, streams=2).uses_cpu_seconds


def test_earlier_rounds_by_the_wall_clock_are_not_mixed_with_cpu_seconds(clocks, monkeypatch):
    monkeypatch.setattr(objectives, "measure_cpu_share", lambda: 0.4)
    measurement = Measurement(np.zeros((2, 1)), warmup=1, iterations=3, time_limit=0.1, threads=1)
    models = [Model(clocks, computing=SECONDS) for _ in range(2)]
    rounds = measurement.measure_rounds(models, earlier=[[9.0], [9.0]])
    assert max(map(max, rounds)) == pytest.approx(SECONDS)


@pytest.mark.parametrize(
    ("load", "delayed"), [(0.0, False), (0.5, False), (1.5, True)], ids=["idle", "half", "busy"]
)
def test_threads_that_wait_for_a_cpu_are_named_in_a_warning(monkeypatch, clocks, load, delayed):
    """Two threads on two cores, of which others take a part."""
    monkeypatch.setattr(objectives, "read_other_cpu_seconds", lambda: load * clocks.now)
    monkeypatch.setattr(objectives, "detect", lambda: SimpleNamespace(cores=2 + (load == 0.5)))
    measurement = Measurement(np.zeros((2, 1)), warmup=1, iterations=100, time_limit=9.0, threads=2)
    measurement.measure_interleaved([Model(clocks)])
    assert measurement.contention.delays_threads is delayed
    warnings = measurement.contention.contention_warnings
    assert len(warnings) == delayed
    assert all("compare the CPU times" in warning for warning in warnings)


def test_the_cpu_time_of_other_processes_is_counted_without_that_of_this_process():
    own, others, started = time.process_time(), read_other_cpu_seconds(), os.times()
    command = [sys.executable, "-c", "sum(range(60_000_000))"]
    subprocess.run(command, check=True)
    while time.process_time() - own < 0.3:
        pass
    used = read_other_cpu_seconds() - others
    children = os.times().children_user - started.children_user
    assert children > 0.2
    assert used >= 0.8 * children


def test_cpu_seconds_leave_out_waiting(clocks):
    models = [Model(clocks), Model(clocks, computing=2 * SECONDS)]
    assert Measurement(np.zeros((2, 1))).count_cpu_seconds(models) == pytest.approx(
        [0.0, 2 * SECONDS]
    )


def test_a_warning_follows_a_measurement_beside_other_processes(monkeypatch):
    contention = Contention()
    monkeypatch.setattr(objectives, "measure_cpu_share", lambda: 0.99)
    assert not contention.is_present()
    assert contention.contention_warnings == ()
    contention = Contention()
    monkeypatch.setattr(objectives, "measure_cpu_share", lambda: 0.4)
    assert contention.is_present()
    (warning,) = contention.contention_warnings
    assert "CPU seconds of one thread" in warning
