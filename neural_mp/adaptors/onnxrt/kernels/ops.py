"""The table of ONNX ops: what planning and conversion take from the type of an op.

`OPS` has a row for every op type with a part in INT8 graphs, `TYPES` the op types of the kinds in
the four lists. Planning and conversion read a row (`get_op_row`); rewriting of graphs has its own
rules by type (`canonicalize`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import Flag, auto

import onnx_ir as ir

from neural_mp.adaptors.onnxrt.graph.edit import get_constant_array, get_node_input
from neural_mp.adaptors.onnxrt.kernels import writers
from neural_mp.adaptors.onnxrt.kernels.gru_writer import find_gru_obstacle, write_gru
from neural_mp.adaptors.onnxrt.kernels.registry import CONTRIB, INT8_LSTM, INT8_PRODUCT
from neural_mp.adaptors.onnxrt.kernels.tensor_variants import Variants
from neural_mp.core.int8_accumulation import KernelKind
from neural_mp.core.precision import OpConfig

Writer = Callable[[Variants, writers.FusionGroup, OpConfig], None]

#: Rank of images: samples, channels, two axes of positions.
_LEAST_IMAGE_RANK = 4


class Role(Flag):
    """Part of an op in a graph in INT8.

    Layers multiply by a constant weight, their second input. The kernel of a joining op has scales
    for inputs and output, e.g. `QLinearAdd`. Moving ops only move or select values. Tables are read
    by row, with INT8 weights and float results; recurrent layers determine the ranges of their
    inputs at run time.
    """

    LAYER = auto()
    JOINING = auto()
    MOVING = auto()
    TABLE = auto()
    RECURRENT = auto()


@dataclass(frozen=True)
class OpRow:
    """The row of an op type.

    Attributes:
        role: the part in a graph in INT8, if the further conditions hold.
        kernel: the integer kernel in ONNX Runtime; empty if there is none.
        writer: writes an op in INT8.
        applies: whether an op has the role, by its attributes and constants.
        domain: the domain of the kernel.
        float_only: the reason for FP32 although ONNX Runtime has an integer kernel.
        obstacle: returns the reason why the kernel cannot run an op.
        operands: the number of inputs that the kernel reads; by default, all.
        weight_axes: the axes of output and input channels in the weight; see `weight_axes`.
        bias: the position of the bias; None if an Add follows instead.
        channels_second: whether the channels of the data are on axis 1, and not on the last axis.
        fuses_activation: whether the kernel clamps like a following Relu or Clip.
        rounded_by_runtime: whether ONNX Runtime itself rounds a weight between quantized tensors.
        fill: the position of the values that the op adds around those moved.
        moves_several: whether all results are moved values.
        passed_by_dequantize: whether ONNX Runtime moves a DequantizeLinear of one scale past the op
            (`QDQPropagation`).
    """

    role: Role | None = None
    kernel: str = ""
    writer: Writer = writers.write_kernel
    applies: Callable[[ir.Node], bool] | None = None
    domain: str = CONTRIB
    float_only: str | None = None
    obstacle: Callable[[ir.Node], str | None] | None = None
    operands: int | None = None
    weight_axes: tuple[int, int] = (0, 1)
    bias: int | None = 2
    channels_second: bool = False
    fuses_activation: bool = False
    rounded_by_runtime: bool = False
    fill: int | None = None
    moves_several: bool = False
    passed_by_dequantize: bool = False


def get_op_row(node: ir.Node) -> OpRow:
    """Return the row of an op; an empty row for other types and domains."""
    return _EMPTY if node.domain else OPS.get(node.op_type, _EMPTY)


def has_role(node: ir.Node, role: Role) -> bool:
    """Whether an op has a role by its type, attributes and constants."""
    row = get_op_row(node)
    if row.role is None or role not in row.role:
        return False
    return row.applies is None or row.applies(node)


def is_product(node: ir.Node) -> bool:
    """Whether an op is a layer that multiplies matrices, written as its kernel."""
    return has_role(node, Role.LAYER) and get_op_row(node).kernel == INT8_PRODUCT


def is_convolution(node: ir.Node) -> bool:
    """Whether an op is a layer that multiplies windows of its data, with channels on axis 1."""
    return has_role(node, Role.LAYER) and get_op_row(node).channels_second


def has_weight(node: ir.Node) -> bool:
    """Whether an op is a layer with a constant weight."""
    weight = get_node_input(node, 1)
    return has_role(node, Role.LAYER) and weight is not None and weight.const_value is not None


def get_weight_axes(node: ir.Node) -> tuple[int, int]:
    """Return the axes of output and input channels in the weight of an op, its second input."""
    outputs, inputs = get_op_row(node).weight_axes
    return (inputs, outputs) if node.attributes.get_int("transB", 0) else (outputs, inputs)


def get_kernel_kind(node: ir.Node, weight: ir.Value | None) -> KernelKind:
    """Return the kind of integer kernel that multiplies by a weight.

    Depthwise means one input and output channel per group, with images as input.
    """
    if "Conv" not in node.op_type:
        return KernelKind.DENSE
    array, groups = get_constant_array(weight), node.attributes.get_int("group", 1)
    single = array is not None and array.ndim == 4 and array.shape[:2] == (groups, 1)
    return KernelKind.DEPTHWISE if single and groups > 1 else KernelKind.CONVOLUTION


def is_quantize(node: ir.Node) -> bool:
    """Whether a node is a QuantizeLinear, of ONNX or of ONNX Runtime."""
    return node.op_type == "QuantizeLinear" and node.domain in ("", CONTRIB)


def is_dequantize(node: ir.Node) -> bool:
    """Whether a node is a DequantizeLinear, of ONNX or of ONNX Runtime."""
    return node.op_type == "DequantizeLinear" and node.domain in ("", CONTRIB)


def _averages_all_positions(node: ir.Node) -> bool:
    """Whether a ReduceMean averages all positions of an image: its integer kernel is a pooling."""
    data, axes_input = node.inputs[0], get_node_input(node, 1)
    axes = (
        node.attributes.get_ints("axes", ())
        if axes_input is None
        else get_constant_array(axes_input)
    )
    if data is None or data.shape is None or axes is None or len(data.shape) < _LEAST_IMAGE_RANK:
        return False
    rank = len(data.shape)
    return sorted(int(axis) % rank for axis in axes) == list(range(2, rank))


def _rises_from_negatives(node: ir.Node) -> bool:
    numbers, data = node.attributes, node.inputs[0]
    signs = numbers.get_float("alpha", 0.2) > 0 and numbers.get_float("beta", 0.5) > 0
    return signs and data is not None and data.shape is not None


def _pads_zeros(node: ir.Node) -> bool:
    padding = get_constant_array(get_node_input(node, 2))
    return padding is None or not padding.any()


def _selects_nearest(node: ir.Node) -> bool:
    transform = node.attributes.get_string("coordinate_transformation_mode")
    nearest = node.attributes.get_string("mode", "nearest") == "nearest"
    return nearest and transform != "tf_crop_and_resize"


#: Kinds whose op type has the same name, in camel case (`log_softmax`, `LogSoftmax`).
_SAME_NAMES = (
    "conv conv_transpose einsum sub mul div elu celu selu sigmoid tanh softplus softsign "
    "gelu mish hard_sigmoid hard_swish erf log sqrt reciprocal softmax log_softmax exp pow "
    "sinh cosh tan asin acos abs ceil floor round sign neg clip relu concat split slice "
    "tile pad identity transpose where space_to_depth depth_to_space"
)
#: Kind (see `neural_mp.amp.KINDS`) → op types.
TYPES: Mapping[str, tuple[str, ...]] = {
    **{kind: ("".join(map(str.capitalize, kind.split("_"))),) for kind in _SAME_NAMES.split()},
    "matmul": ("MatMul", "Gemm"),
    "add": ("Add", "Sum"),
    "avg_pool": ("AveragePool", "GlobalAveragePool"),
    "batch_norm": ("BatchNormalization",),
    "instance_norm": ("InstanceNormalization",),
    "group_norm": ("GroupNormalization",),
    "layer_norm": ("LayerNormalization",),
    "rms_norm": ("RMSNormalization",),
    "leaky_relu": ("LeakyRelu", "ThresholdedRelu"),
    "prelu": ("PRelu",),
    "silu": ("Swish",),
    "prod": ("ReduceProd",),
    "mean": ("ReduceMean", "Mean"),
    "sum": ("ReduceSum", "ReduceSumSquare", "ReduceL1"),
    "l2_norm": ("ReduceL2", "LpNormalization"),
    "logsumexp": ("ReduceLogSumExp", "ReduceLogSum"),
    "cross_entropy": ("SoftmaxCrossEntropyLoss", "NegativeLogLikelihoodLoss"),
    "cumsum": ("CumSum",),
    "gather": ("Gather", "GatherElements", "GatherND"),
    "broadcast": ("Expand",),
    "reshape": ("Reshape", "Flatten", "Squeeze", "Unsqueeze"),
    "reverse": ("ReverseSequence",),
    "triangle": ("Trilu",),
    "max_pool": ("MaxPool", "GlobalMaxPool"),
    "maximum": ("Max",),
    "minimum": ("Min",),
    "max": ("ReduceMax",),
    "min": ("ReduceMin",),
    "resize_nearest": ("Resize",),
}


_EMPTY = OpRow()
_SLOWER = "ONNX Runtime's integer kernel {} is slower than its FP32 kernel"

#: Op type → its row.
OPS: Mapping[str, OpRow] = {
    "Conv": OpRow(
        Role.LAYER,
        "QLinearConv",
        writers.write_convolution,
        domain="",
        channels_second=True,
        fuses_activation=True,
        rounded_by_runtime=True,
    ),
    "ConvTranspose": OpRow(weight_axes=(1, 0), rounded_by_runtime=True),
    "MatMul": OpRow(Role.LAYER, INT8_PRODUCT, writers.write_product, weight_axes=(1, 0), bias=None),
    "Gemm": OpRow(
        Role.LAYER, INT8_PRODUCT, writers.write_product, weight_axes=(1, 0), rounded_by_runtime=True
    ),
    "Add": OpRow(Role.JOINING, "QLinearAdd", fuses_activation=True),
    "Mul": OpRow(Role.JOINING, "QLinearMul"),
    "Concat": OpRow(Role.JOINING, "QLinearConcat"),
    "AveragePool": OpRow(Role.JOINING, "QLinearAveragePool", channels_second=True),
    "GlobalAveragePool": OpRow(Role.JOINING, "QLinearGlobalAveragePool", channels_second=True),
    "ReduceMean": OpRow(
        Role.JOINING,
        "QLinearGlobalAveragePool",
        writers.write_pool,
        _averages_all_positions,
        operands=1,
    ),
    "Sigmoid": OpRow(Role.JOINING, "QLinearSigmoid"),
    "LeakyRelu": OpRow(Role.JOINING, "QLinearLeakyRelu"),
    "HardSigmoid": OpRow(
        Role.JOINING, "QLinearAdd", writers.write_hard_sigmoid, _rises_from_negatives
    ),
    "Softmax": OpRow(kernel="QLinearSoftmax", float_only=_SLOWER.format("QLinearSoftmax")),
    "Where": OpRow(kernel="QLinearWhere", float_only=_SLOWER.format("QLinearWhere")),
    "BatchNormalization": OpRow(channels_second=True),
    "MaxPool": OpRow(Role.MOVING, channels_second=True, passed_by_dequantize=True),
    "Reshape": OpRow(Role.MOVING, passed_by_dequantize=True),
    "Transpose": OpRow(Role.MOVING, passed_by_dequantize=True),
    "Flatten": OpRow(Role.MOVING),
    "Squeeze": OpRow(Role.MOVING, passed_by_dequantize=True),
    "Unsqueeze": OpRow(Role.MOVING, passed_by_dequantize=True),
    "Slice": OpRow(Role.MOVING, passed_by_dequantize=True),
    "Split": OpRow(Role.MOVING, moves_several=True),
    "Gather": OpRow(Role.MOVING | Role.TABLE, writer=writers.write_table),
    "Expand": OpRow(Role.MOVING),
    "Tile": OpRow(Role.MOVING),
    "DepthToSpace": OpRow(Role.MOVING),
    "SpaceToDepth": OpRow(Role.MOVING),
    "Pad": OpRow(Role.MOVING, applies=_pads_zeros, fill=2),
    "Resize": OpRow(Role.MOVING, applies=_selects_nearest),
    "Identity": OpRow(Role.MOVING),
    "LSTM": OpRow(Role.RECURRENT, INT8_LSTM, writers.write_lstm),
    "GRU": OpRow(Role.RECURRENT, INT8_PRODUCT, write_gru, obstacle=find_gru_obstacle),
}
#: Recurrent layers that stay in FP32.
FLOAT_RECURRENT = frozenset({"RNN"})
#: Types whose results are never negative, and types besides moving ops that keep this property of
#: their first input.
NON_NEGATIVE = frozenset({"Relu", "Sigmoid", "HardSigmoid", "Softmax", "Abs", "Exp", "Softplus"})
KEEPS_SIGN = frozenset({"AveragePool", "GlobalAveragePool", "ReduceMean", "GlobalMaxPool"})
#: Types of moving ops between which the quantization of a source stays: one tensor that is clipped
#: there would keep that of the whole model.
STAYS_QUANTIZED = frozenset({"Split", "Expand", "Tile", "Resize"})
#: Types that run nested graphs.
RUNS_GRAPHS = frozenset({"If", "Loop", "Scan", "SequenceMap"})
#: Types whose results differ from run to run, or the start of their names.
RANDOM = ("Random", "Multinomial", "Bernoulli", "Dropout")
#: Types whose `reduction` has FP32 kernels only.
SCATTERS = frozenset({"ScatterElements", "ScatterND"})

#: Types that convert between the variants of a tensor; with layout changes, the inserted types.
CONVERSIONS = frozenset({"Cast", "QuantizeLinear", "DequantizeLinear", "DynamicQuantizeLinear"})
INSERTED = CONVERSIONS | {"Transpose"}
#: Integer kernel → positions of its weights, each with that of its zero points.
KERNEL_WEIGHTS: Mapping[str, tuple[tuple[int, int], ...]] = {
    "QLinearConv": ((3, 5),),
    "ConvInteger": ((1, 3),),
    "QLinearMatMul": ((3, 5),),
    "MatMulInteger": ((1, 3),),
    INT8_PRODUCT: ((1, 5),),
    "DynamicQuantizeMatMul": ((1, 3),),
    "QGemm": ((3, 5),),
    INT8_LSTM: writers.LSTM_WEIGHTS,
}
#: Names of kernels with INT8 products, whether their inputs are float or quantized, begin so.
INTEGER_KERNELS = (*KERNEL_WEIGHTS, "QLinear", "QAttention", "DynamicQuantize")
