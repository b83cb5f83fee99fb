"""What is measured of plans without the evaluation data."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from still_clock import StillClock

from neural_mp import MixedPrecision
from neural_mp.core.observations import Observations
from neural_mp.core.op_timings import OpTimings
from neural_mp.core.precision import Precision
from neural_mp.strategies.base import Search, Strategy, TuningProblem
from neural_mp.tuning.measurement import probe as probe_module
from neural_mp.tuning.measurement.op_timing import time_ops
from neural_mp.tuning.measurement.probe import MeasuringProbe
from neural_mp.util.noise import compute_mean_nsr

SEEN: dict[str, object] = {}


class Looking(Strategy):
    """Tries one plan, and keeps what the probe says."""

    name = "looking"

    def search(self, problem: TuningProblem) -> Search:
        low = problem.space.fastest_plan()
        probe = problem.probe
        SEEN.update(
            noise=probe.output_noise(low),
            times=probe.times(),
            latencies=probe.latencies([low, problem.space.fp32_plan()]),
            sensitivity=probe.weight_sensitivity(),
            problem=problem,
        )
        yield [low]


@pytest.fixture
def converter(monkeypatch, net, digits, accuracy):
    monkeypatch.setattr(
        "neural_mp.api.config_objects.create_strategy_named", lambda name: Looking()
    )
    SEEN.clear()
    tuner = MixedPrecision()
    tuner.model = net
    tuner.precisions = "int8"
    tuner.metric = accuracy
    tuner.calib_dataloader = digits[0].loader()
    tuner.eval_dataloader = digits[1].loader()
    return tuner


@pytest.mark.slow
def test_the_noise_of_a_plan_is_what_its_model_shows(converter, net, digits):
    result = converter()
    images = digits[0].images[:100]
    with torch.no_grad():
        expected = net(torch.from_numpy(images)).numpy()
    error = result(images) - expected
    assert SEEN["noise"] == pytest.approx((error**2).mean() / (expected**2).mean(), rel=1e-3)


@pytest.fixture
def profiled(monkeypatch):
    """Ops are timed by the profiler of the framework."""
    monkeypatch.setattr(probe_module, "time_ops", time_ops)


@pytest.mark.slow
@pytest.mark.usefixtures("profiled")
def test_every_layer_is_timed_in_both_precisions(converter):
    converter()
    times = SEEN["times"]
    assert set(times.ops) == set(SEEN["problem"].space.tunable_ops)
    assert all(set(by) == {Precision.FP32, Precision.INT8} for by in times.ops.values())
    assert times.conversion is not None


@pytest.mark.slow
def test_plans_are_timed_side_by_side_and_the_report_shows_what_was_measured(converter):
    converter()
    low, fp32 = SEEN["latencies"]
    assert 0 < low < fp32  # by nominal times
    times = SEEN["times"]
    assert all(by[Precision.INT8] < by[Precision.FP32] for by in times.ops.values())
    assert 0 < times.conversion < fp32


@pytest.mark.slow
def test_every_weight_has_a_score(converter):
    converter()
    assert set(SEEN["sensitivity"]) == set(SEEN["problem"].space.tunable_ops)
    assert min(SEEN["sensitivity"].values()) > 0


@pytest.mark.slow
def test_what_was_measured_is_kept_with_the_run(converter, monkeypatch):
    converter()
    expected = dict(SEEN)
    for measured in ("_measure_noise", "_measure_times", "_measure_latencies"):
        monkeypatch.setattr(
            f"neural_mp.tuning.measurement.probe.MeasuringProbe.{measured}",
            lambda *_: pytest.fail("measured again"),
        )
    converter.resume = True
    converter()
    for what in ("noise", "times", "latencies", "sensitivity"):
        assert SEEN[what] == expected[what]


@pytest.mark.slow
def test_once_the_time_is_spent_nothing_is_measured(converter, monkeypatch):
    monkeypatch.setattr("neural_mp.tuning.tuner.measurement_allowance", lambda *_: 0.0)
    converter()
    assert SEEN["noise"] is None
    assert SEEN["latencies"] is None
    assert not SEEN["times"].ops


@pytest.mark.slow
def test_a_report_says_that_ops_were_not_timed_and_why(converter, monkeypatch):
    monkeypatch.setattr("neural_mp.tuning.tuner.measurement_allowance", lambda *_: 1e-9)
    result = converter()
    (warning,) = (w for w in result.report.warnings if "not all ops were timed" in w)
    assert "time limit does not suffice" in warning
    converter.resume = True
    assert warning in converter().report.warnings


@pytest.mark.slow
@pytest.mark.usefixtures("profiled")
def test_an_op_that_cannot_be_timed_is_said_with_its_error(converter, monkeypatch):
    def broken(self, inputs, runs):
        raise RuntimeError("no profiler here")

    monkeypatch.setattr("neural_mp.adaptors.loaded_model.LoadedModel.profile_ops", broken)
    warnings = [warning for warning in converter().report.warnings if "no profiler here" in warning]
    assert warnings[0].endswith("timed: RuntimeError: no profiler here")


@pytest.mark.slow
def test_a_run_in_which_all_ops_are_timed_says_nothing_of_it(converter):
    assert not [warning for warning in converter().report.warnings if "timed" in warning]


@pytest.fixture
def clock(monkeypatch):
    """The clock of the probe, on which seconds pass as tests say."""
    clock = StillClock()
    clock.keep_time_of(monkeypatch, probe_module)
    return clock


@pytest.mark.slow
def test_a_busy_machine_takes_nothing_away_from_what_is_measured(converter, clock, monkeypatch):
    """Every measurement waits, as it does where others run: longer in all than may be spent."""
    real, process = MeasuringProbe._converted_or_none, StillClock()

    def waiting(self, plan):
        clock.sleep(0.5)
        return real(self, plan)

    monkeypatch.setattr(clock, "process_time", process.process_time)
    monkeypatch.setattr("neural_mp.tuning.tuner.measurement_allowance", lambda *_: 1.4)
    monkeypatch.setattr(MeasuringProbe, "_converted_or_none", waiting)
    monkeypatch.setattr(MeasuringProbe, "times", lambda self: OpTimings())
    converter()
    assert SEEN["noise"] is not None
    assert SEEN["latencies"] is not None


@pytest.mark.slow
def test_no_more_than_one_measurement_ends_late(converter, clock, monkeypatch):
    """The first may take what it takes; by its length it is known that the next will not end."""
    plans = []

    def slow(self, plan, *_):
        clock.sleep(0.3)
        plans.append(plan)

    monkeypatch.setattr("neural_mp.tuning.tuner.measurement_allowance", lambda *_: 0.5)
    monkeypatch.setattr(MeasuringProbe, "_converted_or_none", slow)
    monkeypatch.setattr(MeasuringProbe, "_outputs_or_none", slow)
    converter()
    assert len(plans) == 1
    assert SEEN["latencies"] is None


class LookingLate(Looking):
    """Asks for noise after all the time for times is spent."""

    def search(self, problem):
        low = problem.space.fastest_plan()
        problem.probe.latencies([low])
        SEEN.update(noise=problem.probe.output_noise(low))
        yield [low]


@pytest.mark.slow
def test_noise_is_measured_however_long_the_times_of_ops_took(converter, clock, monkeypatch):
    """A plan that misses its target narrowly needs another calibration, not fewer INT8 ops."""
    monkeypatch.setattr(
        "neural_mp.api.config_objects.create_strategy_named", lambda name: LookingLate()
    )
    monkeypatch.setattr("neural_mp.tuning.tuner.measurement_allowance", lambda *_: 0.5)
    real = MeasuringProbe._measure_latencies

    def slow(self, plans):
        clock.sleep(1.0)
        return real(self, plans)

    monkeypatch.setattr(MeasuringProbe, "_measure_latencies", slow)
    converter()
    assert SEEN["noise"] is not None


def test_relative_noise_counts_every_output_alike_and_nan_as_useless():
    large, small = np.full(10, 1000.0), np.full(10, 1.0)
    off = [large + 10, small + 0.5]
    assert compute_mean_nsr([large, small], off) == pytest.approx((1e-4 + 0.25) / 2)
    assert compute_mean_nsr([small], [np.full(10, np.nan)]) == 1e9
    assert compute_mean_nsr([np.zeros(3)], [np.zeros(3)]) == 0.0


def test_observations_survive_being_sent_to_another_process():
    import pickle

    observations = Observations({"x": {"minmax": (0.0, 1.0)}}, {"x": 0.5}, 3, elements={"x": 64.0})
    assert pickle.loads(pickle.dumps(observations)) == observations
