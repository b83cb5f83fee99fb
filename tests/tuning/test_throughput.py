"""The throughput of concurrent calls as the objective."""

from __future__ import annotations

import threading
from contextlib import contextmanager
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from still_clock import StillClock

from neural_mp import MixedPrecision, load
from neural_mp.core.criterion import is_throughput, parse_objectives
from neural_mp.core.enums import Objective
from neural_mp.errors import ConfigurationError
from neural_mp.profiling import measurement as timing
from neural_mp.reporting import formatting
from neural_mp.runs.report import Report
from neural_mp.tuning.measurement import objectives
from neural_mp.tuning.measurement.objectives import Measurement

SECONDS = 0.01


class Server:
    """A model that takes time by a clock, and records the threads of each call.

    Calls in threads of their own end together, once as many run at a time as there are callers.
    """

    def __init__(self, clock, callers=4, divides_threads=False):
        self.clock, self.threads = clock, []
        self.together = threading.Barrier(callers, self.take_time, timeout=600)
        self.adaptor = SimpleNamespace(
            framework="slow",
            threads=self._limited,
            offers=lambda method: divides_threads and method == "with_streams",
        )

    @contextmanager
    def _limited(self, count):
        self.threads.append(count)
        yield

    def take_time(self):
        self.clock.sleep(SECONDS)

    def __call__(self, inputs):
        if threading.current_thread() is threading.main_thread():
            self.take_time()
        else:
            self.together.wait()


def measurement(streams):
    return Measurement(
        np.zeros((2, 1)), warmup=1, iterations=8, time_limit=0.4, threads=8, streams=streams
    )


@pytest.fixture
def clock(monkeypatch):
    clock = StillClock()
    clock.keep_time_of(monkeypatch, timing)
    monkeypatch.setattr(objectives, "time_interleaved_rounds", timing.time_interleaved_rounds)
    return clock


def test_calls_run_at_a_time_and_share_the_threads(clock):
    model = Server(clock)
    (seconds,) = measurement(4).measure_interleaved([model])
    assert model.threads == [2]
    assert seconds == pytest.approx([SECONDS / 4] * len(seconds))


def test_a_runtime_that_divides_its_threads_gets_all_of_them(clock):
    model = Server(clock, divides_threads=True)
    measurement(4).measure_interleaved([model])
    assert model.threads == [8]


def test_latency_is_that_of_one_call(clock):
    model = Server(clock)
    (seconds,) = measurement(None).measure_interleaved([model])
    assert model.threads == [8]
    assert seconds == pytest.approx([SECONDS] * len(seconds))


@pytest.mark.parametrize("name", ["latency", "performance", "throughput"])
def test_time_has_three_names(name):
    assert parse_objectives(name) == {Objective.PERFORMANCE: 1.0}
    weighted = {name: 3, "modelsize": 1}
    assert parse_objectives(weighted) == {Objective.PERFORMANCE: 0.75, Objective.MODELSIZE: 0.25}
    assert is_throughput(name) is is_throughput(weighted) is (name == "throughput")


def test_one_of_latency_and_throughput_is_minimized():
    with pytest.raises(ConfigurationError, match="latency and throughput; remove"):
        parse_objectives({"latency": 1, "throughput": 1})
    with pytest.raises(ConfigurationError, match="did you mean 'throughput'"):
        parse_objectives("troughput")


def test_a_report_states_samples_per_second():
    report = Report(batch_size=8, streams=2, baseline_latency=0.02, latency=0.005)
    assert report.throughput == pytest.approx(1600)
    assert formatting.time_of(report) == (
        "throughput, batch of 8, 2 streams",
        "400 samples/s",
        "1600 samples/s",
    )
    stored = report.to_dict()
    assert stored["baseline_throughput"] == pytest.approx(400)
    assert Report.from_dict(stored) == report
    assert formatting.time_of(Report(batch_size=8, latency=0.005))[0] == "latency, batch of 8"


@pytest.mark.slow
def test_a_result_in_openvino_is_compiled_for_its_streams_and_reloaded_so(
    net, digits, tmp_path, quick_runs
):
    images = torch.from_numpy(digits[0].images[:64])
    converter = MixedPrecision(
        {"evaluation": {"performance": {"streams": 3, "cores_per_instance": 3}}},
        model=net,
        runtime="openvino",
        objective="throughput",
        precisions="int8",
        calib_dataloader=[images],
        cache=False,
    )
    result = converter()
    assert result.report.streams == 3
    assert result.held.streams == 3
    result.save(tmp_path / "saved")
    served = load(tmp_path / "saved")
    assert served.held.streams == 3
    assert served.report.streams == 3
    expected = served(images)
    results = [None] * 4

    def call(index):
        results[index] = served(images)

    callers = [threading.Thread(target=call, args=(index,)) for index in range(len(results))]
    for caller in callers:
        caller.start()
    for caller in callers:
        caller.join()
    assert all(torch.equal(outputs, expected) for outputs in results)
