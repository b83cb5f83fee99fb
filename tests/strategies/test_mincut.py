"""The strategy alone, against models made of arithmetic."""

from dataclasses import replace

import pytest
from made_up import BF16, INT8, chain, hostile_tensor, int8_ops, run

from neural_mp.graph import OpGraph
from neural_mp.precision import FP32, Precision
from neural_mp.space import TuningSpace

NOISE = {f"op{i}": 1e-4 for i in range(12)}


def tried(space, harm, noise, **options):
    return run(space, harm, {**NOISE, **noise}, strategy="mincut", **options)


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
