from dataclasses import replace

import pytest

from neural_mp.amp import FourLists
from neural_mp.core.graph import Op, OpGraph
from neural_mp.core.plan import PrecisionPlan
from neural_mp.core.precision import FP32, OpConfig, Precision
from neural_mp.core.quant_spec import QuantSpec
from neural_mp.errors import PlanError, UnknownOperatorError
from neural_mp.space import Capability, TuningSpace, limit_to_reached
from neural_mp.space.capability import Constraints, OpConstraint, QuantConstraint

WEIGHT = QuantSpec("int8", "symmetric", "per_channel")


def int8(algorithm: str) -> OpConfig:
    return OpConfig(
        Precision.INT8, WEIGHT, QuantSpec("uint8", "asymmetric", "per_tensor", algorithm)
    )


BF16 = OpConfig(Precision.BF16)
PRODUCTS = frozenset({"conv2d", "linear"})
LAYER = Capability((int8("minmax"), int8("kl"), BF16, FP32))


@pytest.fixture
def space():
    graph = OpGraph(
        [
            Op("conv", "conv2d", ("x",)),
            Op("relu", "relu", ("conv",), fusion_group="conv"),
            Op("softmax", "softmax", ("relu",)),
            Op("fc", "linear", ("softmax",)),
        ],
        ["x"],
    )
    return TuningSpace(
        graph,
        {
            "conv": LAYER,
            "relu": Capability((BF16, FP32)),
            "softmax": Capability((FP32,), {Precision.BF16: "kept out"}),
            "fc": LAYER,
        },
        {Precision.BF16: FourLists(allow=PRODUCTS, clear=frozenset({"relu"}))},
    )


def test_only_ops_with_a_choice_are_decided(space):
    assert space.tunable_ops == ("conv", "fc")


def test_resolving_fills_in_what_is_not_said(space):
    plan = space.resolve(PrecisionPlan({"fc": OpConfig(Precision.INT8)})).plan
    assert plan == PrecisionPlan({"conv": FP32, "fc": int8("minmax")})


def test_resolving_twice_changes_nothing(space):
    once = space.resolve(PrecisionPlan({"fc": int8("kl"), "relu": BF16}))
    again = space.resolve(once.plan)
    assert again == once
    assert again.flow == once.flow


def test_a_plan_for_another_model_is_refused(space):
    with pytest.raises(UnknownOperatorError, match="'conf'.*did you mean 'conv'"):
        space.resolve(PrecisionPlan({"conf": FP32}))


def test_a_precision_an_op_cannot_run_in_is_refused_with_the_reason(space):
    with pytest.raises(PlanError, match=r"'softmax' \(softmax\) cannot run in bf16 here: kept out"):
        space.resolve(PrecisionPlan({"softmax": BF16}))


def test_an_unknown_int8_form_is_refused_with_the_nearest(space):
    wrong = OpConfig(Precision.INT8, WEIGHT, QuantSpec("int8", "symmetric", "per_tensor"))
    with pytest.raises(PlanError, match="does not support INT8 with.*set weight"):
        space.resolve(PrecisionPlan({"conv": wrong}))


def test_restricting_leaves_fp32(space):
    only = space.restricted_to([Precision.BF16])
    assert only.capabilities["conv"].configs == (BF16, FP32)
    assert space.restricted_to([]).tunable_ops == ()


def test_users_limits_hold_by_model_type_and_op(space):
    limited = space.apply_constraints(
        Constraints(
            model_wise=OpConstraint(activation=QuantConstraint(algorithm=("kl",))),
            optype_wise={"conv2d": OpConstraint(precisions=(Precision.BF16,))},
            op_wise={"f.*": OpConstraint(precisions=(Precision.INT8,))},
        )
    )
    assert limited.capabilities["conv"].configs == (BF16, FP32)
    assert limited.capabilities["fc"].configs == (int8("kl"), FP32)


def test_limits_on_what_is_not_there_are_refused(space):
    with pytest.raises(UnknownOperatorError, match="op_wise names 'covn'.*did you mean 'conv'"):
        space.apply_constraints(Constraints(op_wise={"covn": OpConstraint()}))
    with pytest.raises(UnknownOperatorError, match="optype_wise names 'conv3d'.*'conv2d'"):
        space.apply_constraints(Constraints(optype_wise={"conv3d": OpConstraint()}))


def test_the_fp32_plan_names_no_lower_precision(space):
    assert set(space.fp32_plan().counts()) == {Precision.FP32}


def test_a_resolved_plan_says_int8_only_of_what_runs_so():
    """An op that joins integers runs in INT8 only where integers are around it."""
    graph = OpGraph(
        [
            Op("a", "linear", ("x",)),
            Op("add", "add", ("a", "x"), joins_int8=True),
            Op("b", "softmax", ("add",)),
        ],
        ["x"],
    )
    joins = Capability((OpConfig(Precision.INT8, None, int8("minmax").activation), FP32))
    space = TuningSpace(graph, {"a": LAYER, "add": joins, "b": Capability()})
    resolved = space.resolve(space.fastest_plan())
    assert resolved.plan.precisions == {"a": Precision.INT8, "add": Precision.FP32}
    assert space.resolve(resolved.plan) == resolved


EMULATED = frozenset({Precision.BF16})


def test_emulated_16_bits_leave_the_space_with_a_reason(space):
    """Ops that can only follow a native op leave with the last native op."""
    emulated = {
        name: replace(capability, emulated=EMULATED if name in ("conv", "fc") else frozenset())
        for name, capability in space.capabilities.items()
    }
    remaining = replace(space, capabilities=emulated).without_emulated(())
    assert remaining.usable_precisions == (Precision.INT8, Precision.FP32)
    assert "emulated" in remaining.capabilities["conv"].refusal_reason(Precision.BF16)
    assert "follow" in remaining.capabilities["relu"].refusal_reason(Precision.BF16)


def test_native_16_bits_stay_beside_emulated_ones(space):
    emulated = dict(space.capabilities)
    emulated["fc"] = replace(LAYER, emulated=EMULATED)
    remaining = replace(space, capabilities=emulated).without_emulated(())
    assert remaining.choice("conv", Precision.BF16) == BF16
    assert remaining.choice("fc", Precision.BF16) is None
    assert remaining.choice("relu", Precision.BF16) is None  # it follows, and begins nowhere


@pytest.mark.parametrize(
    ("limits", "stays"),
    [
        (Constraints(op_wise={"fc": OpConstraint((Precision.BF16,))}), {"fc"}),
        (Constraints(optype_wise={"linear": OpConstraint((Precision.BF16,))}), {"fc"}),
        (Constraints(model_wise=OpConstraint((Precision.BF16,))), {"conv", "fc"}),
        (Constraints(op_wise={"fc": OpConstraint((Precision.INT8, Precision.BF16))}), set()),
        (Constraints(), set()),
    ],
)
def test_emulated_16_bits_stay_where_they_are_asked_for_in_place_of_int8(space, limits, stays):
    emulated = {
        n: replace(capability, emulated=EMULATED) for n, capability in space.capabilities.items()
    }
    remaining = replace(space, capabilities=emulated).apply_constraints(limits).without_emulated(())
    assert {op for op in remaining.tunable_ops if remaining.choice(op, Precision.BF16)} == stays


def test_emulated_16_bits_that_are_to_be_kept_stay(space):
    emulated = {
        n: replace(capability, emulated=EMULATED) for n, capability in space.capabilities.items()
    }
    whole = replace(space, capabilities=emulated)
    assert whole.without_emulated(EMULATED) == whole


def test_ops_that_calibration_never_came_to_lose_the_int8_that_needs_ranges(space):
    assert limit_to_reached(space, {"x", "softmax"}) is space
    remaining = limit_to_reached(space, {"x"})
    assert remaining.capabilities["conv"] == LAYER
    assert remaining.capabilities["fc"].configs == (BF16, FP32)
    assert "not reached by calibration" in remaining.capabilities["fc"].refusal_reason(
        Precision.INT8
    )


def test_int8_without_ranges_from_calibration_stays_where_calibration_never_came(space):
    dynamic = int8("dynamic")
    capability = replace(LAYER, configs=(int8("minmax"), dynamic, FP32))
    space = replace(space, capabilities={**space.capabilities, "fc": capability})
    assert limit_to_reached(space, {"x"}).capabilities["fc"].configs == (dynamic, FP32)
