"""The table of LiteRT's ops: kind, part in quantized graphs, kernel and weight of every type."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from enum import Flag, auto

from neural_mp.core.int8_accumulation import KernelKind


class Role(Flag):
    """Part of an op in quantized graphs.

    Layers multiply by a constant weight, products two computed matrices, and rows of tables are
    read by their numbers; an op may read a constant table, or move computed rows. The integer
    kernels of joining ops pay off between INT8 ops only. Moving ops only move or select values, and
    INT8 passes through them.
    """

    NONE = 0
    CONVOLUTION = auto()
    DENSE = auto()
    LAYER = CONVOLUTION | DENSE
    PRODUCT = auto()
    TABLE = auto()
    JOINING = auto()
    MOVING = auto()
    CONVERSION = auto()


@dataclass(frozen=True)
class OpRow:
    """The properties of an op type that decide about its quantization.

    Attributes:
        kind: the kind in the four lists (see `neural_mp.amp.KINDS`), if any.
        role: the part in quantized graphs.
        kernel: the kind of the integer kernel of a layer.
        data: the position of the tensor that a layer multiplies.
        weight: the position of the weight.
        bias: the position of the bias.
        outputs, inputs: the axes of channels in the weight.
    """

    kind: str | None = None
    role: Role = Role.NONE
    kernel: KernelKind | None = None
    data: int = 0
    weight: int = 1
    bias: int = 2
    outputs: int = 0
    inputs: int = 3


_CONVOLUTION = OpRow("conv", Role.CONVOLUTION, KernelKind.CONVOLUTION)


def _parse_rows(role: Role, types: str) -> dict[str, OpRow]:
    """Return op type → row, for types with their kinds, as in `MINIMUM LOGISTIC:sigmoid`.

    Without a kind, the kind is the type in lower case; an empty one is none.
    """
    rows = {}
    for word in types.split():
        op, separator, kind = word.partition(":")
        rows[op] = OpRow((kind if separator else op.lower()) or None, role)
    return rows


#: Joining and moving are the types with 8-bit activations in the policy of AI Edge Quantizer 0.10
#: (`default_policy.py`); results of moving ops have the scale of an input there, or, if there are
#: several inputs, these have the scale of the result.
OPS: Mapping[str, OpRow] = {
    "CONV_2D": _CONVOLUTION,
    "DEPTHWISE_CONV_2D": replace(_CONVOLUTION, kernel=KernelKind.DEPTHWISE, outputs=3, inputs=0),
    "TRANSPOSE_CONV": replace(_CONVOLUTION, kind="conv_transpose", data=2, bias=3),
    "FULLY_CONNECTED": OpRow("matmul", Role.DENSE, KernelKind.DENSE, inputs=1),
    "BATCH_MATMUL": OpRow("matmul", Role.PRODUCT, KernelKind.DENSE),
    "EMBEDDING_LOOKUP": OpRow("gather", Role.TABLE, inputs=1),
    "GATHER": OpRow("gather", Role.TABLE | Role.MOVING, data=1, weight=0),
    **_parse_rows(
        Role.JOINING,
        "ADD SUB MUL DIV MEAN SUM SQRT RSQRT TANH SOFTMAX GELU RELU SQUARED_DIFFERENCE"
        " AVERAGE_POOL_2D:avg_pool LOGISTIC:sigmoid HARD_SWISH RESIZE_BILINEAR",
    ),
    **_parse_rows(
        Role.MOVING,
        "RESHAPE TRANSPOSE SPLIT SLICE PAD PACK:stack UNPACK:unstack"
        " STRIDED_SLICE:slice MIRROR_PAD:pad MAX_POOL_2D:max_pool GATHER_ND:gather"
        " CONCATENATION:concat BROADCAST_TO:broadcast SPACE_TO_DEPTH"
        " RESIZE_NEAREST_NEIGHBOR:resize_nearest",
    ),
    **_parse_rows(Role.CONVERSION, "QUANTIZE: DEQUANTIZE:"),
    **_parse_rows(
        Role.NONE,
        "ABS CEIL FLOOR ROUND SIGN NEG EXP LOG ELU PRELU MAXIMUM MINIMUM POW CUMSUM SQUARE TILE"
        " CONV_3D:conv CONV_3D_TRANSPOSE:conv_transpose LSTM:recurrent RNN:recurrent"
        " UNIDIRECTIONAL_SEQUENCE_LSTM:recurrent UNIDIRECTIONAL_SEQUENCE_RNN:recurrent"
        " BIDIRECTIONAL_SEQUENCE_LSTM:recurrent BIDIRECTIONAL_SEQUENCE_RNN:recurrent"
        " LEAKY_RELU LOG_SOFTMAX L2_NORMALIZATION:l2_norm FLOOR_DIV:div FLOOR_MOD:div"
        " RELU6:clip RELU_N1_TO_1:clip RELU_0_TO_1:clip REDUCE_MAX:max REDUCE_MIN:min"
        " REDUCE_PROD:prod SELECT:where SELECT_V2:where PADV2:pad SPLIT_V:split"
        " SQUEEZE:reshape EXPAND_DIMS:reshape REVERSE_V2:reverse DEPTH_TO_SPACE"
        " SCATTER_ND: SHAPE: SIN: COS: CAST: WHILE: IF:",
    ),
}
_UNKNOWN = OpRow()


def get_op_row(op_type: str) -> OpRow:
    """Return the row of an op type; an empty one for types outside of the table."""
    return OPS.get(op_type, _UNKNOWN)


def has_role(op_type: str, role: Role) -> bool:
    """Whether an op type has one of some roles."""
    return bool(get_op_row(op_type).role & role)


def _group_types_by_kind() -> dict[str, list[str]]:
    groups: dict[str, list[str]] = {}
    for op_type, row in OPS.items():
        if row.kind is not None:
            groups.setdefault(row.kind, []).append(op_type)
    return groups


#: Kind → op types.
TYPES: Mapping[str, list[str]] = _group_types_by_kind()
