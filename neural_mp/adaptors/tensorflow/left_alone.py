"""What of a model stays in FP32 whatever a plan says, in words for its user."""

from __future__ import annotations

from neural_mp.adaptors.common.left_alone import stays_in_fp32
from neural_mp.adaptors.tensorflow.tensor_graph import TensorGraph

#: Layers that hold most of a model's weights, and do most of its work.
_HEAVY = ("MatMul", "BatchMatMulV2", "Conv2D", "DepthwiseConv2dNative", "Conv3D")


def left_alone(graph: TensorGraph) -> tuple[str, ...]:
    """A sentence on the layers in functions that are not put into the graph, if there are any."""
    inside = (node.op for function in graph.library.function for node in function.node_def)
    return stays_in_fp32(
        (op for op in inside if op in _HEAVY),
        "in functions",
        "only what lies in the graph itself, in its loops and in its branches is converted",
    )
