"""Ops as a target quantizes them: weights, biases, and the widths that a plan may choose."""

from __future__ import annotations

import math
from collections.abc import Mapping

import numpy as np
import onnx_ir as ir

from neural_mp.adaptors.onnxrt.graph.edit import (
    get_constant_array,
    get_node_input,
    is_float32,
    list_used_outputs,
)
from neural_mp.adaptors.onnxrt.graph.subgraphs import iterate_node_bodies
from neural_mp.adaptors.onnxrt.kernels.ops import get_weight_axes
from neural_mp.core.enums import CalibrationAlgorithm, Granularity, Scheme
from neural_mp.core.precision import OpConfig
from neural_mp.core.quant_spec import RANGE_ALGORITHMS, QuantSpec
from neural_mp.targets import TargetProfile, Widths

#: Op type → position of its weight, constant in layers.
_WEIGHT_INPUT: Mapping[str, int] = {
    **dict.fromkeys(("Conv", "ConvTranspose", "Gemm", "MatMul"), 1),
    **dict.fromkeys(("LayerNormalization", "PRelu", "RMSNormalization"), 1),
}
#: Op types that multiply by a weight of several axes, with scales per channel.
_LAYERS = ("Conv", "ConvTranspose", "Gemm", "MatMul")
#: Op type → position of the bias.
_BIAS_INPUT: Mapping[str, int] = {
    **dict.fromkeys(("Conv", "ConvTranspose", "Gemm", "LayerNormalization"), 2)
}
#: Op type → positions of parameters that are no operands: limits, fill values, sizes.
_PARAMETERS: Mapping[str, tuple[int, ...]] = {
    "Clip": (1, 2),
    "Pad": (2,),
    "Resize": (1, 2),
    "Upsample": (1,),
}


def find_constant_weight(node: ir.Node) -> ir.Value | None:
    """Return the constant weight of an op; None for an op without one."""
    position = _WEIGHT_INPUT.get(node.op_type)
    value = None if position is None or node.domain else get_node_input(node, position)
    return value if value is not None and value.const_value is not None else None


def find_constant_bias(node: ir.Node) -> ir.Value | None:
    """Return the constant bias of an op; None for an op without one."""
    position = _BIAS_INPUT.get(node.op_type)
    value = None if position is None or node.domain else get_node_input(node, position)
    return value if value is not None and value.const_value is not None else None


def is_parameter(node: ir.Node, position: int) -> bool:
    """Whether an input is a parameter, which stays as it is, and no operand."""
    return position in _PARAMETERS.get(node.op_type, ())


def find_channel_axis(node: ir.Node) -> int | None:
    """Return the axis of the output channels in an op's weight; None for other ops."""
    weight = find_constant_weight(node)
    if node.op_type not in _LAYERS or weight is None:
        return None
    array = get_constant_array(weight)
    assert array is not None
    if node.op_type == "ConvTranspose":
        # With groups, the axis holds the channels of one group.
        return 1 if node.attributes.get_int("group", 1) == 1 else None
    if array.ndim == 1:
        return None
    return array.ndim - 1 if node.op_type == "MatMul" else get_weight_axes(node)[0]


def writes_float(node: ir.Node) -> bool:
    """Whether all results of an op hold float32."""
    return all(map(is_float32, list_used_outputs(node)))


def list_target_configs(node: ir.Node, profile: TargetProfile) -> tuple[OpConfig, ...] | str:
    """Return the configs of an op on a target, the cheapest first; or why it stays in float."""
    if node.domain:
        return f"{node.domain}.{node.op_type} is not an op of the ai.onnx domain"
    reason = profile.float_only.get(node.op_type)
    if reason is not None:
        return reason
    if list(iterate_node_bodies(node)):
        return "it runs nested graphs"
    widths = profile.widths_of(node.op_type)
    if not widths:
        return f"{profile.title} has no integer kernel for {node.op_type}"
    if not writes_float(node):
        return "its output is not known to be float32"
    uses = ((value, use) for value in list_used_outputs(node) for use in value.uses())
    if any(use.node.graph is not value.graph for value, use in uses):
        return "a nested graph reads its result"
    if not _has_finite_constants(node):
        return "a constant that it reads is not finite"
    bias = get_constant_array(find_constant_bias(node))
    if bias is not None and bias.ndim > 1 and bias.size != bias.shape[-1]:
        return "its bias is a matrix"
    if node.op_type == "Gemm" and {
        node.attributes.get_float(n, 1.0) for n in ("alpha", "beta")
    } != {1.0}:
        return "its factors alpha and beta are not 1"
    if (
        len(node.inputs) > 1
        and find_constant_weight(node) is None
        and find_constant_bias(node) is not None
    ):
        return "its weight is computed, but its bias constant"
    configs = dict.fromkeys(
        _config_in_widths(node, profile, width, algorithm)
        for width in widths
        for algorithm in RANGE_ALGORITHMS
    )
    return tuple(config for config in configs if config is not None)


def _config_in_widths(
    node: ir.Node, profile: TargetProfile, widths: Widths, algorithm: CalibrationAlgorithm
) -> OpConfig | None:
    """Return the config of an op in widths; None if the target has no storage type for them."""
    rules = profile.activation
    dtype = rules.of_bits(widths.activation_bits)
    if dtype is None:
        return None
    activation = QuantSpec(dtype, rules.scheme, Granularity.PER_TENSOR, algorithm)
    if find_constant_weight(node) is None or widths.weight_bits is None:
        return OpConfig(widths.precision, None, activation)
    stored = profile.weight.of_bits(node.op_type, widths.weight_bits)
    if stored is None:
        return None
    by_channel = find_channel_axis(node) is not None
    granularity = profile.weight.granularity_of(node.op_type)
    granularity = granularity if by_channel else Granularity.PER_TENSOR
    scheme = Scheme.ASYMMETRIC if stored.value.startswith("u") else Scheme.SYMMETRIC
    return OpConfig(widths.precision, QuantSpec(stored, scheme, granularity), activation)


def _has_finite_constants(node: ir.Node) -> bool:
    """Whether the constant operands of an op are finite, as integers cover no other values."""
    arrays = (
        get_constant_array(value)
        for position, value in enumerate(node.inputs)
        if is_float32(value) and not is_parameter(node, position)
    )
    return all(array is None or bool(np.isfinite(array).all()) for array in arrays)


#: Op types that multiply inputs and states by weights in every step: their second and third inputs.
_RECURRENT = ("LSTM", "GRU", "RNN")


def count_multiplications(node: ir.Node) -> float:
    """Return the number of multiplications of an op on the example's sizes; 0 if unknown."""
    if node.op_type in _RECURRENT and not node.domain:
        return _count_recurrent_multiplications(node)
    if node.op_type not in _LAYERS or not node.outputs:
        return 0.0
    result, data, weight = node.outputs[0], node.inputs[0], node.inputs[1]
    if result.shape is None or data is None or weight is None or weight.shape is None:
        return 0.0
    if data.shape is None or not (result.shape.is_static() and data.shape.is_static()):
        return 0.0
    written, read = math.prod(result.shape.numpy()), math.prod(data.shape.numpy())
    if node.op_type == "Conv":
        return float(written * math.prod(weight.shape.numpy()[1:]))
    if node.op_type == "ConvTranspose":
        return float(read * math.prod(weight.shape.numpy()[1:]))
    is_transposed = node.op_type == "Gemm" and bool(node.attributes.get_int("transA", 0))
    return float(written * data.shape.numpy()[0 if is_transposed else -1])


def _count_recurrent_multiplications(node: ir.Node) -> float:
    data, weights = node.inputs[0], node.inputs[1:3]
    if data is None or data.shape is None or not data.shape.is_static():
        return 0.0
    shapes = (value.shape for value in weights if value is not None)
    sizes = (math.prod(s.numpy()) for s in shapes if s is not None and s.is_static())
    return float(sum(sizes) * math.prod(data.shape.numpy()[:2]))
