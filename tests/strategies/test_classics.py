"""The classic strategies, against models made of arithmetic."""

from __future__ import annotations

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

from neural_mp.amp import FourLists
from neural_mp.core.graph import Op, OpGraph
from neural_mp.core.plan import PrecisionPlan
from neural_mp.core.precision import FP32, Precision
from neural_mp.errors import ConversionError
from neural_mp.space import Capability, TuningSpace
from neural_mp.strategies.base import Probe

BOTH = (Precision.INT8, Precision.BF16)


def fallen(trials) -> list[set[str]]:
    """What is in FP32 in every plan."""
    return [high_ops(trial.plan) for trial in trials]


def low_ops(plan: PrecisionPlan) -> set[str]:
    return set(plan) - high_ops(plan)


def of_types(**types: str) -> TuningSpace:
    """Ops side by side: name → type."""
    ops = [Op(name, kind, (f"x_{name}",)) for name, kind in types.items()]
    graph = OpGraph(ops, [f"x_{name}" for name in types])
    return TuningSpace(graph, {name: Capability((*INT8, FP32)) for name in types})


# conservative


def test_conservative_goes_from_convolutions_to_products_to_what_occurs_most():
    space = of_types(a="add", b="mul", c="mul", d="Gemm", e="MatMul", f="Conv2D", g="linear")
    trials = run(space, lambda plan: 0.0, strategy="conservative")
    steps = [{"f"}, {"e"}, {"g"}, {"d"}, {"b", "c"}, {"a"}]
    expected = [set().union(*steps[: count + 1]) for count in range(len(steps))]
    assert [int8_ops(trial.plan) for trial in trials] == expected


def test_conservative_leaves_a_type_that_fails_and_goes_on_with_the_next():
    space = of_types(a="conv2d", b="matmul", c="add", d="add")

    def products_harm(plan):
        return 0.5 * ("b" in int8_ops(plan))

    trials = run(space, products_harm, strategy="conservative")
    assert [int8_ops(t.plan) for t in trials] == [{"a"}, {"a", "b"}, {"a", "c", "d"}]
    assert [t.met for t in trials] == [True, False, True]


def test_conservative_gives_what_failed_in_int8_a_turn_in_bf16():
    space = chain(4, configs=(*INT8, BF16, FP32))

    def only_int8_convolutions_harm(plan):
        return 0.5 * bool({"op0", "op1"} & int8_ops(plan))

    trials = run(space, only_int8_convolutions_harm, precisions=BOTH, strategy="conservative")
    assert [t.met for t in trials] == [False, True, True]
    assert trials[-1].plan.counts() == {Precision.INT8: 1, Precision.BF16: 3}


def test_conservative_keeps_an_accurate_type_that_is_slow_by_itself():
    """Conversions around single layers may cost more than these gain, until the next ones join."""
    trials = run(
        chain(4),
        lambda plan: 0.0,
        strategy="conservative",
        figures=lambda plan: {"relative_latency": 1.2 if high_ops(plan) else 0.5},
    )
    assert [t.met for t in trials] == [False, True]


def test_conservative_moves_a_decision_with_the_first_of_its_types():
    ops = [Op("a", "conv", ("x",)), Op("b", "matmul", ("a",)), Op("c", "add", ("a",))]
    space = TuningSpace(OpGraph(ops, ["x"]), {op.name: Capability((*INT8, FP32)) for op in ops})
    trials = run(space, lambda plan: 0.0, strategy="conservative")
    assert [int8_ops(t.plan) for t in trials] == [{"a"}, {"a", "b", "c"}]


# mse


def test_mse_goes_back_in_order_of_the_noise_that_each_op_alone_causes():
    def two_places(plan):
        return 0.3 * len({"op1", "op4"} & int8_ops(plan))

    probe = MadeUpProbe({"op0": 0.1, "op1": 0.5, "op2": 0.3, "op3": 0.2, "op4": 0.4, "op5": 0.05})
    trials = run(chain(), two_places, strategy="mse", probe=probe)
    assert fallen(trials)[:4] == [set()] * 4  # the calibration algorithms
    assert fallen(trials)[4:6] == [{"op5"}, {"op0", "op1", "op2", "op3", "op4"}]  # the types
    assert fallen(trials)[6:] == [{"op1"}, {"op1", "op4"}]
    assert trials[-1].met
    assert [int8_ops(plan) for plan in probe.asked] == [{f"op{i}"} for i in range(5)]


def test_mse_without_a_probe_goes_by_the_noise_of_what_ops_read():
    noise = {"x": 0.1, "op0": 0.2, "op1": 0.3, "op2": 0.4}
    trials = run(chain(), hostile_tensor, noise, strategy="mse")
    assert fallen(trials)[6:] == [{"op3"}, {"op2", "op3"}]


def test_mse_does_not_mix_two_kinds_of_noise_when_the_probe_falls_silent():
    noise = {"x": 0.1, "op0": 0.2, "op1": 0.9, "op2": 0.4}
    probe = MadeUpProbe({"op0": 5.0}, limit=3)
    trials = run(chain(), hostile_tensor, noise, strategy="mse", probe=probe)
    assert fallen(trials)[6:] == [{"op2"}]


def test_mse_with_nothing_known_is_basic():
    plans = [
        [t.plan for t in run(chain(), hostile_tensor, strategy=name)] for name in ("mse", "basic")
    ]
    assert plans[0] == plans[1]


def test_mse_ranks_what_only_follows_into_16_bits():
    probe = MadeUpProbe({"softmax1": 0.9, "softmax0": 0.1, "softmax2": 0.2})

    def harm(plan):
        return 0.9 * ("softmax1" in low_ops(plan))

    trials = run(attention(), harm, precisions=(Precision.BF16,), strategy="mse", probe=probe)
    assert trials[-1].met
    assert "softmax1" in high_ops(trials[-1].plan)
    assert {"product0", "product1", "product2"} <= low_ops(trials[-1].plan)


# mse_v2


def test_mse_v2_goes_back_by_what_relieves_most_and_returns_the_mildest():
    """Three go back until the target is met, of which the first was in vain."""

    def harm(plan):
        return 0.3 * len({"op1", "op4"} & int8_ops(plan))

    probe = MadeUpProbe({"op0": 0.01, "op1": 0.2, "op2": 0.3, "op3": 0.01, "op4": 0.1, "op5": 0.0})
    trials = run(chain(), harm, strategy="mse_v2", probe=probe)
    assert fallen(trials) == [
        set(),
        {"op2"},
        {"op1", "op2"},
        {"op1", "op2", "op4"},  # met; without op4 it is what missed before
        {"op2", "op4"},  # op1 adds less than op2 does; but it misses, and that is the end
    ]
    assert [t.met for t in trials] == [False, False, False, True, False]


def test_mse_v2_returns_what_went_back_in_vain():
    def harm(plan):
        return 0.9 * ("op1" in int8_ops(plan))

    noise = {"op0": 0.1, "op1": 0.2, "op2": 0.5, "op3": 0.4}
    trials = run(chain(), harm, strategy="mse_v2", probe=MadeUpProbe(noise))
    # Without op1 again is known to miss, so op3 returns, then op2; op1 alone is left.
    assert fallen(trials) == [
        set(),
        {"op2"},
        {"op2", "op3"},
        {"op1", "op2", "op3"},
        {"op1", "op2"},
        {"op1"},
    ]
    assert [t.met for t in trials[3:]] == [True, True, True]


def test_mse_v2_scores_anew_in_every_step():
    """Each of two does nothing for the outputs while the other is there."""

    class Masking(Probe):
        def output_noise(self, plan, unit=None):
            low = int8_ops(plan)
            worst = 0.9 if {"op1", "op3"} & low else 0.0
            return worst + 0.1 * ("op0" in low) + 0.05 * ("op5" in low)

    def harm(plan):
        return 0.3 * bool({"op1", "op3"} & int8_ops(plan))

    trials = run(chain(), harm, strategy="mse_v2", probe=Masking())
    assert fallen(trials)[1:4] == [{"op0"}, {"op0", "op5"}, {"op0", "op5", "op1"}]
    assert fallen(trials)[4] == {"op0", "op5", "op1", "op3"}
    assert trials[4].met
    assert fallen(trials)[5:] == [{"op0", "op1", "op3"}, {"op1", "op3"}, {"op3"}]
    assert not trials[-1].met


def test_mse_v2_without_a_probe_goes_by_the_noise_of_what_ops_read():
    noise = {"x": 0.1, "op0": 0.2, "op1": 0.3, "op2": 0.4}
    trials = run(chain(), hostile_tensor, noise, strategy="mse_v2")
    assert fallen(trials) == [set(), {"op3"}, {"op2", "op3"}, {"op2"}]
    assert [t.met for t in trials] == [False, False, True, True]


def test_mse_v2_goes_to_bf16_first_and_on_to_fp32_if_that_is_not_enough():
    def harm(plan):
        return 0.9 * (plan["op2"].precision is not Precision.FP32)

    space = chain(4, configs=(*INT8, BF16, FP32))
    trials = run(space, harm, {"op1": 0.5}, BOTH, strategy="mse_v2")
    assert trials[-1].met
    assert trials[-1].plan["op2"] == FP32
    assert any(Precision.BF16 in trial.plan.counts() for trial in trials)


# hawq_v2


def test_hawq_v2_goes_back_by_the_sharpness_of_weights_then_by_noise():
    probe = MadeUpProbe(sensitivity={"op0": 0.1, "op3": 5.0, "op2": 2.0})
    noise = {"op3": 0.1, "op4": 0.9}  # read by op4, op5
    trials = run(chain(), lambda plan: 0.5, noise, strategy="hawq_v2", probe=probe)
    order = ["op3", "op2", "op0", "op5", "op4"]
    assert fallen(trials) == [set(order[:count]) for count in range(6)]


def test_hawq_v2_adds_up_what_moves_together():
    sharp = {"op0": 2.0, "branch0": 1.0, "branch1": 1.0, "branch2": 1.0}
    probe = MadeUpProbe(sensitivity=sharp)
    trials = run(branches(), lambda plan: 0.5, strategy="hawq_v2", probe=probe)
    together = {"branch0", "branch1", "branch2"}
    assert fallen(trials)[:3] == [set(), together, {"op0", *together}]


def test_hawq_v2_passes_on_that_there_are_no_gradients():
    class WithoutGradients(Probe):
        def weight_sensitivity(self):
            raise ConversionError("no gradients in here")

    with pytest.raises(ConversionError, match="no gradients"):
        run(chain(), hostile_tensor, strategy="hawq_v2", probe=WithoutGradients())


def test_hawq_v2_asks_for_gradients_only_where_they_are_needed():
    class Unasked(Probe):
        def weight_sensitivity(self):
            raise AssertionError

    assert len(run(chain(), lambda plan: 0.0, strategy="hawq_v2", probe=Unasked())) == 1


# auto_mixed_precision


def attention(blocks: int = 3, configs=(BF16, FP32)) -> TuningSpace:
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
    capabilities = {
        op.name: Capability(configs if op.type == "matmul" else (BF16, FP32)) for op in ops
    }
    return TuningSpace(OpGraph(ops, ["x"]), capabilities, {Precision.BF16: lists})


def amp_trials(space, harm, precisions=BOTH):
    return run(space, harm, precisions=precisions, strategy="auto_mixed_precision")


def test_auto_mixed_precision_takes_one_trial_where_all_is_well_and_never_int8():
    (trial,) = amp_trials(attention(configs=(*INT8, BF16, FP32)), lambda plan: 0.0)
    assert trial.plan.counts() == {Precision.BF16: 9}


def test_auto_mixed_precision_goes_back_by_type_then_op_by_op_from_the_end():
    def harm(plan):
        return 0.9 * ("op3" in low_ops(plan))

    trials = amp_trials(chain(configs=(BF16, FP32)), harm)
    convolutions = {f"op{i}" for i in range(5)}
    assert fallen(trials)[:3] == [set(), {"op5"}, convolutions]
    assert fallen(trials)[3:] == [{"op4"}, {"op3"}, {"op3"}]


def test_auto_mixed_precision_puts_followers_back_and_no_product():
    def harm(plan):
        return 0.2 * len({"softmax0", "softmax1", "softmax2"} & low_ops(plan))

    trials = amp_trials(attention(), harm)
    best = max((t for t in trials if t.met), key=lambda t: len(low_ops(t.plan)))
    assert low_ops(best.plan) >= {"product0", "product1", "product2"}


def test_auto_mixed_precision_goes_on_with_the_better_of_two_16_bit_precisions():
    def harm(plan):
        counts = plan.counts()
        return 0.5 if Precision.BF16 in counts else 0.2 * ("op1" in low_ops(plan))

    fp16 = type(BF16)(Precision.FP16)
    space = chain(4, configs=(*INT8, BF16, fp16, FP32))
    trials = amp_trials(space, harm, (*BOTH, Precision.FP16))
    assert [set(t.plan.counts()) for t in trials[:2]] == [{Precision.BF16}, {Precision.FP16}]
    assert trials[-1].met
    assert high_ops(trials[-1].plan) == {"op1"}
    assert all(set(t.plan.counts()) <= {Precision.FP16, Precision.FP32} for t in trials[1:])


def test_auto_mixed_precision_proposes_nothing_without_16_bits():
    assert amp_trials(chain(), lambda plan: 0.0, (Precision.INT8,)) == []
