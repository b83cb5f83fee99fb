"""Proof that a graph computes every sample of a batch on its own."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch.fx import GraphModule, Node
from torch.utils import _pytree as pytree

from neural_mp.adaptors.pytorch.graph import qdq_ops as ops
from neural_mp.adaptors.pytorch.graph.dynamic_shapes import SIZES
from neural_mp.adaptors.pytorch.graph.fusion import is_node
from neural_mp.adaptors.pytorch.graph.graph_edit import arguments, expressions, sizes_of_result

aten = torch.ops.aten

#: Ops on single values, whose operands are broadcast.
_ON_VALUES = frozenset(
    {
        aten.relu.default,
        aten.gelu.default,
        aten.silu.default,
        aten.sigmoid.default,
        aten.tanh.default,
        aten.hardtanh.default,
        aten.hardswish.default,
        aten.elu.default,
        aten.hardsigmoid.default,
        aten.leaky_relu.default,
        aten.mish.default,
        aten.softplus.default,
        aten.exp.default,
        aten.abs.default,
        aten.neg.default,
        aten.clamp.default,
        aten.clamp_min.default,
        aten.pow.Tensor_Scalar,
        aten._to_copy.default,
        aten.clone.default,
        aten.contiguous.default,
        aten.add.Tensor,
        aten.sub.Tensor,
        aten.mul.Tensor,
        aten.div.Tensor,
        aten.add.Scalar,
        aten.sub.Scalar,
        aten.mul.Scalar,
        aten.div.Scalar,
        aten.maximum.default,
        aten.minimum.default,
        ops.quantize,
        ops.dequantize,
    }
)
#: Op on a batch, whose other operands are constants → number of axes of the batch; None for any.
_ON_BATCHES: Mapping[Any, int | None] = {
    **dict.fromkeys((aten.conv1d.default, aten.conv_transpose1d.default), 3),
    **dict.fromkeys((aten.conv2d.default, aten.conv_transpose2d.input), 4),
    **dict.fromkeys((aten.conv3d.default, aten.conv_transpose3d.input), 5),
    **dict.fromkeys((aten.max_pool2d.default, aten.avg_pool2d.default), 4),
    **dict.fromkeys((aten.adaptive_avg_pool2d.default, aten.pixel_shuffle.default), 4),
    **dict.fromkeys((aten.upsample_nearest2d.vec, aten.upsample_bilinear2d.vec), 4),
    **dict.fromkeys((aten.linear.default, aten.reshape.default, aten.prelu.default), None),
}
#: Ops along the axes that their arguments name.
_ALONG_AXES = frozenset(
    {
        aten.mean.dim,
        aten.sum.dim_IntList,
        aten.amax.default,
        aten.layer_norm.default,
        aten.softmax.int,
        aten.log_softmax.int,
        aten.cat.default,
        aten.slice.Tensor,
        aten.select.int,
        aten.unsqueeze.default,
        aten.squeeze.dim,
        aten.squeeze.dims,
        aten.transpose.int,
        aten.permute.default,
    }
)


def computes_samples_alone(portable: GraphModule) -> bool:
    """Whether no sample of a result depends on another sample of the inputs.

    The inputs must share a dynamic first axis, the samples, and every op between them and the
    results must be listed here: False does not mean that samples depend on each other.
    """
    inputs = [node for node in portable.graph.nodes if node.op == "placeholder"]
    sizes = portable.meta[SIZES]
    # The first axis may have any length from one on.
    if not inputs or not all(
        isinstance(a, tuple) and a and a[0].least <= 1 and a[0].least != a[0].largest for a in sizes
    ):
        return False
    (batch, *_) = sizes_of_result(inputs[0])
    if not all(_has_batch_first(node, batch) for node in inputs):
        return False
    samples, of_size = set(inputs), set[Node]()
    for node in portable.graph.nodes:
        if node.op == "output":
            leaves = pytree.tree_leaves(node.args[0])
            return bool(leaves) and all(leaf in samples for leaf in leaves)
        sources = set(node.all_input_nodes)
        if _is_size(node):
            if batch in _free_symbols(expressions([node.meta["val"]])):
                of_size.add(node)
        elif sources.isdisjoint(samples):
            if not sources.isdisjoint(of_size):
                of_size.add(node)
        elif _keeps_samples_apart(node, samples, batch) and _may_read_sizes(
            node, sources & of_size
        ):
            samples.add(node)
        else:
            return False
    return False


def _is_size(node: Node) -> bool:
    return isinstance(node.meta.get("val"), int | torch.SymInt)


def _has_batch_first(node: Node, batch: Any) -> bool:
    """Whether the first axis of a result, and no other, has the length of the batch."""
    value = node.meta.get("val")
    if not isinstance(value, torch.Tensor) or not value.ndim:
        return False
    first, *remaining = sizes_of_result(node)
    return bool(first == batch) and batch not in _free_symbols(remaining)


def _free_symbols(sizes: Iterable[Any]) -> set[Any]:
    return {symbol for size in sizes for symbol in getattr(size, "free_symbols", ())}


def _may_read_sizes(node: Node, sizes: set[Node]) -> bool:
    """Whether values computed from the size of the batch only shape a result."""
    return not sizes or (node.target is aten.reshape.default and all(map(_is_size, sizes)))


def _keeps_samples_apart(node: Node, samples: set[Node], batch: Any) -> bool:
    """Whether each sample of a result depends on one sample: that at its place in what is read."""
    if not _has_batch_first(node, batch):
        return False
    target, sources = node.target, node.all_input_nodes
    if target in _ON_VALUES:
        return all(_aligns_samples(source, node, samples) for source in sources)
    batched = [source for source in sources if source in samples]
    axes = batched[0].meta["val"].ndim
    if target in _ON_BATCHES:
        supported = axes >= 2 and _ON_BATCHES[target] in (None, axes)
        if not supported or batched != [node.args[0]]:
            return False
        # Parts would repeat the conversion of a weight to float, which every call makes.
        return is_node(node.args[0], ops.dequantize) or not is_node(
            node.args[1], ops.dequantize_weight, ops.dequantize_grouped
        )
    if target in _ALONG_AXES:
        axes = max(axes, node.meta["val"].ndim)  # `unsqueeze` counts those of its result
        return all(axis % axes for axis in _affected_axes(node))
    return False


def _affected_axes(node: Node) -> list[int]:
    args = arguments(node)
    if node.target is aten.layer_norm.default:
        return list(range(-len(args["normalized_shape"]), 0))
    if node.target is aten.permute.default:
        axes = len(args["dims"])
        return [axis for position, axis in enumerate(args["dims"]) if axis % axes != position]
    named = [args[name] for name in ("dim", "dim0", "dim1") if name in args]
    return list(pytree.tree_leaves(named))


def _aligns_samples(source: Node, node: Node, samples: set[Node]) -> bool:
    """Whether an operand holds one value per sample of a result, or the same for all samples."""
    value, axes = source.meta.get("val"), node.meta["val"].ndim
    if not isinstance(value, torch.Tensor):
        return _is_size(source)
    if source in samples:
        return bool(value.ndim == axes)
    return value.ndim < axes or sizes_of_result(source)[0] == 1
