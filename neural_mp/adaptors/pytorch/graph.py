"""The neutral graph of prepared modules, with the fusion groups that integer kernels run as one."""

from __future__ import annotations

from collections.abc import Iterable

from torch.fx import GraphModule, Node

from neural_mp.adaptors.pytorch.fusion import fused_layers
from neural_mp.adaptors.pytorch.layers import quantize_agnostic
from neural_mp.adaptors.pytorch.model import (
    OP_NAME,
    constants_of,
    has_tensors,
    op_nodes,
    op_type,
    tensor_name,
)
from neural_mp.core.graph import Op, OpGraph


def build_graph(modules: Iterable[GraphModule]) -> OpGraph:
    """Ops, edges and fusion groups of prepared modules, side by side."""
    ops: list[Op] = []
    inputs: list[str] = []
    outputs: list[str] = []
    for module in modules:
        heads = fused_layers(module)
        for name, node in op_nodes(module).items():
            agnostic = quantize_agnostic(node)
            weights = sum(tensor.numel() for tensor in constants_of(module, node))
            sources, head = _sources(node), heads.get(name)
            ops.append(Op(name, op_type(node), sources, head, agnostic, weights=weights))
        for node in module.graph.nodes:
            if node.op == "placeholder" and has_tensors(node):
                inputs.append(tensor_name(node))
            elif node.op == "output":
                outputs += _sources(node)
    return OpGraph(ops, inputs, outputs)


def _sources(node: Node) -> tuple[str, ...]:
    """The ops and graph inputs that a node reads; of a converted graph, past its conversions."""
    found: dict[str, None] = {}
    for source in node.all_input_nodes:
        if source.op == "get_attr" or not has_tensors(source):
            continue
        if source.op == "placeholder" or OP_NAME in source.meta:
            found[tensor_name(source)] = None
        else:
            found.update(dict.fromkeys(_sources(source)))
    return tuple(found)
