"""The table of OpenVINO's ops: kind, role in quantized graphs, kernel and axes of every type."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from enum import Enum, auto
from typing import Any

from neural_mp.core.int8_accumulation import KernelKind


class Role(Enum):
    """The part of an op type in quantized graphs."""

    #: Layers with a constant weight; a product may have two computed factors.
    CONVOLUTION, PRODUCT = auto(), auto()
    #: Recurrent ops: those over sequences with an integer kernel, and all others.
    SEQUENCE, RECURRENT = auto(), auto()
    #: Ops that read rows of a constant.
    TABLE = auto()
    #: Joining ops: their integer kernels pay off between INT8 ops only.
    SUM, SCALING, POOLING, MEAN = auto(), auto(), auto(), auto()
    #: Ops that the plugin fuses into layers.
    ACTIVATION = auto()
    #: Ops that only move or select values; INT8 passes through them.
    MOVING, CONCATENATION = auto(), auto()
    #: Nodes that are no ops of a plan.
    CONSTANT, INPUT, RESULT, ASSIGNMENT = auto(), auto(), auto(), auto()
    #: Quantization inserted by a plan.
    QUANTIZATION = auto()
    OTHER = auto()


LAYERS = frozenset({Role.CONVOLUTION, Role.PRODUCT})
RECURRENT = frozenset({Role.SEQUENCE, Role.RECURRENT})
JOINING = frozenset({Role.SUM, Role.SCALING, Role.POOLING, Role.MEAN})
MOVING = frozenset({Role.MOVING, Role.CONCATENATION})
BOUNDARIES = frozenset({Role.CONSTANT, Role.INPUT, Role.RESULT, Role.ASSIGNMENT})


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
class OpTraits:
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
    role: Role = Role.OTHER
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


def _rows(traits: OpTraits, types: str) -> dict[str, OpTraits]:
    """Return op type → traits, for types with their kinds, as in `Clamp:clip LogSoftmax`.

    Without a kind, the kind is the type in snake case; an empty one is none.
    """
    rows = {}
    for word in types.split():
        op, separator, kind = word.partition(":")
        kind = kind if separator else "_".join(re.findall("[A-Z][a-z]*", op)).lower()
        rows[op] = replace(traits, kind=kind or None)
    return rows


_CONVOLUTION = OpTraits("conv", Role.CONVOLUTION, KernelKind.CONVOLUTION, channels=1)
_SEQUENCE = OpTraits("recurrent", Role.SEQUENCE, KernelKind.DENSE, dynamic_only=True)
_LSTM = Recurrence((1, 2), 3, (4, 5), 6, ("sigmoid", "tanh", "tanh"))
_GRU = Recurrence((1,), 2, (3, 4), 5, ("sigmoid", "tanh"))
_RNN = replace(_GRU, activations=("tanh",))
_MOVING = OpTraits(role=Role.MOVING, check=Check.ALWAYS)
_GRAPH = "it has states or a graph of its own, whose types are fixed"

OPS: Mapping[str, OpTraits] = {
    "Convolution": replace(_CONVOLUTION, weight_outputs=(0,)),
    "GroupConvolution": replace(_CONVOLUTION, weight_outputs=(0, 1)),
    "ConvolutionBackpropData": OpTraits("conv_transpose", channels=1),
    "GroupConvolutionBackpropData": OpTraits("conv_transpose"),
    "MatMul": OpTraits("matmul", Role.PRODUCT, KernelKind.DENSE),
    "LSTMSequence": replace(_SEQUENCE, recurrence=_LSTM),
    "GRUSequence": replace(_SEQUENCE, recurrence=_GRU),
    "RNNSequence": replace(_SEQUENCE, role=Role.RECURRENT, kernel=None, recurrence=_RNN),
    **dict.fromkeys(("LSTMCell", "GRUCell", "RNNCell"), OpTraits("recurrent", Role.RECURRENT)),
    "Gather": OpTraits("gather", Role.TABLE, weight=0, check=Check.ALWAYS),
    "Add": OpTraits("add", Role.SUM, check=Check.BROADCASTING),
    "Multiply": OpTraits("mul", Role.SCALING, check=Check.BROADCASTING),
    "AvgPool": OpTraits("avg_pool", Role.POOLING, channels=1, check=Check.ALWAYS),
    "ReduceMean": OpTraits("mean", Role.MEAN, check=Check.ALWAYS),
    "MaxPool": replace(_MOVING, kind="max_pool", channels=1),
    "Concat": OpTraits("concat", Role.CONCATENATION, check=Check.ALWAYS),
    **_rows(
        _MOVING,
        "DepthToSpace Reshape ShuffleChannels: SpaceToDepth Split Squeeze:reshape "
        "StridedSlice:slice Transpose Unsqueeze:reshape VariadicSplit:slice",
    ),
    **_rows(
        OpTraits(role=Role.ACTIVATION),
        "Abs Clamp:clip Elu Gelu HSigmoid: HSwish:hard_swish Mish PRelu:prelu Relu Sigmoid "
        "SoftPlus:softplus Swish:silu Tanh",
    ),
    **_rows(
        OpTraits(check=Check.ALWAYS),
        "BatchToSpace: Broadcast Interpolate:resize_nearest MVN:layer_norm NormalizeL2:l2_norm Pad "
        "ReduceL1:sum ReduceL2:l2_norm ReduceMax:max ReduceMin:min ReduceProd:prod ReduceSum:sum "
        "Slice SpaceToBatch: Tile",
    ),
    **_rows(OpTraits(check=Check.BROADCASTING), "Divide:div Maximum Minimum Subtract:sub"),
    **_rows(
        OpTraits(),
        "Acos AdaptiveAvgPool:avg_pool AdaptiveMaxPool:max_pool Asin BatchNormInference:batch_norm "
        "Ceiling:ceil Cosh CumSum:cumsum Einsum Erf Exp Floor FloorMod:div GatherElements:gather "
        "GatherND:gather GroupNormalization:group_norm HardSigmoid Log LogSoftmax Mod:div "
        "Negative:neg Power:pow ReverseSequence:reverse Round Select:where Selu Sign Sinh Softmax "
        "SoftSign:softsign Sqrt SquaredDifference:sub Tan",
    ),
    **_rows(OpTraits(fixed_types=_GRAPH, dynamic_only=True), "If: Loop: TensorIterator:"),
    "ReadValue": OpTraits(fixed_types=_GRAPH),
    "Assign": OpTraits(role=Role.ASSIGNMENT, fixed_types=_GRAPH),
    "Constant": OpTraits(role=Role.CONSTANT),
    "Parameter": OpTraits(role=Role.INPUT),
    "Result": OpTraits(role=Role.RESULT),
    "FakeQuantize": OpTraits(role=Role.QUANTIZATION),
    "Convert": OpTraits(fixed_types="it sets the type itself"),
    **_rows(
        OpTraits(dynamic_only=True),
        "GroupQueryAttention: PagedAttentionExtension: ScaledDotProductAttention:",
    ),
}
_UNLISTED = OpTraits()


def traits_of(node: Any) -> OpTraits:
    """Return the row of a node's type."""
    return OPS.get(node.get_type_name(), _UNLISTED)


def role_of(node: Any) -> Role:
    """Return the role of a node's type."""
    return traits_of(node).role


def types_by_kind() -> dict[str, tuple[str, ...]]:
    """Return kind in the four lists → op types."""
    kinds = dict.fromkeys(traits.kind for traits in OPS.values() if traits.kind is not None)
    return {kind: tuple(op for op, row in OPS.items() if row.kind == kind) for kind in kinds}


#: Types of kernels in a compiled model with integer variants: of products, of all layers, of all.
PRODUCT_KERNELS = frozenset({"FullyConnected", "MatMul"})
LAYER_KERNELS = PRODUCT_KERNELS | {"Convolution"}
INTEGER_KERNELS = LAYER_KERNELS | {"Deconvolution", "Eltwise", "Subgraph", "Pooling", "RNNSeq"}
#: Those that only move values.
MOVING_KERNELS = frozenset(
    str.split(
        "Broadcast Concatenation DepthToSpace Gather Pad Reshape ShuffleChannels SpaceToDepth "
        "Split Squeeze StridedSlice Tile Transpose Unsqueeze"
    )
)
#: Those that convert between variants of a tensor.
CONVERSION_KERNELS = frozenset({"Reorder", "Convert", "FakeQuantize"})
