"""Runs without accuracy check, in which time decides."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest

from neural_mp import MixedPrecision
from neural_mp.core.criterion import Deadline
from neural_mp.core.op_timings import OpTimings
from neural_mp.core.precision import Precision
from neural_mp.core.trial import Outcome
from neural_mp.reporting.tables import verdict_line
from neural_mp.tuning import unchecked
from neural_mp.tuning.measurement import objectives
from neural_mp.tuning.measurement.probe import MeasuringProbe

pytestmark = pytest.mark.usefixtures("quick_runs")
DECIDES = unchecked.decides_by_time


@pytest.fixture
def seconds(monkeypatch) -> dict[str, float]:
    """Seconds of FP32 and of any converted model: no run is timed."""
    durations = {"fp32": 1.0, "converted": 0.5}

    def rounds(runs: Sequence[partial[Any]], **_: object) -> list[list[float]]:
        low = [run.func.conversions.quantize > 0 for run in runs]
        return [[durations["converted" if is_low else "fp32"]] * 20 for is_low in low]

    monkeypatch.setattr(objectives, "time_interleaved_rounds", rounds)
    return durations


@pytest.fixture
def converter(net, digits, seconds, monkeypatch):
    monkeypatch.setattr(unchecked, "decides_by_time", DECIDES)
    tuner = MixedPrecision()
    tuner.model = net
    tuner.precisions = "int8"
    tuner.calib_dataloader = digits[0].loader()
    tuner.cache = False
    return tuner


def counts(result):
    return {str(precision): count for precision, count in result.plan.counts().items()}


def test_a_plan_that_saves_no_time_is_not_the_result(converter, seconds):
    seconds["converted"] = 1.25
    result = converter()
    assert set(counts(result)) == {"fp32"}
    assert result.met is None
    assert result.loaded.conversions.quantize == 0
    assert result.report.latency == result.report.baseline_latency == 1.0
    assert result.report.output_sqnr_db is None
    (warning,) = (warning for warning in result.report.warnings if "as fast as FP32" in warning)
    assert "0.80× (0.80 to 0.80)" in warning
    assert "performance_only" in warning
    assert result.report.best_rejected.outcome is Outcome.SLOW
    assert (
        verdict_line(result.report, result.met) == "No plan is faster; the result is the FP32 model"
    )


@pytest.mark.parametrize("option", ["performance_only", "objective"])
def test_time_does_not_decide_where_all_ops_are_wanted(converter, seconds, option):
    seconds["converted"] = 1.25
    if option == "objective":
        converter.objective = "modelsize"
    else:
        converter.exit_policy = {"performance_only": True}
    result = converter()
    assert set(counts(result)) == {"int8"}
    assert any("every eligible op is converted" in warning for warning in result.report.warnings)


def test_an_op_that_int8_slows_down_stays_float_if_the_whole_model_gains(
    converter, monkeypatch, seconds
):
    timed: list[list[int]] = []

    def times(self: MeasuringProbe) -> OpTimings:
        slow = self.job.space.tunable_ops[0]
        ops = {
            op: {Precision.FP32: 1.0, Precision.INT8: 3.0 if op == slow else 0.2}
            for op in self.job.space.tunable_ops
        }
        return OpTimings(ops, 0.01, 0.0, float(len(ops)))

    def latencies(self: MeasuringProbe, plans: Sequence[Any]) -> list[float]:
        every = len(self.job.space.tunable_ops)
        in_int8 = [plan.counts().get(Precision.INT8, 0) for plan in plans]
        timed.append(in_int8)
        return [every - count + 2.0 * (count == every) for count in in_int8]

    monkeypatch.setattr(MeasuringProbe, "times", times)
    monkeypatch.setattr(MeasuringProbe, "latencies", latencies)
    result = converter()
    every = len(result.plan)
    assert counts(result) == {"int8": every - 1, "fp32": 1}
    assert timed[0] == [every, every - 1]
    assert timed[-1][0] == every - 1
    assert result.report.speedup == pytest.approx(2.0)
    assert result.record.measured.times.ops


def test_ops_that_cannot_be_timed_are_all_converted(converter, monkeypatch):
    def broken(self, inputs, runs):
        raise RuntimeError("no profiler here")

    monkeypatch.setattr("neural_mp.adaptors.loaded_model.LoadedModel.profile_ops", broken)
    assert set(counts(converter())) == {"int8"}


def test_the_choice_costs_a_fraction_of_calibration_and_keeps_the_time_limit(monkeypatch):
    monkeypatch.setattr(unchecked, "_LEAST_SECONDS", 1.5)
    job = SimpleNamespace(measurement=SimpleNamespace(threads=1))
    assert unchecked._compute_choice_allowance(job, 100.0, Deadline()) == pytest.approx(25.0)
    assert unchecked._compute_choice_allowance(job, 0.0, Deadline()) == 1.5
    assert unchecked._compute_choice_allowance(job, 100.0, Deadline(3.0)) <= 3.0


@pytest.mark.parametrize(("profiled", "is_shared"), [(10**12, True), (1, False)])
def test_the_run_by_which_ops_take_too_long_to_time_is_part_of_the_comparison(
    converter, monkeypatch, profiled, is_shared
):
    compared, original = list[Any](), unchecked.compared_with_fp32

    def recorded(*arguments: Any) -> Any:
        compared.append(arguments[4])
        return original(*arguments)

    monkeypatch.setattr(unchecked, "_compute_choice_allowance", lambda *_: 100.0)
    monkeypatch.setattr(unchecked, "BRIEF", replace(unchecked.BRIEF, profiled_runs=profiled))
    monkeypatch.setattr(unchecked, "compared_with_fp32", recorded)
    assert converter().report.output_sqnr_db > 20
    (run,) = compared
    assert (run is not None) is is_shared
