"""Which ops are safe in 16 bits, by ONNX's names.

What TensorFlow 2.21's runtime says of its own ops (`auto_mixed_precision_lists.h`), carried over to
the ops of ONNX that compute the same; where ONNX has ops of its own (Gemm, HardSwish, Gelu), they
stand where what they are made of stands. BF16 has the range of FP32, so that sums and means, which
can overflow FP16, are denied to that alone.
"""

from __future__ import annotations

from neural_mp.precision import Precision

#: Safe and worth it.
ALLOW = frozenset({"Conv", "ConvTranspose", "Einsum", "Gemm", "MatMul"})
_SUMS = frozenset({"Mean", "ReduceMean", "ReduceSum", "ReduceSumSquare", "Sum"})
#: Safe where nothing dangerous comes before.
_INFER = frozenset(
    {
        *("Add", "AveragePool", "BatchNormalization", "Celu", "Div", "Elu", "Erf", "Gelu"),
        *("GlobalAveragePool", "HardSigmoid", "HardSwish", "InstanceNormalization", "LeakyRelu"),
        *("Log", "LogSoftmax", "Mish", "Mul", "PRelu", "Reciprocal", "ReduceProd", "Selu"),
        *("Sigmoid", "Softmax", "Softplus", "Softsign", "Sqrt", "Sub", "Swish", "Tanh"),
        *("ThresholdedRelu",),
    }
)
#: Of no effect on the numbers.
_CLEAR = frozenset(
    {
        *("Abs", "Ceil", "Clip", "Concat", "DepthToSpace", "Expand", "Flatten", "Floor", "Gather"),
        *("GatherElements", "GatherND", "GlobalMaxPool", "Identity", "Max", "MaxPool", "Min"),
        *("Neg", "Pad", "ReduceMax", "ReduceMin", "Relu", "Reshape", "Resize", "ReverseSequence"),
        *("Round", "Sign", "Slice", "SpaceToDepth", "Split"),
        *("Squeeze", "Tile", "Transpose", "Trilu", "Unsqueeze", "Where"),
    }
)
#: Dangerous.
_DENY = frozenset({"Exp", "Pow", "ReduceL2", "ReduceLogSumExp", "ReduceLogSum"})


def denied(precision: Precision) -> frozenset[str]:
    """The ops that are unsafe in a precision."""
    return _DENY | _SUMS if precision is Precision.FP16 else _DENY


def listed(precision: Precision) -> frozenset[str]:
    """The ops that are safe in a precision, by themselves or where their surroundings are."""
    return (ALLOW | _INFER | _CLEAR | _SUMS) - denied(precision)
