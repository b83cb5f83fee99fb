"""What a plan leaves open follows, by the four lists, what it says."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from neural_mp.amp import FourLists, graph_of
from neural_mp.core.graph import Op, OpGraph
from neural_mp.core.plan import PrecisionPlan
from neural_mp.core.precision import FP32, OpConfig, Precision
from neural_mp.core.quant_spec import QuantSpec
from neural_mp.space import Capability, TuningSpace

BF16, FP16 = OpConfig(Precision.BF16), OpConfig(Precision.FP16)
INT8 = OpConfig(
    Precision.INT8,
    QuantSpec("int8", "symmetric", "per_channel"),
    QuantSpec("uint8", "asymmetric", "per_tensor"),
)
LISTS = FourLists(
    allow=frozenset({"conv", "matmul"}),
    deny=frozenset({"exp"}),
    infer=frozenset({"add", "softmax"}),
    clear=frozenset({"relu", "reshape"}),
)
LAYER = Capability((INT8, BF16, FP16, FP32))
OTHER = Capability((BF16, FP16, FP32))
NO_KERNEL = Capability((FP32,), dict.fromkeys([Precision.BF16, Precision.FP16], "no kernel"))


def space_of(*ops: tuple[str, str, list[str]], without=(), lists=LISTS) -> TuningSpace:
    """Products can run in everything, other ops in everything but INT8."""
    graph = graph_of(ops)
    return with_lists(graph, without, lists)


def with_lists(graph: OpGraph, without=(), lists=LISTS) -> TuningSpace:
    capabilities = {
        op.name: NO_KERNEL
        if op.name in without
        else (LAYER if op.type in ("conv", "matmul") else OTHER)
        for op in graph
    }
    return TuningSpace(graph, capabilities, {Precision.BF16: lists, Precision.FP16: lists})


@pytest.fixture
def net() -> TuningSpace:
    """Two layers, what lies between, and something dangerous beside."""
    return space_of(
        ("conv", "conv", ["x"]),
        ("relu", "relu", ["conv"]),
        ("exp", "exp", ["x"]),
        ("add", "add", ["relu", "exp"]),
        ("flat", "reshape", ["add"]),
        ("fc", "matmul", ["flat"]),
        ("softmax", "softmax", ["fc"]),
    )


def effective(space: TuningSpace, **configs: OpConfig) -> dict[str, str]:
    return {op: p.value for op, p in space.resolve(PrecisionPlan(configs)).effective.items()}


def test_only_products_are_decided(net):
    assert net.tunable_ops == ("conv", "fc")
    assert net.fastest_plan() == PrecisionPlan({"conv": INT8, "fc": INT8})
    bf16 = net.restricted_to([Precision.BF16])
    assert bf16.fastest_plan() == PrecisionPlan({"conv": BF16, "fc": BF16})


def test_the_rest_is_painted(net):
    assert effective(net, conv=BF16, fc=BF16) == {
        **dict.fromkeys(["conv", "relu", "flat", "fc", "softmax"], "bf16"),
        **dict.fromkeys(["exp", "add"], "fp32"),
    }


def test_int8_is_decided_first_and_nothing_spreads_through_it(net):
    assert effective(net, conv=BF16, fc=INT8)["softmax"] == "fp32"
    assert effective(net, conv=INT8, fc=BF16)["relu"] == "fp32"


def test_a_layer_that_is_put_back_takes_its_followers_along(net):
    assert effective(net, conv=FP32, fc=BF16)["relu"] == "fp32"
    assert effective(net, conv=BF16, fc=FP32)["softmax"] == "fp32"


def test_products_that_a_plan_does_not_name_stay_in_fp32(net):
    assert effective(net, conv=BF16)["fc"] == "fp32"


def test_what_a_plan_says_comes_before_the_lists(net):
    precisions = effective(net, conv=BF16, fc=BF16, add=BF16, softmax=FP32)
    assert (precisions["add"], precisions["softmax"], precisions["exp"]) == ("bf16", "fp32", "fp32")


def test_without_a_kernel_an_op_stays_and_passes_no_16_bits_on():
    space = space_of(
        ("conv", "conv", ["x"]),
        ("add", "add", ["conv"]),
        ("again", "add", ["add"]),
        without=["add"],
    )
    assert effective(space, conv=BF16) == {"conv": "bf16", "add": "fp32", "again": "fp32"}


def test_two_16_bit_precisions_do_not_spread_into_each_other():
    space = space_of(
        ("a", "conv", ["x"]), ("b", "conv", ["x"]), ("sum", "add", ["b"]), ("r", "relu", ["a"])
    )
    assert effective(space, a=BF16, b=FP16) == {
        "a": "bf16",
        "b": "fp16",
        "sum": "fp16",
        "r": "bf16",
    }


def test_ops_that_carry_int8_are_painted_only_where_they_do_not():
    graph = OpGraph(
        [
            Op("conv", "conv", ("x",)),
            Op("flat", "reshape", ("conv",), quantize_agnostic=True),
            Op("fc", "matmul", ("flat",)),
        ],
        ["x"],
        ["fc"],
    )
    space = with_lists(graph)
    assert effective(space, conv=INT8, fc=INT8)["flat"] == "int8"
    assert effective(space, conv=INT8, fc=BF16)["flat"] == "bf16"


def test_a_resolved_plan_means_the_same_under_other_lists(net):
    resolved = net.resolve(net.restricted_to([Precision.BF16]).fastest_plan()).plan
    assert set(resolved) == {op.name for op in net.graph}
    space = with_lists(net.graph, lists=FourLists(clear=frozenset({"add", "exp", "softmax"})))
    assert space.resolve(resolved).effective == net.resolve(resolved).effective


def test_reasons_come_from_the_lists_and_from_the_plan_only_where_these_say_otherwise(net):
    plan = net.resolve(PrecisionPlan({"conv": BF16, "fc": BF16, "add": BF16}))
    reasons = {op: paint.reason for op, paint in net.painting(plan, Precision.BF16).paints.items()}
    assert reasons == {
        "conv": "ALLOW, allowed",
        "relu": "CLEAR, allowed: downstream of conv 'conv'",
        "exp": "DENY, denied",
        "add": "INFER, allowed: set by the plan",
        "flat": "CLEAR, allowed: downstream of add 'add'",
        "fc": "ALLOW, allowed",
        "softmax": "INFER, allowed: downstream of matmul 'fc'",
    }


@st.composite
def spaces(draw) -> tuple[TuningSpace, PrecisionPlan]:
    """A random graph of all kinds of op, some without kernels, and a random plan."""
    kinds = ["conv", "matmul", "exp", "add", "softmax", "relu", "reshape", "other"]
    ops, names = [], ["x"]
    for index in range(draw(st.integers(1, 12))):
        sources = draw(st.lists(st.sampled_from(names), min_size=1, max_size=2, unique=True))
        names.append(f"op{index}")
        ops.append((names[-1], draw(st.sampled_from(kinds)), sources))
    without = draw(st.sets(st.sampled_from(names[1:])))
    space = space_of(*ops, without=without)
    configs = {
        op: draw(st.sampled_from(space.capabilities[op].configs))
        for op in draw(st.sets(st.sampled_from(names[1:])))
    }
    return space, PrecisionPlan(configs)


@given(spaces())
def test_resolving_changes_nothing_of_what_a_plan_means(drawn):
    space, plan = drawn
    resolved = space.resolve(plan)
    again = space.resolve(resolved.plan)
    assert again.plan == resolved.plan
    assert again.flow == resolved.flow


@pytest.mark.slow
@given(spaces())
def test_a_painting_gives_just_what_the_plan_means(drawn):
    space, plan = drawn
    resolved = space.resolve(plan)
    for precision in (Precision.BF16, Precision.FP16):
        expected = {op for op, p in resolved.effective.items() if p is precision}
        assert space.painting(resolved, precision).allowed == expected
