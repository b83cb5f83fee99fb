"""The ops of an ONNX model and the edges between them."""

from __future__ import annotations

from neural_mp.adaptors.onnxrt.fusion import JOINERS, read_by
from neural_mp.adaptors.onnxrt.model import OnnxModel
from neural_mp.core.graph import Op, OpGraph


def build_graph(model: OnnxModel) -> OpGraph:
    """Every node with its edges and cluster; further results of a node as ops behind it."""
    anatomy = model.anatomy
    ops = []
    for name, node in anatomy.nodes.items():
        read = [anatomy.names[value] for value in read_by(node) if value in anatomy.names]
        ops.append(
            Op(
                name,
                node.op_type,
                tuple(dict.fromkeys(read)),
                cluster=anatomy.layer_of.get(name),
                carries_int8=name in anatomy.movers,
                writes_int8=node.op_type == "Conv" and name in anatomy.clusters,
                joins_int8=node.op_type in JOINERS and name in anatomy.clusters,
            )
        )
    for part, op in anatomy.parts.items():
        moved = op in anatomy.movers
        ops.append(Op(part, anatomy.nodes[op].op_type, (op,), carries_int8=moved))
    outputs = {anatomy.names[v] for v in model.program.graph.outputs if v in anatomy.names}
    return OpGraph(ops, [port.tensor for port in model.signature.inputs], sorted(outputs))
