"""Table of op types, as read by capabilities, fusion, conversion, inspection and reports.

Of an op type outside the table, the runtime's registry yields the kernels, and TensorFlow infers
the shapes.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import Enum, Flag, auto
from operator import add, floordiv, mod, mul, sub
from typing import Any

import numpy as np
from scipy import special

from neural_mp.adaptors.common.symbolic_sizes import maximum, minimum
from neural_mp.adaptors.tensorflow.graph import shape_elements as values
from neural_mp.adaptors.tensorflow.graph import shape_rules as shapes
from neural_mp.adaptors.tensorflow.graph.tensor_graph import NodeDef
from neural_mp.amp import KINDS
from neural_mp.core.int8_accumulation import KernelKind


class Role(Enum):
    """The part that an op plays in a graph; each op has one at most."""

    CONVOLUTION = auto()
    MATRIX_PRODUCT = auto()
    BATCH_PRODUCT = auto()  #: a dense layer if its second factor is constant
    BIAS = auto()
    ADDITION = auto()
    BATCH_NORM = auto()
    RESHAPE = auto()
    IDENTITY = auto()  #: returns its input
    AVERAGE = auto()
    GATHER = auto()  #: reads rows of a table
    FAKE_QUANTIZATION = auto()
    NOTHING = auto()  #: only orders execution
    CHECK = auto()  #: may stop a run
    PLACEHOLDER = auto()
    OPTIONAL_PLACEHOLDER = auto()  #: with a default
    SWITCH = auto()
    MERGE = auto()
    ENTER = auto()
    EXIT = auto()
    NEXT_ITERATION = auto()
    LOOP_CONDITION = auto()
    FUNCTIONAL = auto()  #: a loop or branch whose bodies are functions
    REFERENCE_VARIABLE = auto()
    VARIABLE = auto()
    READ = auto()
    READ_ROWS = auto()
    WRITE = auto()
    UPDATE = auto()  #: changes the value of a variable by a number
    LOOKUP_TABLE = auto()
    LOOKUP = auto()
    LOOKUP_SIZE = auto()


class Trait(Flag):
    """Further properties of an op."""

    NONE = 0
    POINTWISE = auto()  #: a Reshape commutes with the op
    NEVER_NEGATIVE = auto()
    KEEPS_SIGN = auto()  #: never negative if the moved tensors, or the first, never are
    SHARES_MEMORY = auto()  #: the result may alias the memory of the input
    READS_BITS = auto()  #: the result depends on the bits of a float
    COMPUTES_SEEDS = auto()  #: occurs between the state of a generator and the seed
    HIDES_NAN = auto()  #: a kernel may return a number if an input is NaN


#: Step of an integer kernel that adds a tensor to the result.
SUMMAND = "Sum"


@dataclass(frozen=True)
class LayerKernel:
    """The integer kernel of a layer.

    Attributes:
        op: op type of the kernel.
        kind: kind of the kernel.
        rank: number of axes of result and weight; the last two axes of a weight are input and
            output channels, or, if depthwise, both output channels.
        activations: activations that the kernel supports after the bias.
        options: paddings of any size, dilations, and a summand.
    """

    op: str
    kind: KernelKind
    rank: int
    activations: tuple[str, ...]
    options: tuple[str, ...] = ()

    @property
    def kernel_forms(self) -> tuple[str, ...]:
        """All forms, which may work on a machine or not."""
        return ("plain", *self.activations, *self.options)

    @property
    def is_dense(self) -> bool:
        """Whether the layer is a matrix product."""
        return self.kind is KernelKind.DENSE

    @property
    def is_depthwise(self) -> bool:
        """Whether each input channel has filters of its own."""
        return self.kind is KernelKind.DEPTHWISE


@dataclass(frozen=True)
class OpType:
    """A row of the table.

    Attributes:
        names: op types, separated by spaces.
        shape: rule for the shapes of the results.
        elements: rule for the elements of a small result of integers.
        kind: kind of op that is safe or unsafe in 16 bits (see `neural_mp.amp.KINDS`); default:
            the name in snake case, if there is such a kind.
        role: part in a graph.
        traits: further properties.
        layer: integer kernel of a layer.
        weight: input position of the weight or bias.
        moves: number of leading inputs that the op moves or selects, so that INT8 passes through;
            -1 for all but the last. The other inputs must be constant.
        kernel: op type that moves INT8, unless the op itself does so on bytes.
        formula: function of an op that is arithmetic.
    """

    names: str
    shape: shapes.Rule | None = None
    elements: values.Rule | None = None
    kind: str = ""
    role: Role | None = None
    traits: Trait = Trait.NONE
    layer: LayerKernel | None = None
    weight: int | None = None
    moves: int = 0
    kernel: str = ""
    formula: Callable[..., Any] | None = None


_POINTWISE, _POSITIVE, _SIGN = Trait.POINTWISE, Trait.NEVER_NEGATIVE, Trait.KEEPS_SIGN
_SHARES, _SEEDS, _HIDES = Trait.SHARES_MEMORY, Trait.COMPUTES_SEEDS, Trait.HIDES_NAN
_VIEW = _SIGN | _SHARES | _SEEDS
_same, _both, _first = shapes.of_first, shapes.of_all, values.of_first
_CLIPS = ("Relu", "Relu6")
_CONVOLUTION = LayerKernel(
    "_FusedQuantizedConv2D", KernelKind.CONVOLUTION, 4, _CLIPS, ("explicit", "dilated", SUMMAND)
)
_DEPTHWISE = LayerKernel("_FusedQuantizedDepthwiseConv2D", KernelKind.DEPTHWISE, 4, _CLIPS)
_SMOOTH = ("Tanh", "Sigmoid", "Elu", "GeluExact", "GeluApproximate")
_DENSE = LayerKernel("_QuantizedMatMul", KernelKind.DENSE, 2, (*_CLIPS, *_SMOOTH))


def _arithmetic_op(
    names: str, formula: Callable[..., Any], elements: values.Rule | None = None, **columns: Any
) -> OpType:
    """Return the row of a function of two tensors."""
    columns = {"traits": _POINTWISE, **columns}
    return OpType(names, _both, elements, formula=formula, **columns)


def _moving_op(
    names: str, shape: shapes.Rule, elements: values.Rule | None = None, **columns: Any
) -> OpType:
    """Return the row of an op that moves or selects values."""
    return OpType(names, shape, elements, **{"moves": 1, "traits": _SIGN, **columns})


#: Rows of the table.
ROWS = (
    # Layers.
    OpType(
        "Conv2D",
        shapes.convolution,
        kind="conv",
        role=Role.CONVOLUTION,
        layer=_CONVOLUTION,
        weight=1,
    ),
    OpType(
        "DepthwiseConv2dNative",
        shapes.depthwise_convolution,
        kind="conv",
        role=Role.CONVOLUTION,
        layer=_DEPTHWISE,
        weight=1,
    ),
    OpType(
        "MatMul", shapes.product, kind="matmul", role=Role.MATRIX_PRODUCT, layer=_DENSE, weight=1
    ),
    OpType("Conv3D", shapes.convolution, kind="conv", role=Role.CONVOLUTION),
    OpType("BatchMatMul BatchMatMulV2", shapes.product, kind="matmul", role=Role.BATCH_PRODUCT),
    OpType("BatchMatMulV3", shapes.product, kind="matmul"),
    OpType("Einsum", shapes.einsum, role=Role.BATCH_PRODUCT),
    OpType("_FusedMatMul", kind="matmul"),
    OpType("FusedPadConv2D _FusedConv2D", kind="conv"),
    OpType("Conv2DBackpropInput Conv3DBackpropInputV2", kind="conv_transpose"),
    OpType("BlockLSTM BlockLSTMV2 LSTMBlockCell GRUBlockCell", kind="recurrent"),
    OpType("BiasAdd", _same, kind="add", role=Role.BIAS, traits=_POINTWISE, weight=1),
    OpType("BiasAddV1", kind="add"),
    OpType("FusedBatchNorm", _same, role=Role.BATCH_NORM),
    OpType("FusedBatchNormV2 FusedBatchNormV3", _same, kind="batch_norm", role=Role.BATCH_NORM),
    OpType("_FusedBatchNormEx", kind="batch_norm"),
    # Functions of one tensor.
    OpType("Relu", _same, traits=_POINTWISE | _POSITIVE | _HIDES),
    OpType("Relu6", _same, kind="clip", traits=_POINTWISE | _POSITIVE | _HIDES),
    OpType("Elu Selu LeakyRelu", _same, traits=_POINTWISE),
    OpType("Sigmoid Softplus Exp", _same, traits=_POINTWISE | _POSITIVE),
    OpType("Tanh", _same, traits=_POINTWISE, formula=np.tanh),
    OpType("Erf", _same, traits=_POINTWISE, formula=special.erf),
    OpType("Erfc", _same, kind="erf", traits=_POINTWISE, formula=special.erfc),
    OpType("Square", _same, traits=_POINTWISE | _POSITIVE, formula=np.square),
    OpType("Neg", _same, values.negative, traits=_POINTWISE, formula=np.negative),
    OpType("Softmax Abs Sqrt Rsqrt LogicalNot", _same, traits=_POSITIVE),
    OpType("ClipByValue", _same, kind="clip", traits=_HIDES),
    OpType("Inv", _same, kind="reciprocal"),
    OpType(
        "Softsign LogSoftmax LRN Cumsum Cumprod Roll Sign Expm1 Log Log1p Sin Cos Tan Asin Acos "
        "Atan Sinh Cosh Erfinv Ceil Floor Round Rint Reciprocal IsNan IsInf IsFinite ZerosLike "
        "OnesLike QuantizeAndDequantizeV2 QuantizeAndDequantizeV3 QuantizeAndDequantizeV4 "
        "FakeQuantWithMinMaxVarsPerChannel",
        _same,
    ),
    OpType("FakeQuantWithMinMaxArgs FakeQuantWithMinMaxVars", _same, role=Role.FAKE_QUANTIZATION),
    OpType("MatrixBandPart", _same, kind="triangle"),
    OpType("Reverse ReverseV2", _same, kind="reverse"),
    OpType("ReverseSequence", kind="reverse"),
    OpType("L2Loss", kind="l2_norm"),
    # Functions of several tensors.
    _arithmetic_op(
        "Add AddV2",
        np.add,
        values.elementwise_rule(add),
        kind="add",
        role=Role.ADDITION,
        traits=_POINTWISE | _SEEDS,
    ),
    _arithmetic_op("Sub", np.subtract, values.elementwise_rule(sub), traits=_POINTWISE | _SEEDS),
    _arithmetic_op("Mul", np.multiply, values.elementwise_rule(mul), traits=_POINTWISE | _SEEDS),
    _arithmetic_op("RealDiv", np.divide, kind="div"),
    _arithmetic_op("Pow", np.power),
    OpType("AddN", _both, kind="add"),
    OpType("Div TruncateDiv", _both, values.elementwise_rule(values.truncated_division(floordiv))),
    OpType("Mod TruncateMod", _both, values.elementwise_rule(values.truncated_division(mod))),
    OpType("FloorDiv", _both, values.elementwise_rule(floordiv), kind="div"),
    OpType("FloorMod", _both, values.elementwise_rule(mod), traits=_SEEDS),
    OpType("Maximum", _both, values.elementwise_rule(maximum), traits=_HIDES),
    OpType("Minimum", _both, values.elementwise_rule(minimum), traits=_HIDES),
    OpType("SquaredDifference", _both, traits=_POSITIVE),
    OpType("SelectV2", _both, kind="where", traits=_HIDES),
    OpType("Select", lambda node, inputs: [inputs[1].shape], kind="where"),
    OpType(
        "DivNoNan MulNoNan Atan2 Xlogy LogicalAnd LogicalOr Greater GreaterEqual Less LessEqual "
        "Equal NotEqual",
        _both,
    ),
    OpType("BitwiseXor BitwiseAnd BitwiseOr LeftShift RightShift", traits=_SEEDS),
    OpType("StatelessRandomGetKeyCounter StatelessRandomGetKeyCounterAlg", traits=_SEEDS),
    OpType(
        "SoftmaxCrossEntropyWithLogits SparseSoftmaxCrossEntropyWithLogits", kind="cross_entropy"
    ),
    # Reductions.
    OpType("Mean", shapes.reduction, traits=_SIGN),
    OpType("Sum", shapes.reduction, values.reduction_rule(add), traits=_SIGN),
    OpType("Max", shapes.reduction, values.reduction_rule(maximum), traits=_SIGN | _HIDES),
    OpType("Min", shapes.reduction, values.reduction_rule(minimum), traits=_SIGN | _HIDES),
    OpType("Prod", shapes.reduction, values.reduction_rule(mul)),
    OpType("All Any", shapes.reduction),
    # Ops that move or select values.
    _moving_op("Reshape", shapes.reshape, _first, role=Role.RESHAPE, traits=_VIEW),
    _moving_op("Squeeze", shapes.squeeze, _first, kind="reshape", traits=_VIEW),
    _moving_op("ExpandDims", shapes.expand, _first, kind="reshape", traits=_VIEW),
    _moving_op("Transpose", shapes.transpose, traits=_SIGN | _SHARES),
    _moving_op("Slice", shapes.slice_by_size, values.slice_by_size, traits=_VIEW),
    _moving_op(
        "StridedSlice", shapes.strided_slice, values.strided_slice, kind="slice", traits=_VIEW
    ),
    _moving_op("ConcatV2", shapes.concat, values.concat, kind="concat", moves=-1, traits=_VIEW),
    _moving_op("MaxPool", shapes.pooling, kernel="QuantizedMaxPool", traits=_SIGN | _HIDES),
    _moving_op("AvgPool", shapes.pooling, kernel="QuantizedAvgPool", role=Role.AVERAGE),
    _moving_op("Pad", shapes.pad, traits=_SIGN | _SHARES),
    _moving_op("SpaceToDepth", shapes.space_to_depth),
    _moving_op("DepthToSpace", shapes.depth_to_space),
    _moving_op(
        "SpaceToBatchND", shapes.space_to_batch, kind="space_to_depth", traits=_SIGN | _SHARES
    ),
    _moving_op(
        "BatchToSpaceND", shapes.batch_to_space, kind="depth_to_space", traits=_SIGN | _SHARES
    ),
    _moving_op("ResizeNearestNeighbor", shapes.resize, kind="resize_nearest"),
    OpType("ResizeBilinear", shapes.resize, traits=_SIGN),
    OpType("ResizeBicubic", shapes.resize),
    OpType("EnsureShape", _same, kind="reshape"),
    OpType("Concat"),
    OpType("MaxPool3D", shapes.pooling, kind="max_pool"),
    OpType("AvgPool3D", shapes.pooling, kind="avg_pool"),
    OpType("MaxPoolV2", kind="max_pool"),
    OpType("PadV2", shapes.pad, kind="pad", traits=_SHARES),
    OpType("MirrorPad", shapes.pad, kind="pad"),
    OpType("Pack", shapes.stack, values.stack, kind="stack", traits=_SEEDS),
    OpType("Unpack", shapes.unstack, kind="unstack", traits=_SHARES | _SEEDS),
    OpType("Split", shapes.split, traits=_SHARES),
    OpType("SplitV", shapes.split_by_sizes, kind="split", traits=_SHARES),
    OpType("Tile", shapes.tile),
    OpType("BroadcastTo", shapes.broadcast_to, kind="broadcast"),
    OpType("Gather", shapes.gather, values.gather),
    OpType("GatherV2", shapes.gather, values.gather, kind="gather", role=Role.GATHER),
    OpType("GatherNd", kind="gather"),
    OpType("Identity", _same, _first, role=Role.IDENTITY, traits=_VIEW),
    OpType("StopGradient", _same, _first, kind="identity", role=Role.IDENTITY, traits=_SHARES),
    OpType("Snapshot", _same, kind="identity", role=Role.IDENTITY, traits=_SHARES),
    OpType("PreventGradient", _same, role=Role.IDENTITY),
    OpType("IdentityN", kind="identity", traits=_SHARES),
    OpType("Cast", _same, _first, traits=_SEEDS),
    OpType("Bitcast", traits=_SHARES | _SEEDS | Trait.READS_BITS),
    OpType("DecodeRaw DecodePaddedRaw ParseTensor SerializeTensor", traits=Trait.READS_BITS),
    # Sizes.
    OpType("Shape", elements=values.shape),
    OpType("Size", elements=values.size),
    OpType("Rank", elements=values.rank),
    OpType("Range", elements=values.range_of),
    OpType("Fill", shapes.fill, values.fill),
    # Sources, loops and branches.
    OpType("Placeholder PlaceholderV2", role=Role.PLACEHOLDER),
    OpType("PlaceholderWithDefault", role=Role.OPTIONAL_PLACEHOLDER),
    OpType("NoOp", role=Role.NOTHING),
    OpType("Assert", role=Role.CHECK),
    OpType("CheckNumerics", _same, role=Role.CHECK),
    OpType("Switch", elements=_first, role=Role.SWITCH, traits=_SHARES),
    OpType("RefSwitch _SwitchN", role=Role.SWITCH),
    OpType("Merge", role=Role.MERGE, traits=_SHARES),
    OpType("Enter", _same, _first, role=Role.ENTER),
    OpType("RefEnter", role=Role.ENTER),
    OpType("Exit", _same, _first, role=Role.EXIT),
    OpType("RefExit", role=Role.EXIT),
    OpType("NextIteration", _same, role=Role.NEXT_ITERATION),
    OpType("LoopCond", _same, role=Role.LOOP_CONDITION),
    OpType("While StatelessWhile If StatelessIf Case StatelessCase", role=Role.FUNCTIONAL),
    # Variables and lookup tables.
    OpType("Variable VariableV2", role=Role.REFERENCE_VARIABLE),
    OpType("VarHandleOp", role=Role.VARIABLE),
    OpType("ReadVariableOp", role=Role.READ),
    OpType("ResourceGather", role=Role.READ_ROWS),
    OpType("AssignVariableOp", role=Role.WRITE),
    OpType("AssignAddVariableOp AssignSubVariableOp RngSkip", role=Role.UPDATE),
    OpType(
        "HashTable HashTableV2 MutableHashTable MutableHashTableV2 MutableHashTableOfTensors "
        "MutableHashTableOfTensorsV2 MutableDenseHashTable MutableDenseHashTableV2",
        role=Role.LOOKUP_TABLE,
    ),
    OpType("LookupTableFind LookupTableFindV2", role=Role.LOOKUP),
    OpType("LookupTableSize LookupTableSizeV2", role=Role.LOOKUP_SIZE),
)
#: Op type → its properties.
OPS: Mapping[str, OpType] = {name: row for row in ROWS for name in row.names.split()}
_UNLISTED = OpType("")


def list_types_with(*roles: Role) -> frozenset[str]:
    """Return the op types with one of some roles."""
    return frozenset(name for name, row in OPS.items() if row.role in roles)


#: Layers with a constant weight → their integer kernel.
LAYERS: Mapping[str, LayerKernel] = {name: row.layer for name, row in OPS.items() if row.layer}
#: Integer kernel of layers → its kind.
INTEGER_KERNELS = {layer.op: layer.kind for layer in LAYERS.values()}
PLACEHOLDERS = list_types_with(Role.PLACEHOLDER, Role.OPTIONAL_PLACEHOLDER)
#: Ops of dataflow control: branches and loops.
CONTROL_FLOW = list_types_with(
    Role.SWITCH, Role.MERGE, Role.ENTER, Role.EXIT, Role.NEXT_ITERATION, Role.LOOP_CONDITION
) - {"_SwitchN", "RefEnter", "RefExit"}
_KIND_OF = {
    name: row.kind or re.sub(r"(?<=[a-z])(?=[A-Z])", "_", name).lower() for name, row in OPS.items()
}
#: Kind (see `neural_mp.amp.KINDS`) → op types, without gradients.
TYPES: Mapping[str, tuple[str, ...]] = {
    kind: types
    for kind in KINDS
    if (types := tuple(name for name in OPS if _KIND_OF[name] == kind))
}


def get_op_properties(node: NodeDef) -> OpType:
    """Return the properties of a node's op type."""
    return OPS.get(node.op, _UNLISTED)


def get_op_role(node: NodeDef) -> Role | None:
    """Return the role of a node."""
    return get_op_properties(node).role


def has_trait(node: NodeDef, trait: Trait) -> bool:
    """Whether a node's op type has a property."""
    return trait in get_op_properties(node).traits
