"""The strategy alone, against models made of arithmetic: which ops harm, and how much."""

from __future__ import annotations

import pytest
from made_up import BF16, INT8, chain, hostile_tensor, int8_ops, run

from neural_mp.amp import FourLists
from neural_mp.core.graph import Op, OpGraph
from neural_mp.core.plan import PrecisionPlan
from neural_mp.core.precision import FP32, Precision
from neural_mp.space import Capability, TuningSpace


def test_an_easy_model_takes_one_trial():
    (trial,) = run(chain(), lambda plan: 0.0)
    assert int8_ops(trial.plan) == {f"op{i}" for i in range(6)}


def test_the_calibration_algorithms_are_tried_before_anything_falls_back():
    def only_kl(plan):
        return 0.0 if plan["op0"].activation.algorithm == "kl" else 0.5

    trials = run(chain(), only_kl)
    assert [t.plan["op0"].activation.algorithm for t in trials] == ["minmax", "percentile", "kl"]
    assert trials[-1].met


def test_readers_and_writer_of_the_worst_tensor_fall_back_together_then_the_writer_returns():
    trials = run(chain(), hostile_tensor, noise={"op1": 0.9, "op0": 0.01, "op3": 0.02})
    assert {"op1", "op2"} in [set(t.plan) - int8_ops(t.plan) for t in trials]
    assert trials[-1].met
    assert int8_ops(trials[-1].plan) == {"op0", "op1", "op3", "op4", "op5"}
    assert len(trials) == 8


def test_with_nothing_known_of_impact_it_is_found_by_trial():
    trials = run(chain(), hostile_tensor)
    assert trials[-1].met
    assert "op2" not in int8_ops(trials[-1].plan)
    assert len(int8_ops(trials[-1].plan)) == 5


def test_fallbacks_accumulate_until_two_bad_places_are_both_out():
    def two_places(plan):
        return 0.3 * ("op2" in int8_ops(plan)) + 0.3 * ("op4" in int8_ops(plan))

    trials = run(chain(8), two_places, noise={"op1": 0.8, "op3": 0.9, "op5": 0.01})
    met = [t for t in trials if t.met]
    assert met
    best = max(met, key=lambda t: len(int8_ops(t.plan)))
    assert len(int8_ops(best.plan)) == 6


def test_units_that_brought_nothing_are_lowered_again():
    """Two causes, the second at the very end: what was raised in between was in vain."""

    def harm(plan):
        return 0.3 * ("op2" in int8_ops(plan)) + 0.02 * ("op7" in int8_ops(plan))

    noise = {f"op{i}": 0.1 - i / 100 for i in range(8)} | {"op1": 0.9}
    trials = run(chain(8), harm, noise)
    best = max((t for t in trials if t.met), key=lambda t: len(int8_ops(t.plan)))
    assert {"op2", "op7"}.isdisjoint(int8_ops(best.plan))
    assert len(int8_ops(best.plan)) >= 5


@pytest.mark.parametrize("length", [2, 4, 8])
def test_the_model_as_it_was_is_never_proposed(length):
    for trial in run(chain(length), lambda plan: 0.5 * len(int8_ops(plan))):
        assert int8_ops(trial.plan)


def test_bf16_is_tried_before_fp32_where_it_was_asked_for():
    space = chain(configs=(*INT8, BF16, FP32))
    trials = run(space, hostile_tensor, {"op1": 0.9}, (Precision.INT8, Precision.BF16))
    assert trials[-1].met
    assert set(trials[-1].plan.counts()) == {Precision.INT8, Precision.BF16}


def test_fp32_follows_where_bf16_is_not_enough():
    def even_bf16_harms(plan):
        return 0.9 if plan["op2"].precision is not Precision.FP32 else 0.0

    space = chain(configs=(*INT8, BF16, FP32))
    trials = run(space, even_bf16_harms, {"op1": 0.9}, (Precision.INT8, Precision.BF16))
    assert trials[-1].met
    assert trials[-1].plan["op2"] == FP32


def test_bf16_alone_falls_back_op_by_op():
    space = chain(configs=(BF16, FP32))
    trials = run(
        space,
        lambda plan: 0.9 if plan["op3"].precision is Precision.BF16 else 0.0,
        precisions=(Precision.BF16,),
    )
    assert trials[-1].met
    assert trials[-1].plan.counts() == {Precision.BF16: 5, Precision.FP32: 1}


def test_a_hopeless_model_ends_by_itself():
    trials = run(chain(4), lambda plan: 0.5, noise={"op1": 0.5})
    assert not any(t.met for t in trials)
    assert len(trials) < 20


@pytest.mark.parametrize("length", [2, 5, 9])
def test_no_plan_leaves_the_space(length):
    space = chain(length)
    for trial in run(space, hostile_tensor if length > 2 else lambda plan: 0.5):
        assert all(trial.plan[op] in space.capabilities[op].configs for op in space.tunable_ops)


def attention(blocks: int = 3) -> TuningSpace:
    """Products with a softmax and an addition behind each, all of which can run in BF16."""
    ops = []
    for i in range(blocks):
        source = f"add{i - 1}" if i else "x"
        ops += [
            Op(f"product{i}", "matmul", (source,)),
            Op(f"softmax{i}", "softmax", (f"product{i}",)),
            Op(f"add{i}", "add", (f"softmax{i}",)),
        ]
    lists = FourLists(allow=frozenset({"matmul"}), infer=frozenset({"softmax", "add"}))
    capabilities = {op.name: Capability((BF16, FP32)) for op in ops}
    return TuningSpace(OpGraph(ops, ["x"]), capabilities, {Precision.BF16: lists})


def bf16_ops(plan: PrecisionPlan) -> set[str]:
    return {op for op, config in plan.items() if config.precision is Precision.BF16}


def test_a_type_that_only_follows_is_put_back_and_no_product_with_it():
    def softmaxes_harm(plan):
        return 0.2 * len({"softmax0", "softmax1", "softmax2"} & bf16_ops(plan))

    trials = run(attention(), softmaxes_harm, precisions=(Precision.BF16,))
    best = max((t for t in trials if t.met), key=lambda t: len(bf16_ops(t.plan)))
    assert bf16_ops(best.plan) >= {"product0", "product1", "product2"}
    assert len(trials) <= 10


def test_of_such_a_type_only_what_harms():
    trials = run(
        attention(), lambda plan: 0.9 * ("softmax1" in bf16_ops(plan)), precisions=(Precision.BF16,)
    )
    best = max((t for t in trials if t.met), key=lambda t: len(bf16_ops(t.plan)))
    # The addition behind it is behind no op in 16 bits any more.
    assert set(best.plan) - bf16_ops(best.plan) == {"softmax1", "add1"}
    assert len(trials) <= 10


def test_two_types_that_harm_go_back_together_and_no_product():
    """Side by side, so that neither takes the other along; the third type stays."""
    ops = [Op("product", "matmul", ("x",))]
    ops += [Op(name, name, ("product",)) for name in ("softmax", "add", "tanh")]
    lists = FourLists(allow=frozenset({"matmul"}), infer=frozenset({"softmax", "add", "tanh"}))
    capabilities = {op.name: Capability((BF16, FP32)) for op in ops}
    space = TuningSpace(OpGraph(ops, ["x"]), capabilities, {Precision.BF16: lists})

    def both_harm(plan):
        low = bf16_ops(plan)
        return 0.2 * ("softmax" in low) + 0.3 * ("add" in low)

    trials = run(space, both_harm, precisions=(Precision.BF16,))
    best = max((t for t in trials if t.met), key=lambda t: len(bf16_ops(t.plan)))
    assert bf16_ops(best.plan) == {"product", "tanh"}
    assert len(trials) <= 8


def test_what_follows_a_product_goes_back_with_it():
    trials = run(
        attention(), lambda plan: 0.9 * ("product1" in bf16_ops(plan)), precisions=(Precision.BF16,)
    )
    best = max((t for t in trials if t.met), key=lambda t: len(bf16_ops(t.plan)))
    # The addition in front of it hands 16 bits to nothing that needs them, but follows still.
    assert {"product0", "softmax0", "product2"} <= bf16_ops(best.plan)
    assert {"product1", "softmax1", "add1"}.isdisjoint(bf16_ops(best.plan))
