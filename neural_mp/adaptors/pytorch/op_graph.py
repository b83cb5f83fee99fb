"""Framework-independent graph of canonicalized modules, with fusion groups of integer kernels."""

from __future__ import annotations

import torch
from torch.fx import Node
from torch.utils import _pytree as pytree

from neural_mp.adaptors.pytorch.capture.canonicalize import layers_of
from neural_mp.adaptors.pytorch.graph import graph_edit as fx
from neural_mp.adaptors.pytorch.graph.casts import PRECISIONS
from neural_mp.adaptors.pytorch.graph.fusion import fused_layers
from neural_mp.adaptors.pytorch.graph.model import TorchModel
from neural_mp.adaptors.pytorch.graph.quantizable_ops import quantize_agnostic
from neural_mp.core.graph import MIN_CONSTANT_ELEMENTS, Op, OpGraph
from neural_mp.core.precision import Precision


def build_graph(model: TorchModel) -> OpGraph:
    """Build the graph of ops, edges and fusion groups from all parts of a model."""
    ops: list[Op] = []
    inputs: list[str] = []
    outputs: list[str] = []
    #: Address of a constant → its name, after the first op that reads it.
    names: dict[int, str] = {}
    for path, part in model.parts.items():
        module = part.portable
        heads = fused_layers(module)
        for name, node in fx.op_nodes(module).items():
            op = Op(
                name,
                fx.op_type(node),
                _producer_names(node),
                heads.get(name),
                quantize_agnostic(node),
                weights=sum(tensor.numel() for tensor in fx.constants_of(module, node)),
                constants=tuple(
                    names.setdefault(tensor.data_ptr(), f"{name}:{len(names)}")
                    for tensor in fx.constants_of(module, node)
                    if tensor.numel() >= MIN_CONSTANT_ELEMENTS
                ),
                layers=layers_of(node, path),
                source_precision=_source_precision(node),
                widened=model.signature.dtype in PRECISIONS,
                shape=_output_shape(node),
            )
            ops.append(op)
        for node in module.graph.nodes:
            if node.op == "placeholder" and fx.has_tensors(node):
                inputs.append(fx.tensor_name(node))
            elif node.op == "output":
                outputs += _producer_names(node)
    return OpGraph(ops, inputs, outputs)


def _source_precision(node: Node) -> Precision:
    """Return the precision of the first float tensor that a node reads, else of its result."""
    values = (item.meta.get("val") for item in (*node.all_input_nodes, node))
    dtypes = (leaf.dtype for leaf in pytree.tree_leaves(tuple(values)) if fx.is_float(leaf))
    return PRECISIONS.get(next(dtypes, None), Precision.FP32)


def _output_shape(node: Node) -> tuple[int | None, ...] | None:
    """Return the sizes of the first tensor that a node returns, None for a free size."""
    leaves = pytree.tree_leaves(node.meta.get("val"))
    shape = next((leaf.shape for leaf in leaves if isinstance(leaf, torch.Tensor)), None)
    if shape is None:
        return None
    return tuple(size if isinstance(size, int) else None for size in shape)


def _producer_names(node: Node) -> tuple[str, ...]:
    """Return the ops and graph inputs that a node reads, skipping conversions."""
    sources: dict[str, None] = {}
    for source in node.all_input_nodes:
        if source.op == "get_attr" or not fx.has_tensors(source):
            continue
        if source.op == "placeholder" or fx.OP_NAME in source.meta:
            sources[fx.tensor_name(source)] = None
        else:
            sources.update(dict.fromkeys(_producer_names(source)))
    return tuple(sources)
