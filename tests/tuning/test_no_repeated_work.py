"""Work that one call makes once: conversions, questions to a runtime, rounds of slow models."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from contextlib import nullcontext
from functools import partial
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from neural_mp import MixedPrecision
from neural_mp.adaptors.contract import Adaptor
from neural_mp.adaptors.loaded_model import AnyTunableModel, LoadedModel
from neural_mp.adaptors.registry import get_adaptor_named
from neural_mp.core.hardware import detect
from neural_mp.core.precision import Precision
from neural_mp.profiling import measurement as timing
from neural_mp.profiling import time_interleaved_rounds
from neural_mp.space import ResolvedPlan
from neural_mp.tuning import recording
from neural_mp.tuning.measurement import objectives, probe
from neural_mp.tuning.measurement.objectives import Measurement
from neural_mp.tuning.measurement.op_timing import time_ops


@pytest.fixture
def calibrated(net, digits) -> AnyTunableModel:
    adaptor = get_adaptor_named("pytorch")
    loaded = LoadedModel(adaptor, adaptor.load(net, example=digits[0].images[:8]))
    space = loaded.whole_space(detect()).restricted_to([Precision.INT8])
    return loaded.in_space(space).with_calibration([digits[0].images[:8]])


def all_int8(model: AnyTunableModel) -> ResolvedPlan:
    return model.space.resolve(model.space.fastest_plan())


def test_a_plan_in_use_is_not_converted_again(calibrated, digits):
    plan = all_int8(calibrated)
    first = calibrated.convert_by_plan(plan)
    assert calibrated.convert_by_plan(plan) is first
    images = digits[0].images[:8]
    expected = first(images)
    del first
    np.testing.assert_array_equal(calibrated.convert_by_plan(plan)(images), expected)


def test_a_model_calibrated_on_other_data_is_converted_anew(calibrated, digits):
    other = calibrated.with_calibration([10 * digits[0].images[:8]])
    plan = all_int8(calibrated)
    assert other.convert_by_plan(plan) is not calibrated.convert_by_plan(plan)


def test_a_runtime_is_asked_for_its_kernels_once(net, digits, monkeypatch):
    adaptor = get_adaptor_named("pytorch")
    loaded = LoadedModel(adaptor, adaptor.load(net, example=digits[0].images[:8]))
    asked: list[Any] = []
    space = Adaptor.space

    def recorded(self: Adaptor[Any], model: Any, *arguments: Any) -> Any:
        asked.append(model)
        return space(self, model, *arguments)

    monkeypatch.setattr(Adaptor, "space", recorded)
    assert loaded.whole_space(detect()) is loaded.whole_space(detect())
    assert asked == [loaded.held]


@pytest.mark.slow
def test_no_tried_plan_is_converted_twice_in_a_search(net, digits, accuracy, monkeypatch):
    """First plans are timed, one of them is tried, and the result is the model of its trial.

    By a clock on which any model with INT8 takes half the time of FP32.
    """
    made: list[ResolvedPlan] = []
    convert = Adaptor.convert

    def recorded(self: Adaptor[Any], model: Any, plan: ResolvedPlan, *rest: Any) -> Any:
        made.append(plan)
        return convert(self, model, plan, *rest)

    def rounds(runs: Sequence[partial[Any]], **_: object) -> list[list[float]]:
        return [[2.0 - (run.func.conversions.quantize > 0)] * 20 for run in runs]

    monkeypatch.setattr(objectives, "time_interleaved_rounds", rounds)
    monkeypatch.setattr(Adaptor, "convert", recorded)
    tuner = MixedPrecision(model=net, metric=accuracy, cache=False)
    tuner.calib_dataloader, tuner.eval_dataloader = digits[0].loader(), digits[1].loader()
    result = tuner()
    assert result.met
    converted = Counter(plan.plan for plan in made)
    assert len(converted) > len(result.trials) > 0
    assert {converted[trial.plan] for trial in result.trials} == {1}


@pytest.mark.slow
def test_the_ops_of_fp32_are_not_timed_again_for_the_report(net, digits, accuracy, monkeypatch):
    profiled: list[Any] = []
    profile = recording._profile_ops

    def recorded(job: Any, model: Any, *arguments: Any) -> Any:
        profiled.append(model.held)
        return profile(job, model, *arguments)

    monkeypatch.setattr(recording, "_profile_ops", recorded)
    monkeypatch.setattr(probe, "time_ops", time_ops)  # not by nominal times
    tuner = MixedPrecision(model=net, metric=accuracy, cache=False)
    tuner.calib_dataloader, tuner.eval_dataloader = digits[0].loader(), digits[1].loader()
    result = tuner()
    assert result.met
    assert profiled == [result.held]
    shown = result.record.ending.baseline_times
    assert min(shown[op] for op in result.plan) > 0


class Timed:
    """A model of so many seconds by a clock of its own."""

    def __init__(self, clock: SimpleNamespace, seconds: float) -> None:
        self.clock, self.seconds, self.runs = clock, seconds, 0
        self.adaptor = SimpleNamespace(
            framework="timed", threads=lambda count: nullcontext(), offers=lambda method: False
        )

    def __call__(self, inputs: object) -> None:
        self.runs += 1
        self.clock.now += self.seconds


@pytest.fixture
def clock(monkeypatch) -> SimpleNamespace:
    fake = SimpleNamespace(now=0.0)
    fake.perf_counter = lambda: fake.now
    monkeypatch.setattr(timing, "time", fake)
    monkeypatch.setattr(objectives, "time_interleaved_rounds", time_interleaved_rounds)
    monkeypatch.setattr(Measurement, "uses_cpu_seconds", False)
    return fake


def test_a_runtime_that_is_surely_slower_gets_no_further_rounds(clock):
    """Four rounds of at least a second: fewer may be slowed by chance."""
    measurement = Measurement(None, time_limit=100.0)
    slow, near, fast = (Timed(clock, seconds) for seconds in (0.9, 0.21, 0.2))
    rounds: Any = measurement.measure_interleaved([slow, near, fast], is_warm=True)  # type: ignore[list-item]
    assert [len(seconds) for seconds in rounds] == [4, 30, 30]
    assert slow.runs == 1 + 4  # a warm-up


def test_a_plan_far_faster_than_fp32_takes_as_few_rounds_as_are_sure(clock):
    fp32, plan, slower = (Timed(clock, seconds) for seconds in (0.9, 0.3, 0.6))
    measurement = Measurement(None, time_limit=100.0)
    rounds: Any = measurement.measure_rounds([fp32, plan])  # type: ignore[list-item]
    assert [len(seconds) for seconds in rounds] == [4, 4]
    rounds = measurement.measure_until_decided([fp32, slower, plan])  # type: ignore[list-item]
    assert [len(seconds) for seconds in rounds] == [4, 4, 4]


@pytest.mark.parametrize(
    ("seconds", "count"),
    [([0.02, 0.021], 30), ([0.02, 0.02], 30), ([0.02, 0.021, 0.05], 30), ([0.02, 0.04], 9)],
    ids=["slower", "equal", "three", "far slower"],
)
def test_plans_whose_order_is_certain_take_no_more_than_the_usual_rounds(clock, seconds, count):
    models = [Timed(clock, each) for each in seconds]
    latencies = Measurement(None, warmup=0).side_by_side(models, longer=4)  # type: ignore[arg-type]
    assert latencies == pytest.approx(seconds)
    assert max(model.runs for model in models) == count


def test_plans_whose_order_is_uncertain_take_more_rounds(clock):
    draw = np.random.default_rng(0)

    class Noisy(Timed):
        def __call__(self, inputs: object) -> None:
            self.runs += 1
            self.clock.now += self.seconds * draw.uniform(1, 1.2)

    models = [Noisy(clock, 0.02), Noisy(clock, 0.0201)]
    Measurement(None, warmup=0).side_by_side(models, longer=4)  # type: ignore[arg-type]
    assert 60 < models[0].runs <= 120


def test_slow_models_are_warmed_up_for_a_part_of_a_second(clock):
    """Two runs each, or more of short ones, up to the number that is set."""
    rounds = {}
    for seconds in (0.2, 0.05, 0.01):
        model = Timed(clock, seconds)
        (timed,) = time_interleaved_rounds([partial(model, None)], warmup=5, iterations=3)
        rounds[seconds] = model.runs - len(timed)
    assert rounds == {0.2: 2, 0.05: 5, 0.01: 5}
    models = [Timed(clock, 0.05) for _ in range(2)]
    time_interleaved_rounds([partial(model, None) for model in models], warmup=5, iterations=3)
    assert [model.runs - 3 for model in models] == [3, 3]


def test_models_of_short_runs_keep_all_rounds(clock):
    """States of the machine last longer than four short runs."""
    short, shorter = Timed(clock, 0.01), Timed(clock, 0.003)
    rounds: Any = Measurement(None).measure_interleaved([short, shorter])  # type: ignore[list-item]
    assert [len(seconds) for seconds in rounds] == [30, 30]
