"""OpenVINO op types of the kinds of op in the four lists."""

from __future__ import annotations

from collections.abc import Mapping

from neural_mp.adaptors.common.naming import in_camel_case
from neural_mp.adaptors.openvino.recurrent import RECURRENT

#: Kind (see `neural_mp.amp.KINDS`) → op types.
TYPES: Mapping[str, tuple[str, ...]] = {
    **in_camel_case(
        "einsum elu selu sigmoid tanh gelu mish hard_sigmoid erf log sqrt softmax log_softmax exp "
        "sinh cosh tan asin acos abs floor round sign relu concat split tile pad transpose "
        "space_to_depth depth_to_space"
    ),
    "conv": ("Convolution", "GroupConvolution"),
    "conv_transpose": ("ConvolutionBackpropData", "GroupConvolutionBackpropData"),
    "matmul": ("MatMul",),
    "recurrent": RECURRENT,
    "add": ("Add",),
    "sub": ("Subtract", "SquaredDifference"),
    "mul": ("Multiply",),
    "div": ("Divide", "Mod", "FloorMod"),
    "pow": ("Power",),
    "neg": ("Negative",),
    "ceil": ("Ceiling",),
    "softplus": ("SoftPlus",),
    "softsign": ("SoftSign",),
    "silu": ("Swish",),
    "hard_swish": ("HSwish",),
    "clip": ("Clamp",),
    "prelu": ("PRelu",),
    "avg_pool": ("AvgPool", "AdaptiveAvgPool"),
    "max_pool": ("MaxPool", "AdaptiveMaxPool"),
    "batch_norm": ("BatchNormInference",),
    "group_norm": ("GroupNormalization",),
    "layer_norm": ("MVN",),
    "l2_norm": ("NormalizeL2", "ReduceL2"),
    "prod": ("ReduceProd",),
    "mean": ("ReduceMean",),
    "sum": ("ReduceSum", "ReduceL1"),
    "max": ("ReduceMax",),
    "min": ("ReduceMin",),
    "maximum": ("Maximum",),
    "minimum": ("Minimum",),
    "cumsum": ("CumSum",),
    "where": ("Select",),
    "slice": ("Slice", "StridedSlice", "VariadicSplit"),
    "broadcast": ("Broadcast",),
    "reverse": ("ReverseSequence",),
    "reshape": ("Reshape", "Squeeze", "Unsqueeze"),
    "gather": ("Gather", "GatherElements", "GatherND"),
    "resize_nearest": ("Interpolate",),
}
