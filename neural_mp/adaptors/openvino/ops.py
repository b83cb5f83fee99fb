"""The table of OpenVINO's ops: kind, role in quantized graphs, kernel and axes of every type."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from enum import Enum, Flag, auto
from typing import TYPE_CHECKING

from neural_mp.core.int8_accumulation import KernelKind

if TYPE_CHECKING:
    import openvino as ov


class Role(Flag):
    """Part of an op in quantized graphs; some roles have subdivisions.

    Layers multiply by a constant weight, or a product by a second computed matrix; the kernels of
    transposed convolutions take no residual sums and no zero points of inputs. Attention multiplies
    its first two inputs, which the integer kernel reads in bytes, before a softmax in float and a
    float product. Recurrent ops
    have integer kernels over sequences, some of them. Tables are read by row. The integer kernels
    of joining ops pay off between INT8 ops only. Activations are fused into layers. Moving ops only
    move or select values, and INT8 passes through them. Boundaries are no ops of a plan, which
    inserts quantizations.
    """

    NONE = 0
    CONVOLUTION = auto()
    TRANSPOSED = auto()
    PRODUCT = auto()
    LAYER = CONVOLUTION | TRANSPOSED | PRODUCT
    ATTENTION = auto()
    SEQUENCE = auto()
    FLOAT_RECURRENT = auto()
    RECURRENT = SEQUENCE | FLOAT_RECURRENT
    TABLE = auto()
    SUM = auto()
    SCALING = auto()
    POOLING = auto()
    MEAN = auto()
    JOINING = SUM | SCALING | POOLING | MEAN
    ACTIVATION = auto()
    CONCATENATION = auto()
    SELECTION = auto()
    MOVING = CONCATENATION | SELECTION
    CONSTANT = auto()
    INPUT = auto()
    RESULT = auto()
    ASSIGNMENT = auto()
    BOUNDARY = CONSTANT | INPUT | RESULT | ASSIGNMENT
    QUANTIZATION = auto()


class Check(Enum):
    """Conditions for the comparison of an op next to integer kernels with the op in float.

    Compared are ops that transformations move scales past, or whose kernels store bytes; ops that
    compute value by value if they broadcast over axes.
    """

    NEVER, BROADCASTING, ALWAYS = auto(), auto(), auto()


@dataclass(frozen=True)
class Recurrence:
    """The inputs of a recurrent op over sequences.

    Attributes:
        states: the positions of its states, the hidden one first.
        lengths, weights, bias: further positions; the weight of the input comes first.
        activations: those of the plugin's kernel.
    """

    states: tuple[int, ...]
    lengths: int
    weights: tuple[int, int]
    bias: int
    activations: tuple[str, ...]


@dataclass(frozen=True)
class OpRow:
    """The properties of an op type that decide about its quantization.

    Attributes:
        kind: the kind in the four lists (see `neural_mp.amp.KINDS`), if any.
        role: the part in quantized graphs.
        kernel: the kind of the integer kernel of a layer.
        weight: the position of the weight.
        weight_outputs: the axes of output channels in the weight of a convolution.
        channels: the axis of channels in activations.
        check: when the op is compared next to integer kernels.
        fixed_types: the reason why the op cannot run in 16 bits, if any.
        dynamic_only: whether a model with the op is compiled for dynamic shapes only.
        recurrence: the inputs of a recurrent op over sequences.
    """

    kind: str | None = None
    role: Role = Role.NONE
    kernel: KernelKind | None = None
    weight: int = 1
    weight_outputs: tuple[int, ...] = ()
    channels: int = -1
    check: Check = Check.NEVER
    fixed_types: str | None = None
    dynamic_only: bool = False
    recurrence: Recurrence | None = None

    @property
    def is_grouped(self) -> bool:
        """Whether the weight has an axis of groups, the first one."""
        return len(self.weight_outputs) > 1


def _parse_rows(row: OpRow, types: str) -> dict[str, OpRow]:
    """Return op type → row, for types with their kinds, as in `Clamp:clip LogSoftmax`.

    Without a kind, the kind is the type in snake case; an empty one is none.
    """
    rows = {}
    for word in types.split():
        op, separator, kind = word.partition(":")
        kind = kind if separator else "_".join(re.findall("[A-Z][a-z]*", op)).lower()
        rows[op] = replace(row, kind=kind or None)
    return rows


_CONVOLUTION = OpRow("conv", Role.CONVOLUTION, KernelKind.CONVOLUTION, channels=1)
_SEQUENCE = OpRow("recurrent", Role.SEQUENCE, KernelKind.DENSE, dynamic_only=True)
_LSTM = Recurrence((1, 2), 3, (4, 5), 6, ("sigmoid", "tanh", "tanh"))
_GRU = Recurrence((1,), 2, (3, 4), 5, ("sigmoid", "tanh"))
_RNN = replace(_GRU, activations=("tanh",))
_MOVING = OpRow(role=Role.SELECTION, check=Check.ALWAYS)
_GRAPH = "it has states or a graph of its own, whose types are fixed"

OPS: Mapping[str, OpRow] = {
    "Convolution": replace(_CONVOLUTION, weight_outputs=(0,)),
    "GroupConvolution": replace(_CONVOLUTION, weight_outputs=(0, 1)),
    "ConvolutionBackpropData": OpRow(
        "conv_transpose", Role.TRANSPOSED, KernelKind.CONVOLUTION, weight_outputs=(1,), channels=1
    ),
    "GroupConvolutionBackpropData": OpRow("conv_transpose"),
    "MatMul": OpRow("matmul", Role.PRODUCT, KernelKind.DENSE),
    "ScaledDotProductAttention": OpRow(role=Role.ATTENTION, kernel=KernelKind.DENSE),
    "LSTMSequence": replace(_SEQUENCE, recurrence=_LSTM),
    "GRUSequence": replace(_SEQUENCE, recurrence=_GRU),
    "RNNSequence": replace(_SEQUENCE, role=Role.FLOAT_RECURRENT, kernel=None, recurrence=_RNN),
    **dict.fromkeys(("LSTMCell", "GRUCell", "RNNCell"), OpRow("recurrent", Role.FLOAT_RECURRENT)),
    "Gather": OpRow("gather", Role.TABLE, weight=0, check=Check.ALWAYS),
    "Add": OpRow("add", Role.SUM, check=Check.BROADCASTING),
    "Multiply": OpRow("mul", Role.SCALING, check=Check.BROADCASTING),
    "AvgPool": OpRow("avg_pool", Role.POOLING, channels=1, check=Check.ALWAYS),
    "ReduceMean": OpRow("mean", Role.MEAN, check=Check.ALWAYS),
    "MaxPool": replace(_MOVING, kind="max_pool", channels=1),
    "Concat": OpRow("concat", Role.CONCATENATION, check=Check.ALWAYS),
    **_parse_rows(
        _MOVING,
        "DepthToSpace Reshape ShuffleChannels: SpaceToDepth Split Squeeze:reshape "
        "StridedSlice:slice Transpose Unsqueeze:reshape VariadicSplit:slice",
    ),
    **_parse_rows(
        OpRow(role=Role.ACTIVATION),
        "Abs Clamp:clip Elu Gelu HSigmoid: HSwish:hard_swish Mish PRelu:prelu Relu Sigmoid "
        "SoftPlus:softplus Swish:silu Tanh",
    ),
    **_parse_rows(
        OpRow(check=Check.ALWAYS),
        "BatchToSpace: Broadcast Interpolate:resize_nearest MVN:layer_norm NormalizeL2:l2_norm Pad "
        "ReduceL1:sum ReduceL2:l2_norm ReduceMax:max ReduceMin:min ReduceProd:prod ReduceSum:sum "
        "Slice SpaceToBatch: Tile",
    ),
    **_parse_rows(OpRow(check=Check.BROADCASTING), "Divide:div Maximum Minimum Subtract:sub"),
    **_parse_rows(
        OpRow(),
        "Acos AdaptiveAvgPool:avg_pool AdaptiveMaxPool:max_pool Asin BatchNormInference:batch_norm "
        "Ceiling:ceil Cosh CumSum:cumsum Einsum Erf Exp Floor FloorMod:div GatherElements:gather "
        "GatherND:gather GroupNormalization:group_norm HardSigmoid Log LogSoftmax Mod:div "
        "Negative:neg Power:pow ReverseSequence:reverse Round Select:where Selu Sign Sinh Softmax "
        "SoftSign:softsign Sqrt SquaredDifference:sub Tan",
    ),
    **_parse_rows(OpRow(fixed_types=_GRAPH, dynamic_only=True), "If: Loop: TensorIterator:"),
    "ReadValue": OpRow(fixed_types=_GRAPH),
    "Assign": OpRow(role=Role.ASSIGNMENT, fixed_types=_GRAPH),
    "Constant": OpRow(role=Role.CONSTANT),
    "Parameter": OpRow(role=Role.INPUT),
    "Result": OpRow(role=Role.RESULT),
    "FakeQuantize": OpRow(role=Role.QUANTIZATION),
    "Convert": OpRow(fixed_types="it sets the type itself"),
    **_parse_rows(OpRow(dynamic_only=True), "GroupQueryAttention: PagedAttentionExtension:"),
}
_EMPTY = OpRow()


def get_op_row(node: ov.Node) -> OpRow:
    """Return the row of a node's type; an empty row for other types."""
    return OPS.get(node.get_type_name(), _EMPTY)


def has_role(node: ov.Node, role: Role) -> bool:
    """Whether a node's type has a role, or any of several."""
    return bool(get_op_row(node).role & role)


#: Kind in the four lists → op types.
TYPES: Mapping[str, tuple[str, ...]] = {
    kind: tuple(op for op, row in OPS.items() if row.kind == kind)
    for kind in dict.fromkeys(row.kind for row in OPS.values() if row.kind is not None)
}
#: Types of kernels in a compiled model with integer variants: of products, of all layers, of all.
PRODUCT_KERNELS = frozenset({"FullyConnected", "MatMul"})
LAYER_KERNELS = PRODUCT_KERNELS | {"Convolution", "Deconvolution"}
INTEGER_KERNELS = LAYER_KERNELS | {"Eltwise", "Subgraph", "Pooling", "RNNSeq"}
#: Those that compute value by value, in float registers whatever the types in memory.
ELEMENTWISE_KERNELS = frozenset({"Eltwise", "Subgraph"})
#: Those that only move values.
MOVING_KERNELS = frozenset(
    str.split(
        "Broadcast Concatenation DepthToSpace Gather Pad Reshape ShuffleChannels SpaceToDepth "
        "Split Squeeze StridedSlice Tile Transpose Unsqueeze"
    )
)
#: Those that convert between variants of a tensor.
CONVERSION_KERNELS = frozenset({"Reorder", "Convert", "FakeQuantize"})
