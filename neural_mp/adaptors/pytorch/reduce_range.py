"""Reduced weight range of converted models, which keeps saturating accumulation exact."""

from __future__ import annotations

from collections.abc import Iterator

from torch.fx import GraphModule, Node

from neural_mp.adaptors.common.quant_params import IntegerWeight, saturating, wide_kinds
from neural_mp.adaptors.pytorch.convert import IntegerWeights
from neural_mp.adaptors.pytorch.graph import qdq_ops as ops
from neural_mp.adaptors.pytorch.graph.fusion import is_node
from neural_mp.adaptors.pytorch.graph.graph_edit import attribute
from neural_mp.adaptors.pytorch.graph.model import TorchModel
from neural_mp.adaptors.pytorch.graph.quantizable_ops import INTEGER_LAYERS, kernel_kind
from neural_mp.adaptors.pytorch.kernels.lowering import rewritten
from neural_mp.core.int8_accumulation import REDUCED_WEIGHT, KernelKind


def full_range_kernels(model: TorchModel) -> frozenset[KernelKind]:
    """Return the kinds of integer kernels that have a weight beyond ±63."""
    parts = model.parts.values()
    return wide_kinds(weight for part in parts for weight in _weights(part.portable))


def with_reduced_weights(model: TorchModel) -> TorchModel:
    """Return the model with weights requantized to ±63 if their kernel may saturate."""
    return rewritten(model, _reduce)


def _reduce(module: GraphModule) -> None:
    weights = IntegerWeights(module)
    for layer in saturating(_weights(module)):
        weights.store(layer, REDUCED_WEIGHT)


def _weights(module: GraphModule) -> Iterator[IntegerWeight[Node]]:
    """Yield weights of layers with quantized inputs; skip weight-only layers."""
    for node in module.graph.nodes:
        if node.target not in INTEGER_LAYERS:
            continue
        source, weight = node.args[:2]
        multiplied = is_node(source, ops.dequantize, ops.dequantize_dynamic)
        if multiplied and is_node(weight, ops.dequantize_weight):
            integers = attribute(module, str(weight.args[0].target))
            yield IntegerWeight(node, kernel_kind(node), integers.numpy())
