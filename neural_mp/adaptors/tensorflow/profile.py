"""Seconds of every op, from the runtime's own step statistics."""

from __future__ import annotations

from collections import defaultdict

from neural_mp.adaptors.tensorflow.model import TensorFlowModel
from neural_mp.adaptors.tensorflow.tensor_graph import Array


def time_ops(model: TensorFlowModel, feeds: dict[str, Array], runs: int) -> dict[str, list[float]]:
    """Op (or conversion, by node name) → seconds of each of so many runs.

    The runtime fuses ops as it starts; a fused op bears the name of the last of them, and counts
    for the layer it belongs to.
    """
    outputs = [tensor for tensor in model.signature.output_tensors if tensor not in feeds]
    taken: dict[str, list[float]] = defaultdict(list)
    for run in model.runner.traced(feeds, outputs, runs):
        seconds: dict[str, float] = defaultdict(float)
        for device in run.dev_stats:
            for node in device.node_stats:
                if node.node_name in model.graph:
                    name = model.counted_for.get(node.node_name, node.node_name)
                    seconds[name] += node.op_end_rel_nanos * 1e-9 - node.op_start_rel_nanos * 1e-9
        for name, value in seconds.items():
            taken[name].append(value)
    return taken
