"""Ops of LiteRT that files may contain, with the operands that their kernels read unchecked."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

#: Any number of operands.
MANY = 1 << 16


@dataclass(frozen=True)
class Operands:
    """Numbers of operands and results of an op.

    Attributes:
        required: number of operands that must be listed.
        most: number of operands that may be listed.
        results: number of results that must be listed.
        optional: positions of listed operands that may be left out.
    """

    required: int
    most: int
    results: int = 1
    optional: frozenset[int] = frozenset()


def _list_alike(names: str, operands: Operands) -> Iterable[tuple[str, Operands]]:
    return [(name, operands) for name in names.split()]


_LSTM_OPTIONAL = frozenset({1, 5, 9, 10, 11, 12, 16, 17, 20, 21, 22, 23})
#: The bias.
_THIRD, _FOURTH = frozenset({2}), frozenset({3})
#: Op → its operands. Ops outside read text, sparse tensors or bytes of a custom format.
OPERANDS: Mapping[str, Operands] = dict(
    [
        *_list_alike(
            "ABS AVERAGE_POOL_2D BITCAST BUCKETIZE CAST CEIL COMPLEX_ABS COS DEPTH_TO_SPACE "
            "DEQUANTIZE ELU EXP FAKE_QUANT FLOOR GELU HARD_SWISH IMAG L2_NORMALIZATION L2_POOL_2D "
            "LEAKY_RELU LOCAL_RESPONSE_NORMALIZATION LOG LOGICAL_NOT LOGISTIC LOG_SOFTMAX "
            "MATRIX_DIAG MAX_POOL_2D NEG QUANTIZE RANDOM_STANDARD_NORMAL RANDOM_UNIFORM RANK REAL "
            "RELU RELU6 RELU_0_TO_1 RELU_N1_TO_1 ROUND RSQRT SHAPE SIGN SIN SOFTMAX "
            "SPACE_TO_DEPTH SQRT SQUARE SQUEEZE TANH UNPACK WHERE ZEROS_LIKE READ_VARIABLE",
            Operands(1, 1),
        ),
        *_list_alike(
            "ADD ARG_MAX ARG_MIN ATAN2 BATCH_MATMUL BITWISE_XOR BROADCAST_ARGS BROADCAST_TO "
            "CUMSUM DIV EMBEDDING_LOOKUP EQUAL EXPAND_DIMS FILL FLOOR_DIV FLOOR_MOD GATHER "
            "GATHER_ND GREATER GREATER_EQUAL LESS LESS_EQUAL LOGICAL_AND LOGICAL_OR "
            "MATRIX_SET_DIAG MAXIMUM MEAN MINIMUM MIRROR_PAD MUL MULTINOMIAL NOT_EQUAL PAD POW "
            "PRELU REDUCE_ALL REDUCE_ANY REDUCE_MAX REDUCE_MIN REDUCE_PROD RESIZE_BILINEAR "
            "RESIZE_NEAREST_NEIGHBOR REVERSE_SEQUENCE REVERSE_V2 RFFT2D RIGHT_SHIFT SEGMENT_SUM "
            "SPLIT SQUARED_DIFFERENCE SUB SUM TILE TRANSPOSE",
            Operands(2, 2),
        ),
        *_list_alike(
            "BATCH_TO_SPACE_ND DYNAMIC_UPDATE_SLICE PADV2 RANGE SCATTER_ND SELECT SELECT_V2 SLICE "
            "SPACE_TO_BATCH_ND SPLIT_V UNSORTED_SEGMENT_MAX UNSORTED_SEGMENT_MIN "
            "UNSORTED_SEGMENT_PROD UNSORTED_SEGMENT_SUM",
            Operands(3, 3),
        ),
        *_list_alike("ONE_HOT SPARSE_TO_DENSE STRIDED_SLICE", Operands(4, 4)),
        # XNNPACK reads the bias of a depthwise convolution even where the op lacks one.
        *_list_alike("CONV_2D DEPTHWISE_CONV_2D", Operands(3, 3)),
        *_list_alike("CONV_3D FULLY_CONNECTED", Operands(2, 3, optional=_THIRD)),
        *_list_alike("TRANSPOSE_CONV CONV_3D_TRANSPOSE", Operands(3, 4, optional=_FOURTH)),
        *_list_alike("CONCATENATION PACK ADD_N", Operands(1, MANY)),
        *_list_alike("IF WHILE", Operands(1, MANY, results=0)),
        ("STABLEHLO_COMPOSITE", Operands(0, MANY, results=0)),
        ("RESHAPE", Operands(1, 2)),
        ("UNIQUE", Operands(1, 1, results=2)),
        ("TOPK_V2", Operands(2, 2, results=2)),
        ("NON_MAX_SUPPRESSION_V4", Operands(5, 5, results=2)),
        ("NON_MAX_SUPPRESSION_V5", Operands(6, 6, results=3)),
        ("CALL_ONCE", Operands(0, 0, results=0)),
        ("VAR_HANDLE", Operands(0, 0)),
        ("ASSIGN_VARIABLE", Operands(2, 2, results=0)),
        ("SVDF", Operands(5, 5, optional=_FOURTH)),
        ("UNIDIRECTIONAL_SEQUENCE_RNN", Operands(5, 5)),
        ("UNIDIRECTIONAL_SEQUENCE_LSTM", Operands(20, 24, optional=_LSTM_OPTIONAL)),
    ]
)

_BINARY = (
    "ADD ATAN2 BITWISE_XOR DIV FLOOR_DIV FLOOR_MOD LOGICAL_AND LOGICAL_OR MAXIMUM MINIMUM MUL POW "
    "RIGHT_SHIFT SQUARED_DIFFERENCE SUB"
)
_UNARY = (
    "ABS AVERAGE_POOL_2D CEIL COS DEPTH_TO_SPACE ELU EXP FLOOR GELU HARD_SWISH L2_NORMALIZATION "
    "L2_POOL_2D LEAKY_RELU LOCAL_RESPONSE_NORMALIZATION LOG LOGICAL_NOT LOGISTIC LOG_SOFTMAX "
    "MATRIX_DIAG MAX_POOL_2D NEG RELU RELU6 RELU_0_TO_1 RELU_N1_TO_1 ROUND RSQRT SIGN SIN SOFTMAX "
    "SPACE_TO_DEPTH SQRT SQUARE SQUEEZE TANH UNPACK ZEROS_LIKE"
)
_SHAPED = (
    "BATCH_TO_SPACE_ND BROADCAST_TO CUMSUM DYNAMIC_UPDATE_SLICE EXPAND_DIMS GATHER GATHER_ND MEAN "
    "MIRROR_PAD PAD PADV2 PRELU REDUCE_ALL REDUCE_ANY REDUCE_MAX REDUCE_MIN REDUCE_PROD RESHAPE "
    "RESIZE_BILINEAR RESIZE_NEAREST_NEIGHBOR REVERSE_SEQUENCE REVERSE_V2 SLICE SPACE_TO_BATCH_ND "
    "SPLIT_V STRIDED_SLICE SUM TILE TRANSPOSE"
)
_MOVING = (
    "ARG_MAX ARG_MIN ASSIGN_VARIABLE BATCH_TO_SPACE_ND BITCAST BITWISE_XOR BROADCAST_ARGS "
    "BROADCAST_TO CALL_ONCE CAST CONCATENATION DEPTH_TO_SPACE DYNAMIC_UPDATE_SLICE EXPAND_DIMS "
    "FILL GATHER GATHER_ND IF MIRROR_PAD ONE_HOT PACK PAD PADV2 RANK READ_VARIABLE RESHAPE "
    "REVERSE_SEQUENCE REVERSE_V2 RIGHT_SHIFT SCATTER_ND SELECT SELECT_V2 SHAPE SLICE "
    "SPACE_TO_BATCH_ND SPACE_TO_DEPTH SPARSE_TO_DENSE SPLIT SPLIT_V SQUEEZE STABLEHLO_COMPOSITE "
    "STRIDED_SLICE TILE TOPK_V2 TRANSPOSE UNPACK VAR_HANDLE WHERE WHILE ZEROS_LIKE"
)
#: Ops whose operands and results are all of one type.
SAME_TYPES = frozenset(f"{_BINARY} {_UNARY} ADD_N CONCATENATION PACK".split())
#: Ops whose results are of the type of the first operand; others are sizes or positions.
TYPES_OF_FIRST = frozenset(_SHAPED.split())
#: Ops that move integers, or compute with them as they are, so that no scale is needed.
MOVING = frozenset(_MOVING.split())
#: Ops whose results are booleans.
COMPARISONS = frozenset({"EQUAL", "GREATER", "GREATER_EQUAL", "LESS", "LESS_EQUAL", "NOT_EQUAL"})
