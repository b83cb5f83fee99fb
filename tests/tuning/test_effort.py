"""The promise of each effort: seconds after calibration, and those of measurements."""

from __future__ import annotations

import io
import math
from contextlib import nullcontext
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
from quick_runs import load_once
from rich.console import Console
from still_clock import StillClock

from neural_mp import ExitPolicy, MixedPrecision
from neural_mp.adaptors.loaded_model import LoadedModel
from neural_mp.api import job_builder
from neural_mp.config import settings_from
from neural_mp.core import criterion
from neural_mp.core.criterion import EFFORT_LIMITS, Effort
from neural_mp.errors import ConfigurationError
from neural_mp.profiling import measurement as timing
from neural_mp.reporting import LiveListener
from neural_mp.reporting.tables import result_tables
from neural_mp.testing import Accuracy
from neural_mp.tuning import listener, trial_runner, unchecked
from neural_mp.tuning.evaluation import plan_evaluator
from neural_mp.tuning.listener import Listener
from neural_mp.tuning.measurement import objectives, probe
from neural_mp.tuning.measurement.objectives import Measurement

BATCH_SECONDS = 0.05
DECIDES = unchecked.decides_by_time


class SlowAccuracy(Accuracy):
    """A metric that takes long by a clock, and records when each batch began."""

    def __init__(self, clock: StillClock) -> None:
        super().__init__()
        self.clock = clock
        self.begun: list[float] = []

    def update(self, preds, labels) -> None:
        self.begun.append(self.clock.now)
        self.clock.sleep(BATCH_SECONDS)
        super().update(preds, labels)


class Announcements(Listener):
    """Limits that were announced, with the time of each."""

    def __init__(self, clock: StillClock) -> None:
        self.clock = clock
        self.limits: list[tuple[float, str, float]] = []

    def limit(self, seconds: float, effort: str) -> None:
        self.limits.append((seconds, effort, self.clock.now))


@pytest.fixture
def clock(monkeypatch) -> StillClock:
    """The clock of a run, on which only batches of the metric take time."""
    clock = StillClock()
    modules = (criterion, listener, plan_evaluator, trial_runner, probe)
    clock.keep_time_of(monkeypatch, *modules)
    return clock


@pytest.fixture
def converter(hostile_net, digits, clock):
    tuner = MixedPrecision()
    tuner.model = hostile_net
    tuner.precisions = "int8"
    tuner.strategy = "basic"  # whose trials on this net are many
    tuner.objective = "modelsize"
    tuner.metric = SlowAccuracy(clock)
    tuner.eval_dataloader = digits[1].loader(100)
    tuner.cache = False
    tuner.listener = Announcements(clock)
    return tuner


@pytest.fixture
def without_extra_seconds(monkeypatch):
    """The ten seconds that every quick run may take would be most of a test."""
    limits = dict(EFFORT_LIMITS)
    for effort in (Effort.QUICK, Effort.NORMAL):
        limits[effort] = replace(limits[effort], extra_seconds=0.0)
    monkeypatch.setattr(job_builder, "EFFORT_LIMITS", limits)


@pytest.mark.parametrize(
    ("effort", "seconds"),
    [(Effort.QUICK, 3 * 2 + 10), (Effort.NORMAL, 30 * 2 + 300), (Effort.THOROUGH, 0)],
)
def test_the_limit_follows_from_the_seconds_of_calibration_and_evaluation(effort, seconds):
    deadline = EFFORT_LIMITS[effort].start_deadline(2.0)
    assert deadline.seconds == seconds
    assert math.isinf(deadline.end_time) == (effort is Effort.THOROUGH)


@pytest.mark.slow
def test_a_quick_search_ends_at_its_limit_within_a_batch(converter, without_extra_seconds):
    converter.effort = "quick"
    result = converter()
    report, ((seconds, effort, announced),) = result.report, converter.listener.limits
    known = report.seconds["calibrate"] + report.seconds["baseline"]
    assert seconds == math.ceil(3 * known)
    assert seconds == report.effort_seconds
    assert effort == "quick"
    begun = converter.metric.begun
    assert sum(start > announced + seconds for start in begun) <= 1
    assert begun[-1] > announced
    (warning,) = (text for text in report.warnings if "the search stopped" in text)
    assert f"{seconds:g} s of effort 'quick'; set effort to 'normal'" in warning
    assert result(converter.eval_dataloader.dataset[0][0][None]).shape == (1, 10)


@pytest.mark.slow
def test_the_best_plan_so_far_is_the_result(converter, without_extra_seconds):
    converter.effort = "quick"
    converter.accuracy_criterion = {"absolute": 0.9, "any_tolerance": True}
    report = converter().report
    assert report.effort_seconds is not None
    assert report.size < report.baseline_size


@pytest.mark.slow
def test_a_thorough_search_has_no_limit(converter, without_extra_seconds):
    converter.effort, converter.exit_policy = "thorough", ExitPolicy(max_trials=1)
    report = converter().report
    assert converter.listener.limits == []
    assert report.effort_seconds is None


@pytest.mark.slow
def test_a_smaller_timeout_ends_the_run_earlier(converter):
    converter.effort, converter.exit_policy = "quick", ExitPolicy(timeout=1.5)
    report = converter().report
    assert converter.listener.limits == []
    assert report.effort_seconds is None
    assert any("the time limit of 1.5 s; set a longer timeout" in text for text in report.warnings)


def test_only_an_effort_that_is_set_limits_a_run_and_a_timeout_replaces_that_of_normal():
    def multiple(**options) -> float:
        return job_builder.make_effort_limits(MixedPrecision(**options)).multiple

    assert math.isinf(multiple())
    assert multiple(effort="normal") == 30
    assert math.isinf(multiple(exit_policy={"timeout": 7200}))
    assert math.isinf(multiple(exit_policy={"timeout": 7200}, effort="normal"))
    assert multiple(exit_policy={"timeout": 7200}, effort="quick") == 3


def test_without_a_metric_the_seconds_of_loading_count(net, digits, clock, monkeypatch):
    def load(*arguments, **options):
        clock.sleep(7)
        return load_once(*arguments, **options)

    monkeypatch.setattr(job_builder, "load_source", load)
    converter = MixedPrecision(model=net, calib_dataloader=digits[0].loader(), effort="quick")
    converter.precisions, converter.cache = "int8", False
    report = converter().report
    assert (report.seconds["calibrate"], report.seconds["load"]) == (0, 7)
    assert report.effort_seconds == 3 * 7 + 10


@pytest.mark.slow
def test_a_slow_model_without_a_metric_gets_no_optional_measurements(
    net, digits, without_extra_seconds, clock, monkeypatch
):
    """INT8 gains nothing here; FP32 in other kernels might, but the limit passed."""
    call = LoadedModel.__call__

    def slow(self: LoadedModel, inputs: object) -> object:
        clock.sleep(0.3)
        return call(self, inputs)

    def rounds(runs, **_: object) -> list[list[float]]:
        return [[1.0 + (run.func.conversions.quantize > 0)] * 20 for run in runs]

    monkeypatch.setattr(unchecked, "decides_by_time", DECIDES)
    monkeypatch.setattr(objectives, "time_interleaved_rounds", rounds)
    monkeypatch.setattr(LoadedModel, "__call__", slow)
    limits = job_builder.EFFORT_LIMITS[Effort.QUICK]
    job_builder.EFFORT_LIMITS[Effort.QUICK] = replace(limits, multiple=0.0, extra_seconds=0.5)
    converter = MixedPrecision(model=net, calib_dataloader=digits[0].loader(50), effort="quick")
    converter.precisions, converter.cache = "int8", False
    report = converter().report
    assert report.effort_seconds == 1
    assert "kernels" not in report.seconds
    (warning,) = (text for text in report.warnings if "FP32 kernels were not timed" in text)
    assert "the time limit of 1 s of effort 'quick' passed; set effort to 'normal'" in warning


class Slow:
    """A model of whole seconds by a clock of its own."""

    def __init__(self, seconds: float) -> None:
        self.seconds, self.runs, self.now = seconds, 0, 0.0
        self.adaptor = SimpleNamespace(
            framework="slow", threads=lambda count: nullcontext(), offers=lambda method: False
        )

    def __call__(self, inputs: object) -> None:
        self.runs += 1
        self.now += self.seconds

    def perf_counter(self) -> float:
        return self.now


@pytest.fixture
def runs_of(monkeypatch):
    """Function: the measured runs of a model of so many seconds, decided never, by an effort."""

    def count(effort: Effort, seconds: float, decides=None) -> int:
        model = Slow(seconds)
        monkeypatch.setattr(timing, "time", model)
        monkeypatch.setattr(objectives, "time_interleaved_rounds", timing.time_interleaved_rounds)
        measurement = Measurement(np.zeros((2, 1)), warmup=0, limits=EFFORT_LIMITS[effort])
        (rounds,) = measurement.measure_interleaved([model], decides)
        assert len(rounds) == model.runs
        return model.runs

    return count


@pytest.mark.parametrize(
    ("effort", "limit"), [(Effort.QUICK, 1.25), (Effort.NORMAL, 5), (Effort.THOROUGH, 10)]
)
def test_the_time_limit_of_measurements(runs_of, effort, limit):
    assert runs_of(effort, 0.25) == pytest.approx(limit / 0.25, abs=1)


def test_thorough_measurements_of_fast_models_are_twice_as_long(runs_of):
    assert runs_of(Effort.THOROUGH, 0.01) == 2 * runs_of(Effort.NORMAL, 0.01)


@pytest.mark.parametrize(
    ("effort", "limit"), [(Effort.QUICK, 1.25), (Effort.NORMAL, 6 * 5), (Effort.THOROUGH, 6 * 10)]
)
def test_the_patience_of_a_measurement_that_never_decides(runs_of, effort, limit):
    runs = runs_of(effort, 0.25, lambda rounds: False)
    assert runs == pytest.approx(limit / 0.25, abs=1)


def test_the_limit_is_printed_before_the_search():
    screen = io.StringIO()
    LiveListener(Console(file=screen, width=100)).limit(38.2, "quick")
    assert screen.getvalue().strip() == "effort quick: at most 38.2 s from here"


@pytest.mark.slow
def test_the_limit_stands_in_the_report(converter):
    converter.effort = "normal"
    converter.exit_policy = ExitPolicy(max_trials=1)
    result = converter()
    seconds = result.report.effort_seconds
    assert seconds > 300
    screen = io.StringIO()
    Console(file=screen, width=400).print(result_tables(result.report, result.met))
    assert f"by the effort, at most {seconds:.3g} s after calibration" in screen.getvalue()
    assert type(result.report).from_dict(result.report.to_dict()).effort_seconds == seconds


def test_an_unknown_effort_is_an_error(net, digits):
    with pytest.raises(ConfigurationError, match="effort cannot be 'quik'.*'quick'"):
        MixedPrecision(model=net, eval_dataloader=digits[1].loader(), effort="quik")()
    with pytest.raises(ConfigurationError, match=r"tuning\.effort"):
        settings_from({"tuning": {"effort": "quik"}})
