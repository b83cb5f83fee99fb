"""From what is known of a model to the costs that a cut weighs; figures worked out by hand."""

import sys
from dataclasses import replace
from math import inf
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent.parent / "strategies"))
import made_up
from made_up import chain

from neural_mp.core.op_timings import WITHIN_ANOTHER_SECONDS, OpTimings
from neural_mp.core.plan import PrecisionPlan
from neural_mp.core.precision import OpConfig, Precision
from neural_mp.core.quant_spec import QuantSpec
from neural_mp.search.assignment import CutSolver
from neural_mp.search.cost_model import CostInputs, build_cost_model, predict_plan_time
from neural_mp.space import Capability

INT8, BF16, FP32 = Precision.INT8, Precision.BF16, Precision.FP32
STATIC = made_up.INT8[0]


def fastest(figures: CostInputs, length: int = 3) -> set[str]:
    model = build_cost_model(chain(length), figures)
    plan = model.build_plan(CutSolver(model.assignment).find_best_levels(0.0))
    return {op for op, config in plan.items() if config.precision is INT8}


def times(*pairs: tuple[float, float], **more: float) -> OpTimings:
    ops = {f"op{i}": {FP32: fp32, INT8: int8} for i, (fp32, int8) in enumerate(pairs)}
    return OpTimings(ops, **more)


def test_with_nothing_measured_all_are_fastest_in_int8():
    assert fastest(CostInputs({})) == {"op0", "op1", "op2"}


def test_an_op_that_is_clearly_slower_in_int8_stays_out():
    measured = times((4.0, 1.0), (1.0, 3.0), (4.0, 1.0), conversion=0.1)
    assert fastest(CostInputs({}, times=measured)) == {"op0", "op2"}


def test_not_if_leaving_it_out_costs_more_in_conversions():
    """Two conversions around it, at 1.1 each, against the 2 that it loses."""
    measured = times((4.0, 1.0), (1.0, 3.0), (4.0, 1.0), conversion=1.1)
    assert fastest(CostInputs({}, times=measured)) == {"op0", "op1", "op2"}


def test_without_times_tables_are_in_int8_for_their_size_only():
    table, layer = OpConfig(INT8, QuantSpec("int8", "symmetric", "per_channel")), STATIC
    plan = PrecisionPlan({"op0": table, "op1": layer, "op2": layer})
    weights = {"op0": 10, "op1": 8, "op2": 8}
    assert CostInputs({}, weights=weights).in_int8_for_size_only(plan) == {"op0"}
    # Of a plan that stores most weights alone, time is what they gain.
    assert not CostInputs({}, weights={**weights, "op0": 17}).in_int8_for_size_only(plan)


def test_larger_tensors_take_longer_to_convert():
    measured = times((4.0, 1.0), (1.0, 3.0), (4.0, 1.0), conversion=0.1, per_element=0.01)
    small, large = {"op0": 1, "op1": 1}, {"op0": 100, "op1": 100}
    assert fastest(CostInputs({}, times=measured, values=small)) == {"op0", "op2"}
    assert fastest(CostInputs({}, times=measured, values=large)) == {"op0", "op1", "op2"}


def test_a_difference_within_what_timing_single_ops_can_tell_is_none():
    measured = times((4.0, 1.0), (1.0, 1.1), (4.0, 1.0), conversion=0.0)
    assert fastest(CostInputs({}, times=measured)) == {"op0", "op1", "op2"}


def test_where_size_is_wanted_times_do_not_count_and_weights_do():
    measured = times((4.0, 1.0), (1.0, 30.0), (4.0, 1.0), conversion=0.1)
    figures = CostInputs({}, {"modelsize": 1.0}, measured, {"op0": 10, "op1": 80, "op2": 10})
    assert fastest(figures) == {"op0", "op1", "op2"}
    model = build_cost_model(chain(3), figures)
    time = {op: costs[0][0] for op, costs in model.assignment.costs.items()}
    assert time == pytest.approx({"op0": 0.025, "op1": 0.2, "op2": 0.025})


def test_two_objectives_are_weighed():
    """All of the time is op0's, all of the weights op1's."""
    measured = times((1.0, 0.5), (1e-9, 5e-10), (1e-9, 5e-10), conversion=0.0)
    figures = CostInputs(
        {}, {"performance": 0.75, "modelsize": 0.25}, measured, {"op0": 1, "op1": 10**9, "op2": 1}
    )
    costs = build_cost_model(chain(3), figures).assignment.costs
    assert costs["op0"][1][0] == pytest.approx(0.75, rel=1e-3)
    assert costs["op0"][0][0] == pytest.approx(0.75 * 0.5, rel=1e-3)
    assert costs["op1"][1][0] == pytest.approx(0.25, rel=1e-3)


def test_a_tensors_harm_is_paid_once_however_large_the_weight_of_harm():
    model = build_cost_model(chain(3), CostInputs({"op0": 0.5, "op1": 1e-7}))
    plan = model.build_plan(CutSolver(model.assignment).find_best_levels(inf))
    assert plan["op1"].precision is FP32


@pytest.mark.parametrize(("bf16", "taken"), [(0.9, True), (1.1, False)])
def test_16_bits_are_worth_what_they_were_measured_to_be(bf16, taken):
    measured = OpTimings({f"op{i}": {FP32: 1.0, BF16: bf16} for i in range(2)}, conversion=0.0)
    space = chain(2)
    capabilities = dict.fromkeys(space.tunable_ops, Capability((OpConfig(BF16), OpConfig(FP32))))
    model = build_cost_model(
        replace(space, capabilities=capabilities), CostInputs({}, times=measured)
    )
    plan = model.build_plan(CutSolver(model.assignment).find_best_levels(0.0))
    assert (plan["op0"].precision is BF16) == taken


@pytest.mark.parametrize(("int8", "taken"), [(0.55, INT8), (0.7, BF16)])
def test_int8_goes_back_to_a_float_precision_that_is_clearly_faster(int8, taken):
    """INT8 is faster than FP32 in any case, and slower than BF16 by a tenth or by two fifths."""
    measured = OpTimings({"op0": {FP32: 1.0, BF16: 0.5, INT8: int8}}, conversion=0.0)
    space = chain(1)
    low = space.choice("op0", INT8)
    every = {"op0": Capability((low, OpConfig(BF16), OpConfig(FP32)))}
    model = build_cost_model(replace(space, capabilities=every), CostInputs({}, times=measured))
    assert model.find_best_plan(0.0)["op0"].precision is taken


@pytest.mark.parametrize("harm", [1e-6, 1e-3])
def test_of_two_plans_that_are_as_fast_it_is_the_smaller_one(harm):
    """Nine tenths of all bytes are in a table, which takes a thousandth of the time."""
    config = OpConfig(INT8, QuantSpec("int8", "symmetric", "per_channel"))
    space = chain(3)
    tables = {**space.capabilities, "op0": Capability((config, OpConfig(FP32)))}
    measured = times((0.001, 0.001), (0.5, 0.1), (0.5, 0.1), conversion=0.0)
    sizes = {"op0": 900, "op1": 50, "op2": 50}
    figures = CostInputs({"op1": harm}, times=measured, weights=sizes)
    model = build_cost_model(replace(space, capabilities=tables), figures)
    plan = model.build_plan(CutSolver(model.assignment).find_best_levels(100.0))
    assert plan["op0"].precision is INT8


@pytest.mark.parametrize(("share", "taken"), [(0.004, True), (0.04, False)])
def test_a_table_in_bytes_is_taken_for_its_size_where_it_costs_next_to_nothing(share, taken):
    """It is read at half the speed, which is a small part of the whole or a larger one."""
    config = OpConfig(INT8, QuantSpec("int8", "symmetric", "per_channel"))
    space = chain(3)
    tables = {**space.capabilities, "op0": Capability((config, OpConfig(FP32)))}
    measured = times((share, 2 * share), (0.5, 0.1), (0.5, 0.1), conversion=0.0)
    model = build_cost_model(replace(space, capabilities=tables), CostInputs({}, times=measured))
    plan = model.build_plan(CutSolver(model.assignment).find_best_levels(0.0))
    assert (plan["op0"].precision is INT8) == taken


def test_what_a_plan_is_said_to_take_counts_what_is_not_decided_as_in_fp32():
    """Of 12 seconds 9 are decided; two of three ops save 3 and 1, and one conversion takes 1."""
    measured = times((4.0, 1.0), (2.0, 1.0), (3.0, 1.0), conversion=1.0, whole=12.0)
    space = chain(3)
    low = space.choice("op0", INT8)
    plan = space.resolve(PrecisionPlan({"op0": low, "op1": low, "op2": OpConfig(FP32)})).plan
    figures = CostInputs({}, times=measured)
    assert predict_plan_time(space, figures, plan) == pytest.approx((12 - 3 - 1 + 2) / 12)
    assert predict_plan_time(space, CostInputs({}, times=times((4.0, 1.0))), plan) is None


@pytest.mark.parametrize(("in_place", "taken"), [(False, True), (True, False)])
def test_small_losses_count_once_ops_were_timed_in_place(in_place, taken):
    measured = times((4.0, 1.0), (1.0, 1.1), (4.0, 1.0), conversion=0.0)
    assert ("op1" in fastest(CostInputs({}, times=measured, in_place=in_place))) is taken


def test_a_conversion_costs_what_it_was_measured_to_take():
    """op1 loses 2 in INT8; the conversions around it are measured at .5 each, or at 1.5."""
    for seconds, expected in ((0.5, {"op0", "op2"}), (1.5, {"op0", "op1", "op2"})):
        conversions = {"op0": seconds, "op1": seconds}
        measured = times((4.0, 1.0), (1.0, 3.0), (4.0, 1.0), conversion=9.0)
        measured = replace(measured, conversions={"x": 0.0, **conversions})
        assert fastest(CostInputs({}, times=measured)) == expected


@pytest.mark.parametrize(("int8", "expected"), [(1.0, {"op0", "op1", "op2"}), (5.0, {"op0"})])
def test_ops_in_one_kernel_are_not_taken_apart(int8, expected):
    """In FP32, op2's kernel of 4 computes op1, too: neither is cheap alone."""
    within = WITHIN_ANOTHER_SECONDS
    measured = times((4.0, 1.0), (within, 0.5), (4.0, int8), conversion=0.01)
    assert fastest(CostInputs({}, times=measured)) == expected
