"""Corners of the Pareto front that lie far apart: what the search tries in between."""

import pytest
from made_up import INT8, chain, int8_ops, run

from neural_mp.core.enums import Objective
from neural_mp.core.op_timings import OpTimings
from neural_mp.core.plan import PrecisionPlan
from neural_mp.core.precision import FP32, Precision
from neural_mp.core.trial import Outcome, Trial
from neural_mp.search.cost_model import CostInputs, cost_model
from neural_mp.strategies.front_gap import halfway

LENGTH = 40


def _barely_missed(plan):
    """24 ops in INT8 miss the target by a ten-thousandth, 23 meet it."""
    return 0.0101 if len(int8_ops(plan)) > 23 else 0.01


def test_a_jump_over_most_of_the_model_is_bisected():
    """With equal noise, the front has two corners: all ops in INT8, or one."""
    noise = {f"op{i}": 1e-4 for i in range(LENGTH)}
    trials = run(chain(LENGTH), _barely_missed, noise, strategy="mincut")
    counts = [(len(int8_ops(trial.plan)), trial.met) for trial in trials]
    assert counts[:2] == [(LENGTH, False), (1, True)]
    assert len(counts) == 4
    assert max(count for count, met in counts if met) >= LENGTH / 2


@pytest.mark.parametrize(("int8_seconds", "expected"), [(1.0, 4), (6.0, None)])
def test_a_plan_within_a_jump_is_returned_only_if_its_ops_gain_time(int8_seconds, expected):
    space = chain(6)
    seconds = {Precision.FP32: 4.0, Precision.INT8: int8_seconds}
    timings = OpTimings({op.name: seconds for op in space.graph}, 0.0)
    model = cost_model(space, CostInputs({}, {Objective.PERFORMANCE: 1.0}, timings))
    missed = PrecisionPlan({op.name: INT8[0] for op in space.graph})
    met = missed.replacing({f"op{i}": FP32 for i in range(2, 6)})
    trials = [Trial(missed, Outcome.MISSED, 0.9, 0.1), Trial(met, Outcome.MET, 1.0, 0.0)]
    plan = halfway(space, model, trials, space.tensors)
    assert (plan and len(int8_ops(plan))) == expected
