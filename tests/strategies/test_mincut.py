"""The strategy alone, against models made of arithmetic."""

from dataclasses import replace

import pytest
from made_up import BF16, INT8, MadeUpProbe, chain, hostile_tensor, int8_ops, run, tried

from neural_mp.core.graph import OpGraph
from neural_mp.core.precision import FP32, Precision
from neural_mp.space import TuningSpace


def writing_int8_only(space: TuningSpace) -> TuningSpace:
    ops = [replace(op, writes_int8=True) for op in space.graph]
    return replace(space, graph=OpGraph(ops, ["x"]))


def test_an_easy_model_takes_one_trial():
    (trial,) = tried(chain(), lambda plan: 0.0, {})
    assert int8_ops(trial.plan) == {f"op{i}" for i in range(6)}


def test_a_noisy_tensor_takes_two_and_only_its_reader_goes_back():
    trials = tried(chain(9), hostile_tensor, {"op1": 0.9})
    assert [trial.met for trial in trials[:2]] == [False, True]
    assert len(trials) <= 3
    assert len(int8_ops(trials[1].plan)) == 8


def test_a_writer_that_can_write_int8_only_goes_back_too():
    def harm(plan):
        return 0.9 if {"op1", "op2"} & int8_ops(plan) else 0.0

    trials = tried(writing_int8_only(chain(9)), harm, {"op1": 0.9})
    assert trials[1].met
    assert len(int8_ops(trials[1].plan)) == 7


def test_what_was_given_up_in_vain_comes_back():
    """Three tensors look noisy, one does the harm: the front between is bisected."""
    noise = {"op1": 0.9, "op4": 0.1, "op7": 0.06}
    trials = tried(chain(12), hostile_tensor, noise)
    best = max((t for t in trials if t.met), key=lambda t: len(int8_ops(t.plan)))
    assert len(int8_ops(best.plan)) == 11
    assert len(trials) <= 5


def test_more_goes_back_where_the_noisy_tensors_were_not_all():
    def two_places(plan):
        return 0.3 * ("op2" in int8_ops(plan)) + 0.3 * ("op5" in int8_ops(plan))

    trials = tried(chain(9), two_places, {"op1": 0.9, "op4": 0.04})
    best = max((t for t in trials if t.met), key=lambda t: len(int8_ops(t.plan)))
    assert len(int8_ops(best.plan)) >= 6
    assert len(trials) <= 6


@pytest.mark.parametrize("length", [2, 5, 12])
def test_a_target_that_nothing_meets_ends_soon_and_never_with_the_model_as_it_was(length):
    trials = tried(chain(length), lambda plan: 0.9, {"op1": 0.9})
    assert len(trials) <= 6
    assert all(int8_ops(trial.plan) for trial in trials)


def test_with_bf16_at_hand_an_op_goes_there_first():
    space = chain(9, configs=(*INT8, BF16, FP32))
    precisions = (Precision.INT8, Precision.BF16)
    trials = tried(space, hostile_tensor, {"op1": 0.9}, precisions=precisions)
    assert trials[1].met
    assert trials[1].plan.counts() == {Precision.INT8: 8, Precision.BF16: 1}


def test_without_int8_it_is_basic():
    space = chain(4, configs=(BF16, FP32))

    def harm(plan):
        return 0.9 if plan["op1"].precision is Precision.BF16 else 0.0

    trials = tried(space, harm, {}, precisions=(Precision.BF16,))
    assert [t.plan for t in trials] == [
        t.plan for t in run(space, harm, precisions=(Precision.BF16,))
    ]
    assert any(trial.met for trial in trials)


def unrepaired(plan):
    """Bad where op2 reads the hostile tensor in INT8 as it is."""
    return 0.9 if "op2" in int8_ops(plan) and not plan["op2"].corrections else 0.0


def test_a_tensor_that_can_be_repaired_costs_no_op_and_no_trial():
    (trial,) = tried(chain(9), unrepaired, {"op1": 0.9}, repaired={"op1": {"smooth": 1e-3}})
    assert len(int8_ops(trial.plan)) == 9
    assert trial.plan["op2"].corrections == ("smooth",)
    assert all(not trial.plan[op].corrections for op in trial.plan if op != "op2")


def test_a_repair_that_does_not_help_is_given_up_with_the_tensor():
    trials = tried(chain(9), hostile_tensor, {"op1": 0.9}, repaired={"op1": {"smooth": 0.3}})
    best = next(trial for trial in trials if trial.met)
    assert len(int8_ops(best.plan)) == 8
    assert len(trials) <= 4


class Clipping(MadeUpProbe):
    """All noise is gone with one calibration algorithm."""

    def output_noise(self, plan, unit=None):
        noise = super().output_noise(plan)
        return noise / 100 if plan["op0"].activation.algorithm == "kl" else noise


def test_another_algorithm_is_tried_where_a_few_samples_show_that_it_helps():
    def harm(plan):
        return 0.9 if plan["op2"] == INT8[0] else 0.0

    probe = Clipping({"op2": 1.0})
    first, second = tried(chain(6), harm, {"op1": 0.9}, probe=probe)
    assert second.met
    assert {config.activation.algorithm for config in second.plan.values()} == {"kl"}
    assert not first.met


def test_where_a_few_samples_show_no_gain_no_trial_is_spent_on_it():
    probe = MadeUpProbe({"op2": 1.0})
    trials = tried(chain(9), hostile_tensor, {"op1": 0.9}, probe=probe)
    assert {c.activation.algorithm for t in trials for c in t.plan.values() if c.activation} == {
        "minmax"
    }
    assert trials[1].met


def test_noise_that_does_not_reach_the_outputs_is_left_in_int8():
    """op4's tensor looks far worse than op2's, but what it spoils does not arrive."""
    noise = {"op1": 0.2, "op3": 0.9}
    trials = tried(chain(9), hostile_tensor, noise, probe=MadeUpProbe({"op2": 1.0, "op4": 1e-6}))
    best = max((t for t in trials if t.met), key=lambda t: len(int8_ops(t.plan)))
    assert len(int8_ops(best.plan)) == 8
    assert len(trials) <= 4


def test_the_same_problem_gives_the_same_plans():
    def plans():
        probe = MadeUpProbe({"op2": 1.0, "op5": 0.2})
        return [t.plan for t in tried(chain(9), hostile_tensor, {"op1": 0.9}, probe=probe)]

    assert plans() == plans()


def test_where_the_front_has_nothing_more_the_worst_go_back_one_two_four():
    """All noise looks alike, and what harms is spread over a third of the ops."""

    def harm(plan):
        return 0.1 * len({"op1", "op2", "op3"} & int8_ops(plan))

    noise = {f"op{i}": 1e-6 for i in range(9)} | {"op0": 3e-6, "op1": 3e-6, "op2": 3e-6}
    trials = tried(chain(9), harm, noise)
    best = max((t for t in trials if t.met), key=lambda t: len(int8_ops(t.plan)))
    assert len(int8_ops(best.plan)) >= 4
    assert len(trials) <= 8


class Learning(MadeUpProbe):
    """Weights can be learned, which takes the noise of op2 away."""

    gain: float = 0.01

    def reconstructable_ops(self):
        return frozenset({"op2"})

    def output_noise(self, plan, unit=None):
        noise = super().output_noise(plan)
        return noise * self.gain if plan["op2"].is_reconstructed else noise


def test_weights_are_learned_before_a_tensor_falls_back():
    def harm(plan):
        return 0.9 if plan["op2"] == INT8[0] else 0.0

    first, second = tried(chain(6), harm, {"op1": 0.9}, probe=Learning({"op2": 1.0}))
    assert not first.met
    assert second.met
    assert len(int8_ops(second.plan)) == 6
    assert second.plan["op2"].corrections == ("bias_correction", "adaround", "learned_scale")
    assert not any(second.plan[op].corrections for op in second.plan if op != "op2")


def test_learned_weights_that_gain_nothing_on_a_few_samples_are_not_tried():
    probe = Learning({"op2": 1.0})
    probe.gain = 0.95
    trials = tried(chain(9), hostile_tensor, {"op1": 0.9}, probe=probe)
    assert not any(config.is_reconstructed for t in trials for config in t.plan.values())
    assert trials[-1].met
