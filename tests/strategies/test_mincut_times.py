"""`mincut` by times: what is slow, mistimed or read for its size alone."""

from dataclasses import replace

import pytest
from made_up import BF16, INT8, WEIGHT, MadeUpProbe, chain, int8_ops, tried

from neural_mp.core.graph import OpGraph
from neural_mp.core.op_timings import OpTimings
from neural_mp.core.precision import FP32, OpConfig, Precision
from neural_mp.space import Capability, TuningSpace


class Timed(MadeUpProbe):
    """INT8 takes a quarter of the time, but of op3 three times as much."""

    #: Seconds of the model that has all but op3 in INT8; it is 1 with op3.
    without_op3: float | None = None

    def times(self):
        ops = {f"op{i}": {Precision.FP32: 4.0, Precision.INT8: 1.0} for i in range(6)}
        return OpTimings({**ops, "op3": {Precision.FP32: 4.0, Precision.INT8: 12.0}}, 0.1)

    def latencies(self, plans):
        if self.without_op3 is None:
            return None
        seconds = {frozenset(range(6)): 1.0, frozenset(range(6)) - {3}: self.without_op3}
        low = [frozenset(int(op[2:]) for op in int8_ops(plan)) for plan in plans]
        return [seconds.get(ops, 2.0) for ops in low]


def test_what_int8_only_slows_down_stays_out():
    (trial,) = tried(chain(6), lambda plan: 0.0, {}, probe=Timed())
    assert int8_ops(trial.plan) == {f"op{i}" for i in (0, 1, 2, 4, 5)}


def test_a_small_gain_that_is_only_predicted_does_not_take_ops_out_of_int8():
    class Close(Timed):
        def times(self):
            timings = super().times()
            ops = {**timings.ops, "op3": {Precision.FP32: 4.0, Precision.INT8: 4.8}}
            return replace(timings, ops=ops)

    (trial,) = tried(chain(6), lambda plan: 0.0, {}, probe=Close())
    assert len(int8_ops(trial.plan)) == 6


@pytest.mark.parametrize(
    ("without_op3", "in_int8"),
    [(1.2, 6), (1.0, 6), (0.99, 6), (0.8, 5)],  # a hundredth is no difference
)
def test_the_whole_that_is_clearly_faster_is_tried_first(without_op3, in_int8):
    probe = Timed()
    probe.without_op3 = without_op3
    (trial,) = tried(chain(6), lambda plan: 0.0, {}, probe=probe)
    assert len(int8_ops(trial.plan)) == in_int8


class Wavering(MadeUpProbe):
    """At first, the plan without two ops seems as fast as that with all in INT8, or faster.

    Plans without one of the two are slow, so that no single decision leads from one to the other.
    """

    few: float = 0.95

    def times(self):
        seconds = {f"op{i}": 12.0 if i in (1, 3) else 1.0 for i in range(6)}
        ops = {op: {Precision.FP32: 4.0, Precision.INT8: value} for op, value in seconds.items()}
        return OpTimings(ops, 0.1)

    def latencies(self, plans):
        seconds = {6: 1.0, 4: self.few}
        self.few = 1.1
        return [seconds.get(len(int8_ops(plan)), 2.0) for plan in plans]


@pytest.mark.parametrize(("first", "in_int8"), [(0.95, [4, 6]), (0.8, [4]), (1.05, [6])])
def test_a_plan_that_is_slower_at_first_by_noise_is_measured_again(first, in_int8):
    probe = Wavering()
    probe.few = first
    trials = tried(chain(6), lambda plan: 0.0, {}, probe=probe)
    assert [len(int8_ops(trial.plan)) for trial in trials] == in_int8


def test_a_plan_with_more_int8_is_not_tried_after_a_miss():
    trials = tried(chain(6), lambda plan: 0.02 * len(int8_ops(plan)), {}, probe=Wavering())
    assert max(len(int8_ops(trial.plan)) for trial in trials) == 4


@pytest.mark.parametrize(("without_op3", "counts"), [(0.99, [6, 5]), (1.0, [6, 5]), (1.1, [6])])
def test_a_plan_that_is_as_fast_with_less_int8_follows_one_that_missed(without_op3, counts):
    """op3 misses the target in INT8; without a second plan as fast, its noise is found first."""
    probe = Timed()
    probe.without_op3 = without_op3
    trials = tried(chain(6), lambda plan: 0.02 * ("op3" in int8_ops(plan)), {}, probe=probe)
    assert [len(int8_ops(trial.plan)) for trial in trials][: len(counts)] == counts
    if len(counts) > 1:
        assert int8_ops(trials[1].plan) == {f"op{i}" for i in (0, 1, 2, 4, 5)}
        assert len(trials) == 2


class Mixed(MadeUpProbe):
    """BF16 is clearly faster than INT8 in op3, and as fast as FP32 in op5, which has no INT8."""

    def times(self):
        by = {FP32.precision: 4.0, Precision.BF16: 2.0, Precision.INT8: 1.0}
        ops = {f"op{i}": by for i in range(5)}
        ops["op3"] = {**by, Precision.INT8: 3.0}
        ops["op5"] = {FP32.precision: 0.01, Precision.BF16: 0.011}
        return OpTimings(ops, 0.0)

    def latencies(self, plans):
        """A change of float precision between op4 and op5 takes a second."""
        return [10.0 - 2.0 * (_at(p, "op3") == "bf16") + (_at(p, "op5") == "fp32") for p in plans]


def _at(plan, op):
    return plan[op].precision.value if op in plan else "fp32"


def test_an_op_too_short_to_be_timed_does_not_change_its_float_precision_for_it():
    space = chain(6, (*INT8, BF16, FP32))
    capabilities = {**space.capabilities, "op5": Capability((BF16, FP32))}
    space = replace(space, capabilities=capabilities)
    (trial,) = tried(space, lambda plan: 0.0, {}, probe=Mixed())
    assert [_at(trial.plan, f"op{i}") for i in range(6)] == [
        "int8",
        "int8",
        "int8",
        "bf16",
        "int8",
        "bf16",
    ]


class WholeInFloats(MadeUpProbe):
    """Each op seems fastest in INT8; the whole is, without conversions, in BF16."""

    in_bf16: float = 2.0

    def times(self):
        by = {FP32.precision: 4.0, Precision.BF16: 1.2, Precision.INT8: 1.0}
        return OpTimings({f"op{i}": by for i in range(6)}, 0.0)

    def latencies(self, plans):
        return [8.0 if int8_ops(plan) else self.in_bf16 for plan in plans]


@pytest.mark.parametrize(("in_bf16", "precision"), [(2.0, "bf16"), (9.0, "int8")])
def test_the_whole_without_int8_is_measured_beside_the_lowest_precisions(in_bf16, precision):
    probe = WholeInFloats()
    probe.in_bf16 = in_bf16
    trials = tried(chain(6, (*INT8, BF16, FP32)), lambda plan: 0.0, {}, probe=probe)
    assert {_at(trials[0].plan, f"op{i}") for i in range(6)} == {precision}


def test_ops_that_follow_no_layer_in_floats_are_lowered_together():
    """Of layers in INT8 and a norm between them, the norm is measured in BF16 as well."""

    class OneFloatType(MadeUpProbe):
        def times(self):
            by = {FP32.precision: 4.0, Precision.BF16: 2.0, Precision.INT8: 1.0}
            return OpTimings({f"op{i}": by for i in (0, 2)}, 0.0)

        def latencies(self, plans):
            return [1.0 if _at(plan, "op1") == "bf16" else 2.0 for plan in plans]

    space = chain(3, (*INT8, BF16, FP32))
    norm = {"op1": Capability((BF16, FP32))}
    space = replace(space, capabilities={**space.capabilities, **norm})
    (trial,) = tried(space, lambda plan: 0.0, {}, probe=OneFloatType())
    assert [_at(trial.plan, f"op{i}") for i in range(3)] == ["int8", "bf16", "int8"]


class FloatsAlike(MadeUpProbe):
    """INT8 slows op3 down, and FP32 seems a little faster there than BF16, which all else has."""

    def times(self):
        by = {FP32.precision: 4.0, Precision.BF16: 2.0, Precision.INT8: 1.0}
        ops = {f"op{i}": by for i in range(5)}
        ops["op3"] = {FP32.precision: 2.0, Precision.BF16: 2.1, Precision.INT8: 4.0}
        ops["op5"] = {FP32.precision: 4.0, Precision.BF16: 2.0}
        return OpTimings(ops, 0.0)

    def latencies(self, plans):
        """BF16 in op3 is fastest, as its neighbours then need no conversion between floats."""
        return [{"int8": 10.0, "fp32": 9.0, "bf16": 8.0}[_at(plan, "op3")] for plan in plans]


def test_an_op_that_leaves_int8_may_take_the_float_precision_of_all_others():
    space = chain(6, (*INT8, BF16, FP32))
    space = replace(space, capabilities={**space.capabilities, "op5": Capability((BF16, FP32))})
    (trial,) = tried(space, lambda plan: 0.0, {}, probe=FloatsAlike())
    assert [_at(trial.plan, f"op{i}") for i in range(6)] == [
        "int8",
        "int8",
        "int8",
        "bf16",
        "int8",
        "bf16",
    ]


class Reading(MadeUpProbe):
    """op0 reads a table, which takes a thousandth of the time in FP32 and in INT8."""

    def times(self):
        ops = {f"op{i}": {Precision.FP32: 4.0, Precision.INT8: 1.0} for i in range(6)}
        return OpTimings({**ops, "op0": {Precision.FP32: 0.02, Precision.INT8: 0.02}}, 0.0)


def with_a_table(space: TuningSpace) -> TuningSpace:
    ops = [replace(op, weights=9000 if op.name == "op0" else 100) for op in space.graph]
    table = Capability((OpConfig(Precision.INT8, WEIGHT), FP32))
    capabilities = {**space.capabilities, "op0": table}
    return replace(space, graph=OpGraph(ops, ["x"]), capabilities=capabilities)


def test_a_table_that_is_in_int8_for_its_size_alone_goes_back_before_what_gains_speed():
    def harm(plan):
        return 0.02 * ("op0" in int8_ops(plan))

    space = with_a_table(chain(6))
    first, second = tried(space, harm, {"op2": 0.9}, probe=Reading())
    assert "op0" in int8_ops(first.plan)
    assert int8_ops(second.plan) == {f"op{i}" for i in range(1, 6)}
    assert second.met
    where_size_counts = {"performance": 0.5, "modelsize": 0.5}
    _, second, *_ = tried(space, harm, {"op2": 0.9}, probe=Reading(), objectives=where_size_counts)
    assert "op0" in int8_ops(second.plan)


def test_a_search_goes_on_without_a_table_that_raised_the_loss():
    trials = tried(
        with_a_table(chain(6)),
        lambda plan: 0.02 * ("op0" in int8_ops(plan)) + 0.02 * ("op2" in int8_ops(plan)),
        {"op2": 0.9},
        probe=Reading(),
    )
    assert ["op0" in int8_ops(trial.plan) for trial in trials[:3]] == [True, False, False]
    assert "op2" in int8_ops(trials[1].plan)
    assert trials[-1].met


def test_a_plan_slower_than_fp32_is_followed_by_what_gains_most_and_then_the_search_ends():
    trials = tried(
        chain(6),
        lambda plan: 0.0,
        {},
        probe=Timed(),
        figures=lambda plan: {"relative_latency": 1.5},
    )
    assert [len(int8_ops(trial.plan)) for trial in trials] == [5, 1]
    assert not any(trial.met for trial in trials)


def test_of_plans_that_keep_less_in_int8_the_fastest_measured_one_is_tried():
    """All of it is slow, and so is what differs from it in one op: only op5 alone is fast."""

    def seconds(plan):
        low = {op for op, config in plan.items() if config.precision is Precision.INT8}
        return 0.8 if low == {"op5"} else 1.5

    class Measured(Timed):
        def times(self):
            gains = {f"op{i}": {Precision.FP32: 4.0, Precision.INT8: 3.9 - i / 2} for i in range(6)}
            return OpTimings(gains, 0.1)

        def latencies(self, plans):
            return [seconds(plan) for plan in plans]

    trials = tried(
        chain(6),
        lambda plan: 0.0,
        {},
        probe=Measured(),
        figures=lambda plan: {"relative_latency": seconds(plan)},
    )
    assert [int8_ops(trial.plan) for trial in trials if trial.met] == [{"op5"}]
    assert len(trials) == 2


class Mistimed(MadeUpProbe):
    """By itself op3 looks four times as fast in INT8; within the model it takes five times as long.

    FP32 takes 24 seconds in all; `whole` says what plans really take.
    """

    true = 20.0

    def times(self):
        ops = {f"op{i}": {Precision.FP32: 4.0, Precision.INT8: 1.0} for i in range(6)}
        return OpTimings(ops, 0.0, whole=24.0)

    def times_within(self, plan):
        self.asked.append(plan)
        ops = dict(self.times().ops)
        return OpTimings(
            {**ops, "op3": {Precision.FP32: 4.0, Precision.INT8: self.true}}, 0.0, 0, 24.0
        )

    def whole(self, plan):
        low = int8_ops(plan)
        return 24.0 - 3.0 * len(low - {"op3"}) + (self.true - 4.0) * ("op3" in low)

    def figures(self, plan):
        return {"relative_latency": self.whole(plan) / 24.0}

    def latencies(self, plans):
        return [self.whole(plan) for plan in plans]


def test_an_op_that_was_timed_wrongly_is_corrected_after_the_first_trial():
    probe = Mistimed()
    first, second = tried(chain(6), lambda plan: 0.0, {}, probe=probe, figures=probe.figures)
    assert int8_ops(first.plan) == {f"op{i}" for i in range(6)}
    assert int8_ops(second.plan) == {f"op{i}" for i in (0, 1, 2, 4, 5)}
    assert len(probe.asked) == 1  # the second is as fast as said


def test_a_trial_that_takes_what_was_said_is_not_corrected():
    probe = Mistimed()
    probe.true = 1.0 + 0.1 * 6  # a tenth more than the six seconds that were said
    (trial,) = tried(chain(6), lambda plan: 0.0, {}, probe=probe, figures=probe.figures)
    assert len(int8_ops(trial.plan)) == 6
    assert not probe.asked


def test_a_correction_that_makes_no_difference_costs_no_trial():
    class Alike(Mistimed):
        def latencies(self, plans):
            return [5.0 for _ in plans]

    probe = Alike()
    trials = tried(chain(6), lambda plan: 0.0, {}, probe=probe, figures=probe.figures)
    assert len(trials) == 1


def test_ops_that_only_whole_models_show_to_be_slow_are_put_back_in_one_trial():
    """By themselves op2 and op4 gain a little in INT8; in the whole model they lose a little."""

    class Subtle(Mistimed):
        def times(self):
            barely = {op: {Precision.FP32: 4.0, Precision.INT8: 3.9} for op in ("op2", "op4")}
            timings = super().times()
            return replace(timings, ops={**timings.ops, **barely})

        def whole(self, plan):
            low = int8_ops(plan)
            return 24.0 - 3.0 * len(low - {"op2", "op4"}) + 0.3 * len(low & {"op2", "op4"})

    probe = Subtle()
    first, second = tried(chain(6), lambda plan: 0.0, {}, probe=probe, figures=probe.figures)
    assert len(int8_ops(first.plan)) == 6
    assert int8_ops(second.plan) == {"op0", "op1", "op3", "op5"}
    assert not probe.asked


def test_what_accuracy_keeps_out_of_int8_is_not_lowered_again_for_its_speed():
    probe = Mistimed()
    probe.true = 1.0
    trials = tried(
        chain(6),
        lambda plan: 0.9 if "op2" in int8_ops(plan) else 0.0,
        {"op1": 0.9},
        probe=probe,
        figures=probe.figures,
    )
    met = [trial for trial in trials if trial.met]
    assert all("op2" not in int8_ops(trial.plan) for trial in met)
    assert sum("op2" in int8_ops(trial.plan) for trial in trials) == 1


def test_what_accuracy_keeps_out_of_int8_stays_out_where_times_are_corrected():
    probe = Mistimed()
    trials = tried(
        chain(6),
        lambda plan: 0.9 if "op2" in int8_ops(plan) else 0.0,
        {"op1": 0.9},
        probe=probe,
        figures=probe.figures,
    )
    met = [trial for trial in trials if trial.met]
    assert int8_ops(met[-1].plan) == {"op0", "op1", "op4", "op5"}


def test_corrections_end_where_times_are_never_right():
    class Never(Mistimed):
        def figures(self, plan):
            return {"relative_latency": 0.9 - 0.01 * (6 - len(int8_ops(plan)))}

        def latencies(self, plans):
            return [float(len(int8_ops(plan))) for plan in plans]

    probe = Never()
    trials = tried(chain(6), lambda plan: 0.0, {}, probe=probe, figures=probe.figures)
    assert len(probe.asked) <= 2
    assert len(trials) <= 3
