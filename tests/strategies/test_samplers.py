"""Strategies that go through plans, or draw them; and what is true of all the classics."""

from __future__ import annotations

import math
import subprocess
import sys

import pytest
from made_up import (
    BF16,
    INT8,
    MadeUpProbe,
    branches,
    chain,
    high_ops,
    hostile_tensor,
    int8_ops,
    run,
)

from neural_mp.core.graph import Op, OpGraph
from neural_mp.core.precision import FP32, Precision
from neural_mp.errors import ConfigurationError
from neural_mp.space import Capability, TuningSpace
from neural_mp.strategies import create_strategy_named, decisions
from neural_mp.strategies.decisions import iterate_combinations
from neural_mp.strategies.optuna_search import compute_objective_value, squash_to_unit

pytestmark = pytest.mark.slow

INT8_ONLY, BOTH = (Precision.INT8,), (Precision.INT8, Precision.BF16)
SAMPLERS = ["random", "tpe", "bayesian"]
CLASSICS = ["conservative", "mse", "mse_v2", "hawq_v2", "auto_mixed_precision", "exhaustive"]
CLASSICS += SAMPLERS

#: Which op harms is known to a probe that looks.
PROBE = MadeUpProbe({"op2": 0.9, "op0": 0.01}, {"op2": 9.0, "op0": 0.1})


def hostile_op(plan) -> float:
    return 0.9 * (plan["op2"].precision is not Precision.FP32)


def bounded(strategy: str, count: int) -> int:
    """Trials that a strategy may take for so many decisions."""
    return 2**count if strategy == "exhaustive" or strategy in SAMPLERS else 3 * count + 8


# What is true of all


@pytest.mark.parametrize("strategy", CLASSICS)
@pytest.mark.parametrize("configs", [(*INT8, FP32), (BF16, FP32)])
def test_each_finds_a_plan_where_there_is_one_and_ends_by_itself(strategy, configs):
    space = chain(6, configs=configs)
    precisions = tuple(p for p in space.usable_precisions if p is not Precision.FP32)
    trials = run(space, hostile_op, precisions=precisions, strategy=strategy, probe=PROBE)
    assert len(trials) <= bounded(strategy, 6)
    assert all(set(t.plan.counts()) != {Precision.FP32} for t in trials)
    if strategy == "conservative":  # the other convolutions are not told from the bad one
        assert [t.met for t in trials] == [False, True]
    elif strategy != "auto_mixed_precision" or Precision.BF16 in precisions:
        assert any(t.met for t in trials)
    else:
        assert not trials


@pytest.mark.parametrize("strategy", CLASSICS)
def test_each_proposes_the_same_for_the_same_seed(strategy):
    space = chain(4, configs=(*INT8, BF16, FP32))
    options = {"precisions": BOTH, "strategy": strategy, "probe": PROBE}
    first, second = (run(space, hostile_op, seed=7, **options) for _ in range(2))
    assert [t.plan for t in first] == [t.plan for t in second]


@pytest.mark.parametrize("strategy", CLASSICS)
@pytest.mark.parametrize("length", [1, 2, 6])
def test_a_target_that_nothing_meets_ends_without_an_error(strategy, length):
    space = chain(length, configs=(*INT8, BF16, FP32))
    trials = run(space, lambda plan: 0.9, precisions=BOTH, strategy=strategy, probe=PROBE)
    assert not any(t.met for t in trials)
    assert all(set(t.plan.counts()) != {Precision.FP32} for t in trials)
    assert 0 < len(trials) <= 3**length + 10


@pytest.mark.parametrize("strategy", CLASSICS)
def test_plans_that_fail_end_the_search_as_well(strategy):
    trials = run(
        chain(4), lambda plan: math.inf, strategy=strategy, probe=MadeUpProbe({"op1": math.inf})
    )
    assert len(trials) <= 16


@pytest.mark.parametrize("strategy", CLASSICS)
def test_a_model_without_any_choice_ends_at_once(strategy):
    assert run(chain(4, configs=(FP32,)), lambda plan: 0.9, strategy=strategy) == []


@pytest.mark.parametrize("strategy", CLASSICS)
def test_what_reads_one_quantized_tensor_moves_together(strategy):
    space = branches()
    assert ("branch0", "branch1", "branch2") in space.decision_groups

    def harm(plan):
        return 0.3 * ("branch1" in int8_ops(plan)) + 0.3 * ("end2" in int8_ops(plan))

    probe = MadeUpProbe({"branch1": 0.9, "end2": 0.5, "op0": 0.1}, {"branch1": 9.0, "end2": 5.0})
    for trial in run(space, harm, strategy=strategy, probe=probe):
        for ops in space.decision_groups:
            assert len({trial.plan[op].precision for op in ops}) == 1


@pytest.mark.parametrize("strategy", [name for name in CLASSICS if name != "mse"])
def test_int8_that_runs_nowhere_is_no_plan(strategy):
    """An addition in INT8 alone, between float ops, is FP32 in effect.

    The first steps of `mse` are those of `basic`, which goes by what a plan says.
    """
    ops = [Op("before", "conv", ("x",)), Op("add", "add", ("before",), joins_int8=True)]
    ops += [Op("after", "conv", ("add",))]
    space = TuningSpace(OpGraph(ops, ["x"]), {op.name: Capability((*INT8, FP32)) for op in ops})
    for trial in run(space, lambda plan: 0.9, strategy=strategy, probe=PROBE):
        assert set(space.resolve(trial.plan).effective.values()) != {Precision.FP32}


# exhaustive


def test_exhaustive_begins_with_all_low_and_raises_one_then_two():
    trials = run(chain(3), lambda plan: 0.9, strategy="exhaustive")
    assert [high_ops(t.plan) for t in trials] == [
        set(),
        {"op0"},
        {"op1"},
        {"op2"},
        {"op0", "op1"},
        {"op0", "op2"},
        {"op1", "op2"},
    ]


def test_exhaustive_goes_through_all_precisions_and_does_not_stop_at_the_first_that_meets():
    space = chain(3, configs=(*INT8, BF16, FP32))
    plans = [t.plan for t in run(space, lambda plan: 0.0, precisions=BOTH, strategy="exhaustive")]
    assert len(plans) == len(set(plans)) == 3**3 - 1
    assert [p["op0"].precision for p in plans[:3]] == ["int8", "bf16", "fp32"]


@pytest.mark.parametrize("strategy", ["exhaustive", "random"])
def test_decisions_without_an_effect_do_not_keep_a_search_from_its_end(
    strategy, monkeypatch, caplog
):
    """Additions between float ops are FP32 in effect: 2³⁰ combinations are the same plan."""
    monkeypatch.setattr(decisions, "MAX_REPEATED_COMBINATIONS", 100)
    ops = [Op("first", "conv", ("x",)), Op("exp", "exp", ("first",))]
    for number in range(30):
        ops.append(Op(f"add{number}", "add", (ops[-1].name,), joins_int8=True))
        ops.append(Op(f"exp{number}", "exp", (ops[-1].name,)))
    configs = {op.name: (FP32,) if op.type == "exp" else (*INT8, FP32) for op in ops}
    capabilities = {name: Capability(supported) for name, supported in configs.items()}
    space = TuningSpace(OpGraph(ops, ["x"]), capabilities)
    trials = run(space, lambda plan: 0.9, strategy=strategy)
    assert len({space.resolve(trial.plan) for trial in trials}) == len(trials) == 1
    assert "100 combinations of precisions in a row without a new plan" in caplog.text


def test_combinations_of_many_decisions_come_one_at_a_time():
    precisions = (Precision.INT8, Precision.FP32)
    assignments = iterate_combinations([precisions] * 3000)
    assert set(next(assignments)) == {Precision.INT8}
    assert [next(assignments).index(Precision.FP32) for _ in range(3)] == [0, 1, 2]


# random, tpe, bayesian


@pytest.mark.parametrize("strategy", SAMPLERS)
def test_samplers_begin_with_all_low_and_draw_nothing_twice(strategy):
    trials = run(chain(6), hostile_tensor, strategy=strategy)
    assert high_ops(trials[0].plan) == set()
    assert len({t.plan for t in trials}) == len(trials)


@pytest.mark.parametrize("strategy", SAMPLERS)
def test_samplers_go_through_all_plans_where_these_are_few(strategy):
    trials = run(chain(3), lambda plan: 0.9, strategy=strategy)
    assert len({t.plan for t in trials}) == 7


@pytest.mark.parametrize("strategy", SAMPLERS)
def test_samplers_end_when_nothing_better_comes(strategy):
    trials = run(chain(12), lambda plan: 0.0, strategy=strategy)
    assert 21 <= len(trials) <= 21 + 8


@pytest.mark.parametrize("strategy", ["random", "tpe"])
def test_samplers_draw_otherwise_from_another_seed(strategy):
    first, second = (run(chain(9), hostile_tensor, strategy=strategy, seed=s) for s in (1, 2))
    assert [t.plan for t in first] != [t.plan for t in second]


@pytest.mark.parametrize("strategy", ["tpe", "bayesian"])
def test_what_learns_finds_more_than_the_first_that_meets(strategy):
    """Of 9 ops one has to be FP32; each other one that is makes the model slower."""
    trials = run(
        chain(9),
        hostile_tensor,
        strategy=strategy,
        figures=lambda plan: {"relative_latency": 0.3 + 0.07 * len(high_ops(plan))},
    )
    met = [t for t in trials if t.met]
    assert min(len(high_ops(t.plan)) for t in met) <= 2
    assert len(high_ops(met[0].plan)) > 2


def test_random_draws_rounds_that_do_not_depend_on_what_came_of_them():
    harms = (lambda plan: 0.9, lambda plan: 0.9 - 0.001 * len(high_ops(plan)))
    first, second = ([t.plan for t in run(chain(9), harm, strategy="random")] for harm in harms)
    assert first[:16] == second[:16]


def test_precisions_that_an_op_of_a_decision_lacks_are_the_next_higher():
    """Only one of two that share a tensor can run in BF16."""
    ops = [Op("a", "conv", ("x",)), Op("b", "conv", ("x",))]
    capabilities = {"a": Capability((*INT8, BF16, FP32)), "b": Capability((*INT8, FP32))}
    space = TuningSpace(OpGraph(ops, ["x"]), capabilities)
    trials = run(space, lambda plan: 0.9, precisions=BOTH, strategy="random")
    pairs = {(str(t.plan["a"].precision), str(t.plan["b"].precision)) for t in trials}
    assert pairs == {("int8", "int8"), ("bf16", "fp32")}


def test_without_torch_bayesian_says_what_to_do(monkeypatch):
    monkeypatch.setattr("neural_mp.strategies.optuna_search.find_spec", lambda name: None)
    with pytest.raises(ConfigurationError, match="torch.*'tpe'"):
        create_strategy_named("bayesian")


def test_naming_a_strategy_imports_no_optuna_and_no_torch():
    code = "import sys; from neural_mp.strategies import create_strategy_named as s; s('bayesian')"
    code += "; assert not {'optuna', 'torch'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)


# What samplers are told


def scored(harm, figures, objectives, tolerance=0.01) -> dict[int, float]:
    """How many ops are low → the score of the plan, of all plans of a chain in order."""
    from neural_mp.core.observations import Observations
    from neural_mp.strategies.base import TuningProblem

    space = chain(4)
    trials = run(space, harm, strategy="exhaustive", figures=figures, tolerance=tolerance)
    problem = TuningProblem(space, Observations(), INT8_ONLY, objectives=objectives)
    return {len(int8_ops(trial.plan)): compute_objective_value(problem, trial) for trial in trials}


def test_any_accurate_plan_is_better_than_any_that_is_not():
    scores = scored(
        lambda plan: 0.0 if len(int8_ops(plan)) < 3 else 0.011 * len(int8_ops(plan)),
        lambda plan: {"relative_latency": 50.0},
        {"performance": 1.0},
    )
    assert max(scores[1], scores[2]) < 1 <= scores[3] < scores[4] < 2


def test_accurate_plans_are_ordered_by_weighted_objectives():
    def figures(plan):
        low = len(int8_ops(plan))
        return {"relative_latency": 1 - 0.1 * low, "relative_modelsize": 0.1 * low}

    faster = scored(lambda plan: 0.0, figures, {"performance": 1.0})
    smaller = scored(lambda plan: 0.0, figures, {"modelsize": 1.0})
    mostly_faster = scored(lambda plan: 0.0, figures, {"performance": 0.9, "modelsize": 0.1})
    assert faster[4] < faster[2] < faster[1]
    assert smaller[1] < smaller[2] < smaller[4]
    assert mostly_faster[4] == pytest.approx(squash_to_unit(0.9 * 0.6 + 0.1 * 0.4))


def test_without_figures_bits_take_their_place():
    scores = scored(lambda plan: 0.0, lambda plan: {}, {"performance": 1.0})
    assert scores[4] == pytest.approx(squash_to_unit(8 / 32))
    assert scores[2] == pytest.approx(squash_to_unit((8 + 8 + 32 + 32) / 128))


def test_failures_are_worst_and_finite():
    assert scored(lambda plan: math.inf, lambda plan: {}, {"performance": 1.0})[4] == 2.0
