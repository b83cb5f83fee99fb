"""Seconds of ops, from profiles of whole models."""

from __future__ import annotations

import sys
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

sys.path.insert(0, str(Path(__file__).parent.parent / "strategies"))
from made_up import chain

from neural_mp.core.graph import OpGraph
from neural_mp.core.op_timings import MAX_GAIN, Duration, OpTimings
from neural_mp.core.plan import PrecisionPlan
from neural_mp.core.precision import FP32, Precision
from neural_mp.search.cost_model import CostInputs, predict_plan_time
from neural_mp.tuning.measurement.op_timing import (
    combine_op_timings,
    loses_in_int8,
    scale_runs,
    time_ops,
    weights_in_int8,
    with_conversions,
)

SPACE = chain(3)
COUNTS = SimpleNamespace(casts=0, quantize=1, dequantize=1)


def plan_in(precision):
    return SPACE.resolve(
        PrecisionPlan({op: SPACE.choice(op, precision) or FP32 for op in SPACE.tunable_ops})
    )


@dataclass
class Profiled:
    """A model whose profile is off by something else in every pass."""

    seconds: dict[str, float]
    noise: list[float]
    conversions: SimpleNamespace = field(default_factory=lambda: COUNTS)

    def profile_ops(self):
        worse = self.noise.pop(0)
        return {name: (seconds * worse,) * 2 for name, seconds in self.seconds.items()}


def found(fp32, int8, wholes, passes=2):
    models = {plan_in(Precision.FP32): fp32, plan_in(Precision.INT8): int8}
    baseline, *candidates = time_ops(
        models, lambda model: model.profile_ops(), lambda models: wholes, passes
    )
    return combine_op_timings(SPACE, baseline, candidates, 0.0, {})


FLOAT = {"op0": 4.0, "op1": 2.0, "op2": 2.0}
LOW = {"op0": 1.0, "op1": 1.0, "op2": 1.0, "x/quantize": 0.5, "op2/dequantize": 0.5}


def test_a_pass_that_was_disturbed_counts_for_nothing():
    times = found(Profiled(FLOAT, [9.0, 1.0]), Profiled(LOW, [1.0, 7.0]), [8.0, 4.0])
    assert times.ops["op0"] == {Precision.FP32: 4.0, Precision.INT8: 1.0}
    assert times.conversion == pytest.approx(0.5)


def test_single_ops_add_up_to_what_the_whole_takes_and_no_op_gains_more():
    """The profiler makes FP32 look three times as slow, and INT8 half as fast again."""
    times = found(Profiled(FLOAT, [3.0, 3.0]), Profiled(LOW, [1.5, 1.5]), [8.0, 4.0])
    assert sum(by[Precision.FP32] for by in times.ops.values()) == pytest.approx(8.0)
    assert times.ops["op1"][Precision.INT8] == pytest.approx(1.0)
    assert times.whole == 8.0
    gains = [by[Precision.FP32] - by[Precision.INT8] for by in times.ops.values()]
    assert max(gains) < times.whole


def test_what_takes_longer_beside_int8_counts_as_conversion():
    """op1 stays in FP32, and takes a second more where its neighbours are in INT8."""
    space, low = SPACE, plan_in(Precision.INT8).plan
    mixed = space.resolve(low.replacing({"op1": FP32}))
    models = {
        plan_in(Precision.FP32): Profiled(FLOAT, [1.0]),
        mixed: Profiled({**LOW, "op1": 3.0}, [1.0]),
    }
    baseline, candidate = time_ops(
        models, lambda model: model.profile_ops(), lambda models: [8.0, 6.0], 1
    )
    assert combine_op_timings(space, baseline, [candidate], 0.0, {}).conversion == pytest.approx(
        1.0 / 2
    )
    in_place = combine_op_timings(space, baseline, [candidate], 0.0, {}, in_place=True)
    assert in_place.conversion == pytest.approx((1.0 + 1.0) / 2)


def test_one_fast_and_one_slow_run_decide_nothing():
    """The time of an op is the first quartile of its runs; its interval ends at the median."""
    runs = [5.0, 5.2, 0.01, 5.1, 90.0]
    duration = Duration.from_runs(runs)
    assert duration == (np.quantile(runs, 0.25), min(runs), np.median(runs))
    assert Duration.from_runs([3.0]) == (3.0, 3.0, 3.0)


def test_times_of_ops_have_the_interval_of_their_runs():
    """An op together with the ops fused into it is summed run by run."""
    fp32 = Profiled(FLOAT, [1.0])
    fp32.profile_ops = lambda: {name: (s, 1.2 * s, 1.4 * s) for name, s in FLOAT.items()}
    times = found(fp32, Profiled(LOW, [1.0, 1.0]), [0.0, 0.0], passes=1)
    assert times.ops["op0"][Precision.FP32] == pytest.approx(4.4)
    assert times.spread["op0"][Precision.FP32] == pytest.approx((4.0, 4.8))


@pytest.mark.parametrize(("int8", "value", "clipped"), [(1.0, 4.0, False), (0.01, 16.0, True)])
def test_a_gain_has_an_interval_and_is_clipped_with_a_mark(int8, value, clipped):
    ops = {"conv": {Precision.FP32: 4.0, Precision.INT8: int8}}
    spread = {"conv": {Precision.FP32: (3.0, 5.0), Precision.INT8: (int8 / 2, int8 * 2)}}
    gain = OpTimings(ops, spread=spread).op_gain("conv", Precision.INT8)
    assert gain is not None
    assert gain.value == value
    assert gain.low <= gain.value <= gain.high <= MAX_GAIN
    assert gain.clipped == clipped
    assert OpTimings(ops).op_gain("conv", Precision.BF16) is None


def test_the_predicted_time_of_a_measured_plan_is_what_its_parts_took():
    """Conversions count with their measured time, however long a loop over the memory takes."""
    fp32, int8 = Profiled(FLOAT, [1.0] * 3), Profiled(LOW, [1.0] * 3)
    models = {plan_in(Precision.FP32): fp32, plan_in(Precision.INT8): int8}
    baseline, candidate = time_ops(
        models, lambda model: model.profile_ops(), lambda models: [8.0, 4.0], 1
    )
    elements = dict.fromkeys(["x", "op0", "op1", "op2"], 1000.0)
    for per_element in (0.0, 1e-4, 1.0):
        times = combine_op_timings(SPACE, baseline, [candidate], per_element, elements)
        conversion = times.conversion + times.per_element * elements["x"]
        assert conversion == pytest.approx(0.5)
        figures = CostInputs({}, times=times, values=elements)
        low = plan_in(Precision.INT8).plan
        inner = sum(LOW[op] for op in SPACE.tunable_ops)
        assert predict_plan_time(SPACE, figures, low) == pytest.approx((inner + conversion) / 8.0)


@given(
    st.floats(1e-9, 1e3),
    st.lists(st.integers(1, 10**9), min_size=4, max_size=4),
)
def test_conversions_never_take_less_than_nothing(seconds, counts):
    """Rounding leaves nothing below 0 if the elements account for all the time."""
    low = {name: seconds * factor for name, factor in LOW.items()}
    models = {
        plan_in(Precision.FP32): Profiled(FLOAT, [1.0]),
        plan_in(Precision.INT8): Profiled(low, [1.0]),
    }
    baseline, candidate = time_ops(
        models, lambda model: model.profile_ops(), lambda models: [8.0, 4.0], 1
    )
    elements = dict(zip(["x", "op0", "op1", "op2"], map(float, counts), strict=True))
    times = combine_op_timings(SPACE, baseline, [candidate], 1.0, elements)
    assert times.conversion is not None
    assert times.conversion >= 0
    assert OpTimings.from_dict(times.to_dict()) == times


def test_a_profile_of_nothing_stays_as_it_is():
    assert scale_runs({"a": (0.0, 0.0)}, 3.0) == {"a": (0.0, 0.0)}


def test_times_are_read_back_as_they_were_written():
    times = found(Profiled(FLOAT, [1.0, 1.0]), Profiled(LOW, [1.0, 1.0]), [8.0, 4.0])
    assert OpTimings.from_dict(times.to_dict()) == times
    assert OpTimings.from_dict(OpTimings().to_dict()) == OpTimings()


def test_an_op_within_the_kernel_of_another_takes_no_time_of_its_own():
    """op1 has no kernel in FP32: op2's computes it. In INT8, it has one."""
    times = found(
        Profiled({**FLOAT, "op1": 0.0}, [1.0]), Profiled(LOW, [1.0]), [6.0, 4.0], passes=1
    )
    assert times.runs_within_another("op1")
    assert times.ops["op1"][Precision.FP32] < 1e-6 * times.ops["op1"][Precision.INT8]
    assert times.op_gain("op1", Precision.INT8) is None
    assert OpTimings.from_dict(times.to_dict()) == times


def test_conversions_take_what_ops_take_longer_in_a_plan_that_has_many():
    """op0 and op2 have weights: they run in INT8, and what they read is quantized."""
    ops = [replace(op, weights=int(op.name != "op1")) for op in SPACE.graph]
    space = replace(SPACE, graph=OpGraph(ops, ["x"]))
    times = found(Profiled(FLOAT, [1.0]), Profiled({**LOW, "op1": 4.0}, [1.0]), [8.0, 7.0], 1)
    assert loses_in_int8(times)
    plan = weights_in_int8(space)
    assert plan.effective == {"op0": Precision.INT8, "op1": Precision.FP32, "op2": Precision.INT8}
    mixed = {"op0": 1.25, "op1": 2.5, "op2": 2.0}
    (timing,) = time_ops(
        {plan: Profiled(mixed, [1.0])}, lambda model: model.profile_ops(), lambda models: [5.75], 1
    )
    elements = {"x": 10.0, "op1": 30.0}
    measured = with_conversions(space, times, timing, elements)
    assert measured.conversions == pytest.approx({"x": 0.25, "op1": 1.0})
    assert measured.per_element == pytest.approx(1.25 / 40)
    assert OpTimings.from_dict(measured.to_dict()) == measured
    assert measured.scaled_conversions(2.0).conversions["op1"] == pytest.approx(2.0)


def test_models_that_gain_in_int8_need_no_times_of_conversions():
    assert not loses_in_int8(found(Profiled(FLOAT, [1.0]), Profiled(LOW, [1.0]), [8.0, 4.0], 1))


def test_a_pass_is_repeated_only_if_the_time_suffices():
    fp32, int8 = Profiled(FLOAT, [1.0] * 3), Profiled(LOW, [1.0] * 3)
    plans = [plan_in(precision) for precision in (Precision.FP32, Precision.INT8)]
    profiled: list[Profiled] = []

    def profile(model: Profiled) -> dict[str, tuple[float, ...]]:
        profiled.append(model)
        return model.profile_ops()

    def calls(affords_another: bool) -> list[Profiled]:
        profiled.clear()
        models = dict(zip(plans, (fp32, int8), strict=True))
        time_ops(models, profile, lambda _: [8.0, 4.0], 2, lambda: affords_another)
        return list(profiled)

    assert calls(affords_another=False) == [fp32, int8]
    assert calls(affords_another=True) == [fp32, int8, fp32, int8]
