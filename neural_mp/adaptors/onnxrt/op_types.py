"""ONNX op types of the kinds of op in the four lists."""

from __future__ import annotations

from collections.abc import Mapping

from neural_mp.adaptors.common.naming import in_camel_case

#: Kind (see `neural_mp.amp.KINDS`) → op types.
TYPES: Mapping[str, tuple[str, ...]] = {
    **in_camel_case(
        "conv conv_transpose einsum sub mul div elu celu selu sigmoid tanh softplus softsign "
        "gelu mish hard_sigmoid hard_swish erf log sqrt reciprocal softmax log_softmax exp pow "
        "sinh cosh tan asin acos abs ceil floor round sign neg clip relu concat split slice "
        "tile pad identity transpose where space_to_depth depth_to_space"
    ),
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
