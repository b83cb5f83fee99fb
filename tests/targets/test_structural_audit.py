"""Every rule of every profile that a file can be checked for: a planted violation is found."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import onnx
import pytest
from onnx import helper
from qdq_models import constant_of, gated_net, node_of, pairs_of, put_constant

from neural_mp.adaptors.onnxrt.targets.audit.structural_audit import Rule, check_structure
from neural_mp.targets import TargetProfile, load_profile
from neural_mp.targets.profile import ALIASES, profile_names

PROFILES = [name for name in profile_names() if name not in ALIASES]
CONV, GEMM, MUL = "conv/raw.Conv", "scores/raw.Gemm", "product/raw.Mul"
#: Type → another of the same bits.
OTHER_SIGN = {"uint8": "int8", "int8": "uint8", "uint16": "int16", "int16": "uint16"}

#: Plants a violation, and returns the name of the op or value that breaks the rule.
Violation = Callable[[onnx.ModelProto, TargetProfile], str]


def is_closed(profile: TargetProfile) -> bool:
    """Whether the results of all ops are stored."""
    return profile.placement.outputs == "always"


def plant_opset(model, profile):
    model.opset_import[0].version = profile.opset[0] - 1
    return ""


def plant_domain(model, profile):
    model.opset_import.append(helper.make_opsetid("com.microsoft", 1))
    node = next(pairs_of(model, "x"))
    node.domain = "com.microsoft"
    return node.name


def plant_shapes(model, profile):
    model.graph.input[0].type.tensor_type.shape.dim[0].dim_param = "batch"
    return "x"


def plant_type(model, profile):
    zero = constant_of(model, "x/zero")
    put_constant(model, "x/zero", zero.astype(OTHER_SIGN[zero.dtype.name]))
    return "x/stored.QuantizeLinear"


def plant_zero_point(model, profile):
    zero = constant_of(model, "x/zero")
    put_constant(model, "x/zero", zero + zero.dtype.type(1))
    return "x/stored.QuantizeLinear"


def plant_zero_point_of_weight(model, profile):
    zero = constant_of(model, "conv/weight/zero")
    put_constant(model, "conv/weight/zero", zero + zero.dtype.type(1))
    return CONV


def plant_scale(model, profile):
    factor = 1.3 if profile.activation.scale == "power_of_two" else -1.0
    put_constant(model, "x/scale", constant_of(model, "x/scale") * np.float32(factor))
    return "x/stored.QuantizeLinear"


def plant_scale_of_weight(model, profile):
    scale = constant_of(model, "conv/weight/scale")
    put_constant(model, "conv/weight/scale", scale * np.float32(1.3))
    return CONV


def plant_pair(model, profile):
    _, reader = pairs_of(model, "x")
    scale = constant_of(model, "x/scale")
    reader.input[1] = put_constant(model, "x/scale/other", scale * np.float32(2))
    return reader.name


def plant_granularity(model, profile):
    if profile.weight.granularity == "per_channel":  # along the input channels
        scale, zero = np.full(3, 0.01, np.float32), np.zeros(3, np.int8)
    else:  # along the output channels
        scale, zero = np.full(8, 2.0**-7, np.float32), np.zeros(8, np.int8)
    put_constant(model, "conv/weight/scale", scale)
    put_constant(model, "conv/weight/zero", zero)
    for node in pairs_of(model, "conv/weight"):
        del node.attribute[:]
        axis = 1 if profile.weight.granularity == "per_channel" else 0
        node.attribute.append(helper.make_attribute("axis", axis))
    return CONV


def plant_granularity_of_activation(model, profile):
    put_constant(model, "x/scale", np.full(3, constant_of(model, "x/scale")))
    put_constant(model, "x/zero", np.full(3, constant_of(model, "x/zero")))
    return "x/stored.QuantizeLinear"


def plant_weight(model, profile):
    reader = node_of(model, "conv/weight/float.DequantizeLinear")
    if profile.placement.weights == "qdq":
        reader.input[0] = put_constant(model, "integers", np.ones((8, 3, 3, 3), np.int8))
    else:
        put_constant(model, "given", np.ones((8, 3, 3, 3), np.float32))
        rounding = helper.make_node(
            "QuantizeLinear", ["given", *reader.input[1:]], ["rounded"], "rounding"
        )
        rounding.attribute.extend(reader.attribute)
        index = list(model.graph.node).index(reader)
        reader.input[0] = "rounded"
        model.graph.node.insert(index, rounding)
    return CONV


def plant_bias(model, profile):
    name = "conv/bias/scale"
    if profile.bias == "int32":
        put_constant(model, name, constant_of(model, name) * np.float32(2))
    elif profile.bias == "int8":
        put_constant(model, "conv/bias/zero", np.zeros((), np.int32))
        put_constant(model, "conv/bias/stored", np.ones(8, np.int32))
    else:
        put_constant(model, "bias", np.ones(8, np.int32))
        put_constant(model, "bias/scale", np.float32(0.01))
        reader = helper.make_node("DequantizeLinear", ["bias", "bias/scale"], ["bias/float"])
        model.graph.node.insert(0, reader)
        node_of(model, CONV).input[2] = "bias/float"
    return CONV


def plant_ring_of_operand(model, profile):
    """Let an op read what was computed ahead of a pair."""
    name, position, source = (MUL, 1, "gate/raw") if is_closed(profile) else (GEMM, 0, "flat/raw")
    node_of(model, name).input[position] = source
    return name


def plant_ring_of_weight(model, profile):
    put_constant(model, "plain", np.ones((8, 3, 3, 3), np.float32))
    node_of(model, CONV).input[1] = "plain"
    return CONV


def plant_ring_of_result(model, profile):
    model.graph.output.append(helper.make_tensor_value_info("product/raw", 1, None))
    return MUL


def plant_width(model, profile):
    """Store a weight in 16 bits: no profile has such weights in the narrowest widths."""
    zero = constant_of(model, "conv/weight/zero")
    put_constant(model, "conv/weight/zero", zero.astype(np.int16))
    if profile.placement.weights == "dq":
        integers = constant_of(model, "conv/weight/stored")
        put_constant(model, "conv/weight/stored", integers.astype(np.int16))
    return CONV


def plant_two_widths(model, profile):
    dtype = profile.activation.of_bits(16)
    zero = np.asarray(0, dtype.value)
    put_constant(model, "product/zero", zero)
    return MUL


def plant_same_scale(model, profile):
    put_constant(model, "pool/scale", constant_of(model, "pool/scale") * np.float32(2))
    return "pool/raw.MaxPool"


def plant_fixed(model, profile):
    put_constant(model, "gate/scale", constant_of(model, "gate/scale") * np.float32(2))
    return "gate/raw.Sigmoid"


def plant_shift(model, profile):
    put_constant(model, "conv/scale", np.float32(2.0**-20))
    return CONV


def plant_shift_of_bias(model, profile):
    put_constant(model, "conv/bias/scale", np.float32(2.0**9))
    return CONV


def plant_refused(model, profile):
    node = node_of(model, "gate/raw.Sigmoid")
    node.op_type = "Erf"
    return node.name


def has_several_widths(profile):
    return is_closed(profile) and len({dtype.bits for dtype in profile.activation.types}) > 1


#: Violation → the rule that it breaks, and the profiles that have the rule.
VIOLATIONS: dict[Violation, tuple[Rule, Callable[[TargetProfile], bool]]] = {
    plant_opset: (Rule.OPSET, lambda p: True),
    plant_domain: (Rule.DOMAIN, lambda p: True),
    plant_shapes: (Rule.SHAPES, lambda p: p.shapes == "static"),
    plant_type: (Rule.TYPE, lambda p: True),
    plant_zero_point: (Rule.ZERO_POINT, lambda p: p.activation.scheme == "symmetric"),
    plant_zero_point_of_weight: (Rule.ZERO_POINT, lambda p: True),
    plant_scale: (Rule.SCALE, lambda p: True),
    plant_scale_of_weight: (Rule.SCALE, lambda p: p.weight.scale == "power_of_two"),
    plant_pair: (Rule.PAIR, lambda p: True),
    plant_granularity: (Rule.GRANULARITY, lambda p: True),
    plant_granularity_of_activation: (Rule.GRANULARITY, lambda p: True),
    plant_weight: (Rule.WEIGHT, lambda p: True),
    plant_bias: (Rule.BIAS, lambda p: True),
    plant_ring_of_operand: (Rule.RING, lambda p: True),
    plant_ring_of_weight: (Rule.RING, lambda p: True),
    plant_ring_of_result: (Rule.RING, is_closed),
    plant_width: (Rule.WIDTH, lambda p: True),
    plant_two_widths: (Rule.WIDTH, has_several_widths),
    plant_same_scale: (Rule.SAME_SCALE, lambda p: True),
    plant_fixed: (Rule.FIXED, lambda p: bool(p.fixed)),
    plant_shift: (Rule.SHIFT, lambda p: p.shifts is not None),
    plant_shift_of_bias: (Rule.SHIFT, lambda p: p.shifts is not None),
    plant_refused: (Rule.REFUSED, lambda p: "Erf" in p.refuse),
}
CASES = [
    pytest.param(name, plant, rule, id=f"{name}-{plant.__name__.removeprefix('plant_')}")
    for name in PROFILES
    for plant, (rule, applies) in VIOLATIONS.items()
    if applies(load_profile(name))
]


@pytest.mark.parametrize("name", PROFILES)
def test_a_correct_file_is_clean_in_every_width(name):
    profile = load_profile(name)
    for dtype in profile.activation.types:
        model = gated_net(profile, dtype.bits)
        onnx.checker.check_model(model, full_check=True)
        content = model.SerializeToString(deterministic=True)
        assert check_structure(model, profile) == []
        assert model.SerializeToString(deterministic=True) == content


@pytest.mark.parametrize(("name", "plant", "rule"), CASES)
def test_a_planted_violation_is_found(name, plant, rule):
    profile = load_profile(name)
    model = gated_net(profile, 16 if plant is plant_fixed else None)
    op = plant(model, profile)
    # A layer with a float weight is one in float, unless the plan has it in integers.
    integer_ops = {CONV} if plant is plant_ring_of_weight else None
    findings = [f for f in check_structure(model, profile, integer_ops) if f.rule == rule]
    assert op in {finding.op for finding in findings}
    assert all(" must " in finding.message for finding in findings)


@pytest.mark.parametrize("name", PROFILES)
def test_every_profile_has_most_rules(name):
    assert len({case.values[2] for case in CASES if case.values[0] == name}) >= 10


def test_the_message_names_the_op_and_both_values():
    profile = load_profile("vitisai-xint8")
    model = gated_net(profile)
    plant_same_scale(model, profile)
    (finding,) = [f for f in check_structure(model, profile) if f.rule == Rule.SAME_SCALE]
    assert finding.op_type == "MaxPool"
    assert finding.message == (
        "MaxPool 'pool/raw.MaxPool' must keep type, scale and zero point of its input, int8, scale "
        "0.03125, zero point 0, got int8, scale 0.0625, zero point 0"
    )


def test_a_target_with_quantized_inputs_refuses_floats():
    profile = load_profile("qdq")
    profile = replace(profile, placement=replace(profile.placement, io="quantized"))
    findings = check_structure(gated_net(profile), profile)
    assert {(finding.op, finding.rule) for finding in findings} == {
        ("x", Rule.IO),
        ("scores/float", Rule.IO),
    }


def test_a_target_without_float_refuses_float_ops():
    profile = replace(load_profile("qdq"), float_type=None)
    model = gated_net(profile)
    model.graph.node.append(helper.make_node("Relu", ["scores/float"], ["positive"], "last"))
    model.graph.output.append(helper.make_tensor_value_info("positive", 1, None))
    (finding,) = check_structure(model, profile)
    assert (finding.op, finding.rule) == ("last", Rule.REFUSED)


def test_a_plan_decides_which_ops_need_a_ring():
    """An op in float at the edge of ops in integers also has Q/DQ on some sides."""
    profile = load_profile("qnn")
    model = gated_net(profile)
    plant_ring_of_operand(model, profile)
    integer_ops = {CONV, GEMM, MUL, "gate/raw.Sigmoid", "mean/raw.GlobalAveragePool"}
    rules = [finding.rule for finding in check_structure(model, profile, integer_ops)]
    assert rules == [Rule.RING, Rule.RING]
    assert check_structure(model, profile, integer_ops - {MUL, "gate/raw.Sigmoid"}) == []


def test_a_layer_with_a_float_weight_between_integers_is_one_in_float():
    profile = load_profile("qnn")
    model = gated_net(profile)
    plant_ring_of_weight(model, profile)
    node_of(model, CONV).input[2] = put_constant(model, "offset", np.ones(8, np.float32))
    for unused in ("conv/weight/float.DequantizeLinear", "conv/bias/float.DequantizeLinear"):
        model.graph.node.remove(node_of(model, unused))
    assert check_structure(model, profile) == []


def test_a_plan_with_an_op_that_the_target_has_in_float_only_is_found():
    profile = load_profile("qnn")
    model = gated_net(profile)
    node_of(model, "gate/raw.Sigmoid").op_type = "Mish"
    assert check_structure(model, profile) == []
    (finding,) = check_structure(model, profile, {"gate/raw.Mish", "gate/raw.Sigmoid"})
    assert finding.rule == Rule.WIDTH
    assert "must be in float, got a8" in finding.message
