"""Quantization by the rules of a target: weights, biases and widths of ops, grids, and ranges.

Tensors share a scale where ops only move their values.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass

import numpy as np
import onnx_ir as ir

from neural_mp.adaptors.common.signatures.signature import Array
from neural_mp.adaptors.onnxrt.graph.edit import (
    get_constant_array,
    get_node_input,
    is_float32,
    list_used_outputs,
)
from neural_mp.adaptors.onnxrt.graph.subgraphs import iterate_node_bodies
from neural_mp.adaptors.onnxrt.kernels.ops import get_weight_axes
from neural_mp.core.enums import CalibrationAlgorithm, Granularity, QuantDType, Scheme
from neural_mp.core.observations import Range
from neural_mp.core.precision import OpConfig
from neural_mp.core.quant_spec import RANGE_ALGORITHMS, QuantSpec
from neural_mp.targets import TargetProfile, Widths
from neural_mp.targets.profile import Activations

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
#: Storage type → element type of ONNX.
ELEMENT_TYPES = {
    QuantDType.INT8: ir.DataType.INT8,
    QuantDType.UINT8: ir.DataType.UINT8,
    QuantDType.INT16: ir.DataType.INT16,
    QuantDType.UINT16: ir.DataType.UINT16,
    QuantDType.INT4: ir.DataType.INT4,
}
#: Narrowest range of an activation: ONNX Runtime's preset for QNN, `MinimumRealRange`.
MIN_RANGE_WIDTH = 1e-4
#: Smallest scale of a weight: float32 cannot divide by far smaller ones.
_MIN_WEIGHT_SCALE = 1e-12
#: Ops that limit values, and leave values within the limits as they are.
_LIMITING = ("Relu", "Clip")
#: Op type → the bounds of its results.
_BOUNDS: Mapping[str, Range] = {
    **dict.fromkeys(("Sigmoid", "HardSigmoid", "Softmax"), (0.0, 1.0)),
    **dict.fromkeys(("Tanh", "Sin", "Cos", "Erf"), (-1.0, 1.0)),
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
    if stored.bits < 8 and granularity is Granularity.PER_TENSOR:
        return None
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


def get_type_limits(dtype: QuantDType) -> tuple[int, int]:
    """Return the least and the largest integer of a storage type."""
    if dtype.value.startswith("u"):
        return 0, 2**dtype.bits - 1
    return -(2 ** (dtype.bits - 1)), 2 ** (dtype.bits - 1) - 1


#: Bounds of values that may be of any size.
UNBOUNDED: Range = (-math.inf, math.inf)
#: Range of a grid of 16 bits over the calibrated range.
_RANGE_RATIO_16_BITS = 2.0


@dataclass(frozen=True)
class Grid:
    """Quantization parameters of a tensor: float = scale · (integer - zero point).

    Attributes:
        scale: one number, or one for each index of `axis`; float32.
        zero_point: the integer at 0, of the same shape.
        axis: the axis of the channels; None for one scale.
    """

    dtype: QuantDType
    scale: Array
    zero_point: Array
    axis: int | None = None

    def quantize_values(self, values: Array) -> Array:
        """Return the nearest integers, ties to even, clipped to the storage type."""
        shape = [1] * values.ndim
        if self.axis is not None:
            shape[self.axis] = -1
        scale, zero = (part.reshape(shape) for part in (self.scale, self.zero_point))
        low, high = get_type_limits(self.dtype)
        steps = np.rint(values / scale) + zero.astype(np.float64)
        return np.clip(steps, low, high).astype(ELEMENT_TYPES[self.dtype].numpy())

    def dequantize_integers(self, integers: Array) -> Array:
        """Return the floats of integers, float32."""
        shape = [1] * integers.ndim
        if self.axis is not None:
            shape[self.axis] = -1
        scale, zero = (part.reshape(shape) for part in (self.scale, self.zero_point))
        return ((integers.astype(np.float64) - zero) * scale).astype(np.float32)


def make_observed_grid(
    observed: Range, dtype: QuantDType, activation: Activations, bounds: Range = UNBOUNDED
) -> Grid:
    """Return the grid of a tensor with a calibrated range; in 16 bits, of twice the range.

    Values of other data exceed the range and saturate; one bit of 16 for them costs 6 of 98 dB.
    `bounds` are those of the values on any data. A grid beyond them gains nothing, and QNN computes
    a Clip wrongly that writes such a grid (2 dB behind an Add).
    """
    low, high = observed
    if dtype in (QuantDType.INT16, QuantDType.UINT16):
        low = min(low, max(_RANGE_RATIO_16_BITS * low, bounds[0]))
        high = max(high, min(_RANGE_RATIO_16_BITS * high, bounds[1]))
    is_power = activation.needs_power_of_two
    return make_activation_grid(low, high, dtype, activation.scheme, is_power)


def make_activation_grid(
    low: float, high: float, dtype: QuantDType, scheme: Scheme, power_of_two: bool
) -> Grid:
    """Return the grid that covers a range, with an exact zero.

    The zero point of a symmetric grid is 0, or the middle of an unsigned type.
    """
    least, largest = get_type_limits(dtype)
    low, high = min(low, 0.0), max(high, 0.0)
    high = max(high, low + MIN_RANGE_WIDTH)
    if scheme is Scheme.SYMMETRIC:
        scale, zero = max(-low, high) / ((largest - least) // 2), (least + largest + 1) // 2
    else:
        scale = (high - low) / (largest - least)
        zero = round(least - low / scale)
    if power_of_two:
        scale = 2.0 ** float(np.ceil(np.log2(scale)))
        zero = zero if scheme is Scheme.SYMMETRIC else round(least - low / scale)
    return make_fixed_grid(scale, int(np.clip(zero, least, largest)), dtype)


def make_fixed_grid(scale: float, zero_point: int, dtype: QuantDType) -> Grid:
    """Return the grid of one scale and zero point."""
    zero = np.asarray(zero_point, ELEMENT_TYPES[dtype].numpy())
    return Grid(dtype, np.asarray(scale, np.float32), zero)


def make_weight_grid(
    weight: Array,
    dtype: QuantDType,
    axis: int | None,
    power_of_two: bool,
    least_scale: Array | float = 0.0,
) -> Grid:
    """Return the grid of a weight: symmetric for a signed type, asymmetric for an unsigned one.

    `least_scale` is the smallest scale of each channel, or of the whole weight.
    """
    if dtype in (QuantDType.UINT8, QuantDType.UINT16):
        low, high = float(weight.min(initial=0)), float(weight.max(initial=0))
        steps = get_type_limits(dtype)[1]
        high = max(high, low + steps * float(np.max(least_scale)))
        return make_activation_grid(low, high, dtype, Scheme.ASYMMETRIC, power_of_two)
    axes = None if axis is None else tuple(i for i in range(weight.ndim) if i != axis)
    magnitude = np.abs(weight).max(axis=axes, initial=0)
    scale = np.maximum(
        magnitude / get_type_limits(dtype)[1], np.maximum(least_scale, _MIN_WEIGHT_SCALE)
    )
    if power_of_two:
        scale = np.exp2(np.ceil(np.log2(scale)))
    scale = scale.astype(np.float32)
    return Grid(dtype, scale, np.zeros_like(scale, ELEMENT_TYPES[dtype].numpy()), axis)


def keeps_scale(node: ir.Node, profile: TargetProfile) -> bool:
    """Whether an op moves integers: its results have the scale of its operands."""
    return not node.domain and node.op_type in profile.same_scale and writes_float(node)


def list_moved_operands(node: ir.Node) -> list[int]:
    """Return the positions of the tensors that an op moves: the first, or all of a Concat."""
    positions = range(len(node.inputs)) if node.op_type == "Concat" else (0,)
    return [position for position in positions if is_float32(node.inputs[position])]


def join_ranges(
    graph: ir.Graph, ranges: Mapping[str, Range], profile: TargetProfile
) -> dict[str, Range]:
    """Return the ranges, with one range for all tensors that an op moves into one.

    A tensor that a Relu or Clip alone reads has the range of the result: integers limit values by
    themselves, and compilers that fuse both ops round once.
    """
    roots: dict[ir.Value, ir.Value] = {}

    def find_root_of(value: ir.Value) -> ir.Value:
        while value in roots:
            value = roots[value]
        return value

    joined = dict(ranges)
    for node in graph:
        if not keeps_scale(node, profile):
            continue
        values = (node.inputs[position] for position in list_moved_operands(node))
        moved = [find_root_of(value) for value in values if value and value.const_value is None]
        if not moved:
            continue
        spans = [joined[str(v.name)] for v in moved if str(v.name) in joined]
        if spans:
            joined[str(moved[0].name)] = min(s[0] for s in spans), max(s[1] for s in spans)
        for value in (*moved[1:], *list_used_outputs(node)):
            if value is not moved[0]:
                roots[value] = moved[0]
    for value in roots:
        span = joined.get(str(find_root_of(value).name))
        if span is not None:
            joined[str(value.name)] = span
    for node in reversed(graph):
        limited = _find_limited_operand(node, profile)
        result = None if limited is None else joined.get(str(node.outputs[0].name))
        if limited is not None and result is not None:
            joined[str(limited.name)] = result
    return joined


def _find_limited_operand(node: ir.Node, profile: TargetProfile) -> ir.Value | None:
    """Return the computed tensor that a Relu or Clip alone reads; None for other ops."""
    if node.op_type not in _LIMITING or node.domain:
        return None
    value = node.inputs[0]
    producer = None if value is None else value.producer()
    if value is None or producer is None or keeps_scale(producer, profile):
        return None
    return value if len(value.uses()) == 1 and not value.is_graph_output() else None


def map_result_bounds(graph: ir.Graph, profile: TargetProfile) -> dict[str, Range]:
    """Return value → the bounds of what ops compute on any data; one for tensors of one scale."""
    bounds = {
        str(value.name): _find_bounds(node)
        for node in graph
        for value in list_used_outputs(node)
        if not keeps_scale(node, profile)
    }
    inputs = {str(value.name): UNBOUNDED for value in graph.inputs}
    return join_ranges(graph, {**inputs, **bounds}, profile)


def _find_bounds(node: ir.Node) -> Range:
    if node.op_type == "Clip" and not node.domain:
        limits = (get_constant_array(get_node_input(node, position)) for position in (1, 2))
        low, high = (None if limit is None else float(limit) for limit in limits)
        return UNBOUNDED[0] if low is None else low, UNBOUNDED[1] if high is None else high
    return UNBOUNDED if node.domain else _BOUNDS.get(node.op_type, UNBOUNDED)


def map_touching_ops(
    graph: ir.Graph, ops: Collection[str], profile: TargetProfile
) -> dict[ir.Value, list[str]]:
    """Return tensor → the ops among `ops` that write or read it, also through moving ops.

    Ops are in the order of the graph: the one that writes the tensor is the first.
    """
    roots: dict[ir.Value, tuple[ir.Value, ...]] = {}
    touching: dict[ir.Value, list[str]] = {}
    for node in graph:
        name = str(node.name)
        if node.inputs and keeps_scale(node, profile):
            moved = [node.inputs[position] for position in list_moved_operands(node)]
            computed = [v for v in moved if v is not None and v.const_value is None]
            sources = tuple(root for value in computed for root in roots.get(value, (value,)))
            if sources:
                roots.update(dict.fromkeys(list_used_outputs(node), sources))
                continue
        if name not in ops:
            continue
        operands = [
            value
            for position, value in enumerate(node.inputs)
            if is_float32(value) and value is not None and value.const_value is None
            if not is_parameter(node, position)
        ]
        for value in (*operands, *list_used_outputs(node)):
            for root in roots.get(value, (value,)):
                names = touching.setdefault(root, [])
                if name not in names:
                    names.append(name)
    return touching


def choose_joined_ranges(
    graph: ir.Graph,
    observed: Mapping[str, Mapping[str, Range]],
    configs: Mapping[str, OpConfig],
    profile: TargetProfile,
) -> dict[str, Range]:
    """Return value → the range that its integers must cover.

    The first op in integers that writes or reads a tensor decides on the calibration algorithm.

    Args:
        graph: the float graph, with types.
        observed: value → calibration algorithm → its range.
        configs: op → its config in integers.
        profile: the rules of the target.
    """
    algorithms = {
        str(value.name): spec.algorithm
        for value, ops in map_touching_ops(graph, configs, profile).items()
        if (spec := configs[ops[0]].activation) is not None
    }
    default = CalibrationAlgorithm.MINMAX
    ranges = {name: by[algorithms.get(name, default)] for name, by in observed.items()}
    return join_ranges(graph, ranges, profile)


def ranges_by_algorithm(
    graph: ir.Graph, observed: Mapping[str, Mapping[str, Range]], profile: TargetProfile
) -> dict[str, dict[str, Range]]:
    """Return calibration algorithm → value → its range if that algorithm chooses all ranges."""
    return {
        algorithm: join_ranges(graph, {n: by[algorithm] for n, by in observed.items()}, profile)
        for algorithm in RANGE_ALGORITHMS
    }
