"""What a run comes down to: the last measurement, beside FP32, has the last word."""

from dataclasses import replace

import numpy as np
import pytest

from neural_mp.core.graph import Op, OpGraph
from neural_mp.core.plan import PrecisionPlan
from neural_mp.core.precision import FP32, OpConfig, Precision
from neural_mp.core.quant_spec import QuantSpec
from neural_mp.core.trial import Outcome, Trial
from neural_mp.profiling import estimate_latency_ratio
from neural_mp.space import Capability, TuningSpace
from neural_mp.tuning.final_selection import explain_fp32_result, select_plan
from neural_mp.tuning.job import SearchSettings, TuningJob
from neural_mp.tuning.measurement.objectives import judge_gain, make_latency_figures

SPEED = {"performance": 1.0}


class Measured:
    """Says what every plan takes, as a share of FP32's second, whatever was said before."""

    def __init__(self, shares, objectives, min_speedup=1.03):
        self.shares, self.objectives, self.asked = shares, objectives, []
        self.min_speedup = min_speedup

    def measure_rounds(self, models, **_):
        self.asked.append(models)
        return [[self.shares.get(model, 1.0)] * 9 for model in models]


INT8 = OpConfig(
    Precision.INT8,
    QuantSpec("int8", "symmetric", "per_channel"),
    QuantSpec("uint8", "asymmetric", "per_tensor"),
)
GRAPH = OpGraph([Op("a", "dense", ("x",)), Op("b", "dense", ("a",))], ["x"])


class Model:
    """A model of two ops; it becomes the name of the first op that a plan lowers."""

    def __init__(self, emulated):
        configs = (INT8, OpConfig(Precision.BF16), FP32)
        self.space = TuningSpace(
            GRAPH, {op.name: Capability(configs, emulated=emulated) for op in GRAPH}
        )

    def convert_by_plan(self, plan):
        low = [op for op, precision in plan.effective.items() if precision is not Precision.FP32]
        return low[0] if low else self


def job(shares, objectives=SPEED, emulated=frozenset(), for_numbers=frozenset(), least=1.03):
    return TuningJob(
        model=Model(emulated),
        load=None,
        strategy=None,
        evaluator=None,
        calibration=None,
        measurement=Measured(shares, objectives, least),
        open_history=None,
        settings=SearchSettings(for_numbers=for_numbers),
    )


def chosen(run, trials):
    return select_plan(run, trials, run.model)


def trial(op, share, number, precision=Precision.INT8):
    plan = Model(frozenset()).space.resolve(PrecisionPlan({op: OpConfig(precision)})).plan
    figures = make_latency_figures([1.0] * 9, [share] * 9) | {"relative_modelsize": share}
    return Trial(plan, Outcome.MET, 0.9, 0.0, figures, number=number)


def test_the_fastest_by_the_last_measurement_wins():
    trials = [trial("a", 0.50, 0), trial("b", 0.55, 1)]
    run = job({"a": 0.8, "b": 0.5})
    choice = chosen(run, trials)
    assert choice.model == "b"
    assert choice.speed.ratio.value == pytest.approx(2)
    assert choice.trial.speedup == pytest.approx(2)


def test_a_plan_that_turns_out_slower_than_fp32_gives_way_to_the_next_best():
    trials = [trial("a", 0.4, 0), trial("b", 0.8, 1)]
    run = job({"a": 1.1, "b": 0.9})
    choice = chosen(run, trials)
    assert choice.model == "b"
    assert [t.number for t in choice.slower_than_fp32] == [0]
    # Faster in the trial, slower now: the interval contains both.
    assert choice.slower_than_fp32[0].outcome is Outcome.UNCERTAIN


def test_one_that_is_surely_the_best_is_not_measured_a_second_time():
    trials = [trial("a", 0.4, 0), trial("b", 0.8, 1)]
    run = job({"a": 0.9, "b": 0.9})
    choice = select_plan(run, trials, run.model, measured_alone={0, 1})
    assert not run.measurement.asked
    assert choice.model == "a"
    assert choice.speed.ratio.value == pytest.approx(2.5)
    assert choice.speed.baseline == pytest.approx(1.0)
    assert choice.remeasured == (trials[0],)


@pytest.mark.parametrize(
    ("shares", "measured_alone"),
    [
        ((0.5, 0.55), {0, 1}),  # two that noise may have misordered
        ((0.5, 0.8), {1}),  # the best one was measured in another run, or beside others
    ],
)
def test_a_best_plan_in_doubt_is_measured_again(shares, measured_alone):
    trials = [trial(op, share, n) for n, (op, share) in enumerate(zip("ab", shares, strict=True))]
    run = job({"a": 0.7, "b": 0.9})
    choice = select_plan(run, trials, run.model, measured_alone)
    assert len(run.measurement.asked) == 1
    assert choice.speed.result == pytest.approx(0.7)


def test_a_plan_that_may_be_slower_than_fp32_is_measured_again():
    run = job({"a": 1.2})
    slow = trial("a", 0.99, 0)
    figures = {**slow.objectives, "relative_latency_high": 1.05}
    choice = select_plan(run, [replace(slow, objectives=figures)], run.model, measured_alone={0})
    assert choice.model is run.model


def test_where_all_turn_out_slower_the_result_is_fp32_and_says_so():
    trials = [trial("a", 0.4, 0), trial("b", 0.8, 1)]
    run = job({"a": 1.25, "b": 1.5})
    choice = chosen(run, trials)
    assert (choice.model, choice.trial) == (run.model, None)
    assert choice.speed.ratio is None
    reason = explain_fp32_result(run, choice.slower_than_fp32, 0.9)
    assert "as fast as FP32" in reason
    assert "0.80×" in reason


def noisy_rounds(share, count=30, spread=0.05, seed=2):
    """Rounds of FP32 and of a model that takes a share of its time, each off by some percent."""
    draw = np.random.default_rng(seed)
    return [list(draw.normal(1.0, spread, count)), list(draw.normal(share, spread, count))]


def test_a_model_that_may_be_slower_is_no_result_however_fast_it_looks():
    run = job({})
    baseline, candidate = noisy_rounds(0.94)
    spread = estimate_latency_ratio(candidate, baseline)
    assert spread.value < 0.97
    assert spread.low < 0.95 < 0.97 < spread.high
    run.measurement.measure_rounds = lambda models, **_: [baseline, candidate][: len(models)]
    choice = chosen(run, [trial("a", 0.9, 0)])
    assert choice.model is run.model
    reason = explain_fp32_result(run, choice.slower_than_fp32, 0.9)
    assert "at least 1.03 times as fast" in reason
    assert f"at {spread.inverse} the speed" in reason


@pytest.mark.parametrize(("least", "share", "wins"), [(1.0, 0.99, True), (1.0, 1.0, False)])
@pytest.mark.parametrize("seed", range(3))
def test_without_a_minimum_gain_any_gain_that_is_sure_wins(least, share, wins, seed):
    baseline, candidate = noisy_rounds(share, 2000, 0.001, seed)
    run = job({}, least=least)
    run.measurement.measure_rounds = lambda models, **_: [baseline, candidate][: len(models)]
    assert (chosen(run, [trial("a", 0.9, 0)]).model == "a") is wins


@pytest.mark.parametrize(("least", "wins"), [(1.03, True), (1.2, True), (1.3, False)])
def test_a_gain_below_the_minimum_is_not_worth_its_accuracy(least, wins):
    run = job({"a": 0.8}, least=least)
    assert (chosen(run, [trial("a", 0.5, 0)]).model == "a") is wins


@pytest.mark.parametrize("share", [0.97, 1.0, 1.03])
def test_the_verdict_at_a_tie_is_fp32_on_a_machine_where_half_of_all_rounds_are_disturbed(share):
    """20 runs of 60 rounds, each judged by itself."""
    won = 0
    for seed in range(20):
        draw = np.random.default_rng(seed)
        baseline, candidate = (
            base * draw.uniform(1, 1.1, 60) * np.where(draw.random(60) < 0.5, 1, 3)
            for base in (1.0, share)
        )
        won += judge_gain(SPEED, make_latency_figures(baseline, candidate)) is Outcome.MET
    assert won <= 1


@pytest.mark.parametrize(
    "kept",
    [
        {"objectives": {"modelsize": 1.0}},
        {"emulated": frozenset({Precision.BF16})},
        {"for_numbers": frozenset({Precision.BF16})},
    ],
)
def test_speed_counts_for_nothing_where_it_is_not_wanted_or_not_to_be_had(kept):
    run = job({"a": 1.5}, **kept)
    choice = chosen(run, [trial("a", 0.5, 0, Precision.BF16)])
    assert choice.model == "a"


def test_int8_beside_an_emulated_precision_claims_speed():
    run = job({"a": 1.5}, emulated=frozenset({Precision.BF16}))
    plan = PrecisionPlan({"a": OpConfig(Precision.INT8), "b": OpConfig(Precision.BF16)})
    slow = Trial(plan, Outcome.MET, 0.9, 0.0, make_latency_figures([1.0] * 9, [0.5] * 9))
    assert chosen(run, [slow]).model is run.model


def test_the_spread_holds_the_ratio_and_shrinks_with_more_rounds():
    few, many = (estimate_latency_ratio(*reversed(noisy_rounds(0.5, count))) for count in (8, 400))
    for spread in (few, many):
        assert spread.low <= spread.value <= spread.high
        assert spread.inverse.low == pytest.approx(1 / spread.high)
    assert many.high - many.low < few.high - few.low


def test_what_others_take_from_a_busy_machine_is_not_held_against_a_model():
    """Half of the runs take three to nine times as long; the one takes 1.6 times the other."""
    draw = np.random.default_rng(0)
    wrong = 0
    for _ in range(200):
        times = [
            base
            * draw.uniform(1, 1.1, 30)
            * np.where(draw.random(30) < 0.5, 1, draw.uniform(3, 9, 30))
            for base in (1.6, 1.0)
        ]
        spread = estimate_latency_ratio(*times)
        wrong += spread.value < 1
        assert 1.3 < spread.value < 2.0
    assert wrong == 0


def test_a_plan_of_which_nothing_comes_is_no_result():
    run = job({"a": 0.5})
    hollow = trial("a", 0.5, 0, Precision.FP32)
    assert chosen(run, [hollow]).model is run.model


@pytest.mark.parametrize(
    ("low", "high", "min_speedup", "outcome"),
    [
        (0.90, 0.92, 1.05, Outcome.MET),
        (0.90, 0.98, 1.05, Outcome.UNCERTAIN),  # the lower bound of the speed-up is too small
        (0.90, 0.98, 1.01, Outcome.MET),
        (0.90, 1.00, 1.00, Outcome.UNCERTAIN),
        (0.98, 1.10, 1.05, Outcome.SLOW),  # even the upper bound is
        (1.00, 1.20, 1.00, Outcome.SLOW),
    ],
)
def test_the_interval_of_the_speed_up_decides_on_the_outcome(low, high, min_speedup, outcome):
    figures = {"relative_latency": (low + high) / 2}
    figures |= {"relative_latency_low": low, "relative_latency_high": high}
    assert judge_gain(SPEED, figures, min_speedup) is outcome


def test_a_size_has_no_noise():
    assert judge_gain({"modelsize": 1.0}, {"relative_modelsize": 0.5}) is Outcome.MET
    assert judge_gain({"modelsize": 1.0}, {"relative_modelsize": 1.0}) is Outcome.SLOW
    assert judge_gain({"modelsize": 1.0}, make_latency_figures([1.0], [2.0])) is Outcome.MET


@pytest.mark.parametrize(("share", "model"), [(0.7, "a"), (1.2, None)])
def test_a_plan_of_uncertain_gain_is_measured_longer_before_fp32_is_the_result(share, model):
    """On a busy machine, a trial's few rounds may not separate a fast plan from FP32."""
    run, first = job({"a": share}), trial("a", 0.8, 0)
    figures = {**first.objectives, "relative_latency_high": 1.1}
    uncertain = replace(first, outcome=Outcome.UNCERTAIN, objectives=figures)
    choice = select_plan(run, [uncertain], run.model, measured_alone={0})
    assert len(run.measurement.asked) == (1 if model else 2)
    assert choice.model == (model or run.model)


def test_a_plan_of_uncertain_gain_yields_to_a_plan_with_a_proven_gain():
    run = job({"a": 0.5, "b": 0.9})
    uncertain = replace(trial("a", 0.5, 0), outcome=Outcome.UNCERTAIN)
    choice = select_plan(run, [uncertain, trial("b", 0.9, 1)], run.model)
    assert choice.model == "b"
