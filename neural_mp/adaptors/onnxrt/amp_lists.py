"""Which ops are safe in 16 bits, by ONNX's names.

What TensorFlow 2.21's runtime says of its own ops (`auto_mixed_precision_lists.h`), carried over to
the ops of ONNX that compute the same; where ONNX has ops of its own (Gemm, HardSwish, Gelu), they
stand where what they are made of stands. BF16 has the range of FP32, so that sums and means, which
can overflow FP16, are denied to that alone.
"""

from __future__ import annotations

from neural_mp.amp import FourLists
from neural_mp.precision import Precision

_ALLOW = frozenset({"Conv", "ConvTranspose", "Einsum", "Gemm", "MatMul"})
_SUMS = frozenset({"Mean", "ReduceMean", "ReduceSum", "ReduceSumSquare", "Sum"})
_INFER = frozenset(
    {
        *("Add", "AveragePool", "BatchNormalization", "Celu", "Div", "Elu", "Erf", "Gelu"),
        *("GlobalAveragePool", "HardSigmoid", "HardSwish", "InstanceNormalization", "LeakyRelu"),
        *("Log", "LogSoftmax", "Mish", "Mul", "PRelu", "Reciprocal", "ReduceProd", "Selu"),
        *("Sigmoid", "Softmax", "Softplus", "Softsign", "Sqrt", "Sub", "Swish", "Tanh"),
        *("ThresholdedRelu",),
    }
)
_CLEAR = frozenset(
    {
        *("Abs", "Ceil", "Clip", "Concat", "DepthToSpace", "Expand", "Flatten", "Floor", "Gather"),
        *("GatherElements", "GatherND", "GlobalMaxPool", "Identity", "Max", "MaxPool", "Min"),
        *("Neg", "Pad", "ReduceMax", "ReduceMin", "Relu", "Reshape", "Resize", "ReverseSequence"),
        *("Round", "Sign", "Slice", "SpaceToDepth", "Split"),
        *("Squeeze", "Tile", "Transpose", "Trilu", "Unsqueeze", "Where"),
    }
)
_DENY = frozenset({"Exp", "Pow", "ReduceL2", "ReduceLogSumExp", "ReduceLogSum"})


def lists_for(precision: Precision) -> FourLists:
    """The four lists of a 16-bit precision."""
    if precision is Precision.FP16:
        return FourLists(_ALLOW, _DENY | _SUMS, _INFER, _CLEAR)
    return FourLists(_ALLOW, _DENY, _INFER | _SUMS, _CLEAR)
