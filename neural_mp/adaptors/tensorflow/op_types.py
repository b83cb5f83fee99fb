"""TensorFlow's op types of each kind of op that is safe or unsafe in 16 bits."""

from __future__ import annotations

from collections.abc import Mapping

from neural_mp.adaptors.common.naming import in_camel_case

#: Kind (see `neural_mp.amp.KINDS`) → op types, without gradients.
TYPES: Mapping[str, tuple[str, ...]] = {
    **in_camel_case(
        "einsum sub mul elu selu leaky_relu sigmoid tanh softplus softsign log log1p sqrt rsqrt "
        "square squared_difference softmax log_softmax prod mean sum exp expm1 pow cumsum "
        "cumprod sinh cosh tan asin acos erfinv abs ceil floor round sign neg relu tile "
        "transpose maximum minimum max min resize_bilinear"
    ),
    "matmul": ("MatMul", "BatchMatMul", "BatchMatMulV2", "BatchMatMulV3", "_FusedMatMul"),
    "conv": ("Conv2D", "Conv3D", "DepthwiseConv2dNative", "FusedPadConv2D", "_FusedConv2D"),
    "conv_transpose": ("Conv2DBackpropInput", "Conv3DBackpropInputV2"),
    "recurrent": ("BlockLSTM", "BlockLSTMV2", "LSTMBlockCell", "GRUBlockCell"),
    "add": ("Add", "AddV2", "AddN", "BiasAdd", "BiasAddV1"),
    "div": ("Div", "RealDiv", "FloorDiv"),
    "avg_pool": ("AvgPool", "AvgPool3D"),
    "batch_norm": ("FusedBatchNormV2", "FusedBatchNormV3", "_FusedBatchNormEx"),
    "erf": ("Erf", "Erfc"),
    "reciprocal": ("Reciprocal", "Inv"),
    "l2_norm": ("L2Loss",),
    "cross_entropy": ("SoftmaxCrossEntropyWithLogits", "SparseSoftmaxCrossEntropyWithLogits"),
    "clip": ("ClipByValue", "Relu6"),
    "concat": ("Concat", "ConcatV2"),
    "stack": ("Pack",),
    "split": ("Split", "SplitV"),
    "unstack": ("Unpack",),
    "slice": ("Slice", "StridedSlice"),
    "gather": ("Gather", "GatherV2", "GatherNd"),
    "pad": ("Pad", "PadV2", "MirrorPad"),
    "broadcast": ("BroadcastTo",),
    "identity": ("Identity", "IdentityN", "StopGradient", "Snapshot"),
    "reshape": ("Reshape", "Squeeze", "ExpandDims", "EnsureShape"),
    "reverse": ("Reverse", "ReverseV2", "ReverseSequence"),
    "where": ("Select", "SelectV2"),
    "triangle": ("MatrixBandPart",),
    "max_pool": ("MaxPool", "MaxPoolV2", "MaxPool3D"),
    "resize_nearest": ("ResizeNearestNeighbor",),
    "space_to_depth": ("SpaceToDepth", "SpaceToBatchND"),
    "depth_to_space": ("DepthToSpace", "BatchToSpaceND"),
}
