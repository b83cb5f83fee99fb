"""Weights of 4 bits or INT8: measured times decide where latency is the only objective."""

from __future__ import annotations

from collections.abc import Mapping

import pytest
from made_up import run

from neural_mp.core.enums import Objective
from neural_mp.core.graph import Op, OpGraph
from neural_mp.core.observations import Observations
from neural_mp.core.op_timings import OpTimings
from neural_mp.core.plan import PrecisionPlan
from neural_mp.core.precision import FP32, OpConfig, Precision, make_weight_only
from neural_mp.core.quant_spec import QuantSpec
from neural_mp.space import Capability, TuningSpace
from neural_mp.strategies.base import Probe, TuningProblem
from neural_mp.strategies.mincut import without_slow_low_bits

DYNAMIC = OpConfig(
    Precision.INT8,
    QuantSpec.parse("int8 symmetric per_channel"),
    QuantSpec.parse("uint8 asymmetric per_tensor dynamic"),
)
FOUR = make_weight_only(QuantSpec.parse("int4 symmetric per_group 128 int8_inputs"))
OPS = ("first", "second")
SPACE = TuningSpace(
    OpGraph([Op(name, "MatMul", ("x",)) for name in OPS], ["x"]),
    {name: Capability((DYNAMIC, FOUR, FP32)) for name in OPS},
)
DECODE = {Precision.FP32: 5.0, Precision.INT8: 2.0, Precision.INT4: 1.0}
PREFILL = {Precision.FP32: 5.0, Precision.INT8: 1.5, Precision.INT4: 3.0}


class _Timed(Probe):
    def __init__(self, ops: Mapping[str, Mapping[Precision, float]]) -> None:
        self.ops = ops

    def times(self) -> OpTimings:
        return OpTimings(self.ops)


class _Divergences(_Timed):
    def weight_noise(self) -> Mapping[str, Mapping[str, float]]:
        return {op: {str(FOUR.weight): 1e-3} for op in self.ops}


def _problem(ops, objectives=None, space=SPACE) -> TuningProblem:
    objectives = objectives or {Objective.PERFORMANCE: 1.0}
    precisions = (Precision.INT4, Precision.INT8)
    return TuningProblem(space, Observations(), precisions, 0, objectives, _Timed(ops))


def test_four_bits_stay_where_they_take_less_time_than_int8():
    problem = _problem({"first": DECODE, "second": DECODE})
    assert without_slow_low_bits(problem) is problem


def test_four_bits_leave_the_space_where_int8_takes_less_time():
    problem = without_slow_low_bits(_problem({"first": PREFILL, "second": DECODE}))
    assert problem.space.usable_precisions == (Precision.INT8, Precision.FP32)
    assert problem.space.choices("first") == (DYNAMIC, FP32)


@pytest.mark.parametrize("objective", [Objective.FOOTPRINT, Objective.MODELSIZE])
def test_four_bits_stay_where_size_counts(objective):
    objectives = {Objective.PERFORMANCE: 0.5, objective: 0.5}
    problem = _problem({"first": PREFILL, "second": PREFILL}, objectives)
    assert without_slow_low_bits(problem) is problem


def test_four_bits_stay_without_times_and_without_int8():
    assert without_slow_low_bits(problem := _problem({})) is problem
    untimed = _problem({"first": {Precision.FP32: 5.0, Precision.INT8: 1.0}})
    assert without_slow_low_bits(untimed) is untimed
    space = SPACE.restricted_to([Precision.INT4])
    slow = _problem({"first": PREFILL}, space=space)
    assert without_slow_low_bits(slow) is slow


def test_int8_is_searched_where_fewer_bits_leave_only_fp32():
    """Weights in groups miss the target in every op, INT8 in none."""

    def harm(plan: PrecisionPlan) -> float:
        return 0.5 if Precision.INT4 in plan.counts() else 0.0

    probe, precisions = _Divergences(dict.fromkeys(OPS, DECODE)), (Precision.INT4, Precision.INT8)
    trials = run(SPACE, harm, precisions=precisions, strategy="mincut", probe=probe)
    assert Precision.INT4 in trials[0].plan.counts()
    assert any(t.meets_accuracy and t.plan.counts() == {Precision.INT8: 2} for t in trials)
