"""Bits of each weight: few trials, the cheapest plan, and no worse than any uniform one."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import product

import made_up
import pytest

from neural_mp.core.graph import Op, OpGraph
from neural_mp.core.plan import PrecisionPlan
from neural_mp.core.precision import FP32, OpConfig, Precision
from neural_mp.core.quant_spec import QuantSpec
from neural_mp.space import Capability, TuningSpace
from neural_mp.strategies.base import Probe

INT8 = OpConfig(Precision.INT8, QuantSpec.parse("int8 symmetric per_channel"))
INT4 = [
    OpConfig(Precision.INT4, QuantSpec.parse(f"uint4 asymmetric per_group {size}"))
    for size in (128, 32)
]
FORMS = (INT8, *INT4, FP32)
BITS = {INT4[0]: 4.5, INT4[1]: 6.0, INT8: 8.0, FP32: 32.0}
#: Noise of a form compared with that of 4 bits in groups of 128.
NOISE = {INT4[0]: 1.0, INT4[1]: 0.6, INT8: 0.004, FP32: 0.0}


def _space(count: int) -> TuningSpace:
    ops = [Op(f"op{i}", "linear", ("x",) if not i else (f"op{i - 1}",), weights=1000 * (1 + i % 3))
           for i in range(count)]  # fmt: skip
    return TuningSpace(OpGraph(ops, ["x"]), {op.name: Capability(FORMS) for op in ops})


class _Probe(Probe):
    def __init__(self, harm: Mapping[str, float]) -> None:
        self.harm = harm

    def weight_noise(self) -> Mapping[str, Mapping[str, float]]:
        return {
            op: {str(form.weight): harm * NOISE[form] for form in (INT8, *INT4)}
            for op, harm in self.harm.items()
        }


def _noise(plan: Mapping[str, OpConfig], harm: Mapping[str, float]) -> float:
    return sum(harm[op] * NOISE[plan.get(op, FP32)] for op in harm)


def _bytes(space: TuningSpace, plan: Mapping[str, OpConfig]) -> float:
    return sum(op.weights * BITS[plan.get(op.name, FP32)] for op in space.graph)


def _run(
    space: TuningSpace,
    harm: Mapping[str, float],
    tolerance: float,
    unit: float = 1.0,
    power: float = 1.0,
):
    def loss(plan: PrecisionPlan) -> float:
        return unit * _noise(plan, harm) ** power

    precisions = (Precision.INT4, Precision.INT8)
    return made_up.run(
        space,
        loss,
        precisions=precisions,
        tolerance=tolerance,
        strategy="mincut",
        probe=_Probe(harm),
        objectives={"footprint": 1.0},
    )


HARM = {f"op{i}": 4.0**-i for i in range(6)}


def test_the_cheapest_plan_is_tried_first_and_is_the_only_one_if_it_meets_the_target():
    (trial,) = _run(_space(6), HARM, 2.0)
    assert set(trial.plan.values()) == {INT4[0]}


def _check_near_best(tolerance: float, unit: float) -> None:
    """Check that at most four trials come within 15 % of the smallest of all plans that meet."""
    space = _space(6)
    trials = _run(space, HARM, tolerance * unit, unit)
    assert len(trials) <= 4
    size = min(_bytes(space, trial.plan) for trial in trials if trial.met)
    best = min(
        _bytes(space, plan)
        for forms in product(FORMS, repeat=6)
        if _noise(plan := dict(zip(HARM, forms, strict=True)), HARM) <= tolerance
    )
    assert size <= 1.15 * best


@pytest.mark.parametrize("unit", [1.0, 3.0])
@pytest.mark.parametrize("tolerance", [1.0, 0.3, 0.05, 0.01])
def test_at_most_four_trials_come_close_to_the_best_of_all_plans(tolerance, unit):
    _check_near_best(tolerance, unit)


@pytest.mark.parametrize("unit", [1e-6, 1e-4, 1e-2])
@pytest.mark.parametrize("tolerance", [1.0, 0.3, 0.05])
def test_a_noise_of_another_scale_than_the_loss_costs_a_trial_and_no_bits(tolerance, unit):
    _check_near_best(tolerance, unit)


def test_plans_without_loss_end_in_the_cheapest_one_whatever_the_noise():
    trials = _run(_space(6), {op: 1e4 * harm for op, harm in HARM.items()}, 0.01, unit=0.0)
    assert len(trials) <= 2
    assert set(trials[-1].plan.values()) == {INT4[0]}


@pytest.mark.parametrize("power", [0.5, 0.6])
@pytest.mark.parametrize("fraction", [0.05, 0.07, 0.2])
def test_losses_that_fall_more_slowly_than_the_noise_take_few_trials(power, fraction):
    """A bound of the loss over other data adds a margin that falls slowly with the noise."""
    harm = {f"op{i}": 1.2**-i for i in range(24)}
    most = fraction * sum(harm.values())
    trials = _run(_space(24), harm, 10 * most**power, 10, power)
    assert len(trials) <= 4
    met = [trial for trial in trials if trial.met]
    assert met
    assert max(_noise(trial.plan, harm) for trial in met) >= 0.5 * most


def test_sensitive_weights_get_more_bits_than_others():
    trials = _run(_space(6), HARM, 0.3)
    plan = next(trial.plan for trial in reversed(trials) if trial.met)
    bits = [BITS[plan[f"op{i}"]] for i in range(6)]
    assert bits[0] >= bits[5]
    assert bits[0] >= 8
    assert bits[5] == 4.5


def test_without_gradients_plans_are_tried_all_the_same():
    space = _space(3)
    trials = made_up.run(
        space, lambda plan: 0.0, precisions=(Precision.INT8,), strategy="bit_allocation"
    )
    assert trials
    assert trials[0].met
