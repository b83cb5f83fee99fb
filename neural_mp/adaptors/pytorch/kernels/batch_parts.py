"""Large batches in parts, whose intermediate results stay in the cache and in freed memory.

Only graphs that provably compute every sample of a batch on its own run in parts.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cache
from typing import Any

import torch
from torch.fx import GraphModule, Node
from torch.utils import _pytree as pytree

from neural_mp.adaptors.common.signatures.signature import remember_layout
from neural_mp.adaptors.pytorch.graph import qdq_ops as ops
from neural_mp.adaptors.pytorch.graph.dynamic_shapes import SIZES
from neural_mp.adaptors.pytorch.graph.float_weights import RESTORING
from neural_mp.adaptors.pytorch.graph.fusion import is_node
from neural_mp.adaptors.pytorch.graph.graph_edit import (
    get_arguments,
    get_size_expressions,
    sizes_of_result,
)

aten = torch.ops.aten

#: Maximum size, for each thread, of the activations that an op reads and writes. Parts of 8 to 32
#: MiB take equally long on a CPU with 16 MiB of cache per core (`benchmarks/large_batches.py`);
#: more parts cost more calls.
MAX_PART_BYTES = 32 << 20
#: Size of the tensor that raises glibc's thresholds: just below the largest that does.
_FREED_BYTES = 31 << 20
#: Key of `GraphModule.meta`: whether batches may be computed in parts.
SPLITS = "neural_mp_splits"


@cache
def keep_freed_memory() -> None:
    """Make glibc keep up to 62 MiB of freed memory in this process, as after any large batch.

    Otherwise, the memory of each intermediate result may return to the system, which clears its
    pages for the next. Freeing one tensor raises the thresholds (mallopt(3), M_MMAP_THRESHOLD); its
    memory is never touched. Other C libraries ignore this.
    """
    torch.empty(_FREED_BYTES, dtype=torch.uint8)


class BatchParts:
    """Parts of the batches that a graph computes.

    Attributes:
        is_splitting: whether the graph computes every sample of a batch on its own.
    """

    def __init__(self, module: GraphModule) -> None:
        self.is_splitting: bool = module.meta.get(SPLITS, False)
        self._module = module
        self._inputs = sum(node.op == "placeholder" for node in module.graph.nodes)
        self._bytes: dict[Any, int] = {}

    def can_split(self, leaves: Sequence[torch.Tensor]) -> bool:
        """Whether a batch with the inputs of the graph may have parts."""
        return self.is_splitting and len(leaves) == self._inputs

    def split_leaves(self, leaves: Sequence[torch.Tensor]) -> list[tuple[torch.Tensor, ...]]:
        """Return the parts, of equal size but for one sample, that are computed one by one.

        Args:
            leaves: the inputs of the graph, with equal first axes.
        """
        samples = len(leaves[0])
        if samples < 2:
            return [tuple(leaves)]
        key = tuple((leaf.dtype, leaf.shape[1:]) for leaf in leaves)
        needed = self._bytes.get(key)
        if needed is None:
            needed = _measure_largest_op([leaf[:1] for leaf in leaves], self._module)
            remember_layout(self._bytes, key, needed)
        count = math.ceil(samples * needed / MAX_PART_BYTES / torch.get_num_threads())
        if count < 2:
            return [tuple(leaves)]
        parts = [leaf.tensor_split(min(count, samples)) for leaf in leaves]
        return list(zip(*parts, strict=True))


def _measure_largest_op(sample: Sequence[torch.Tensor], module: GraphModule) -> int:
    """Return the most bytes of activations that an op reads and writes, for one sample.

    Derived from the sizes at capture: a run would show up in kernel logs.
    """
    values: dict[Any, int] = {}
    sizes: dict[Node, int] = {}
    tensors = iter(sample)
    for node in module.graph.nodes:
        value = node.meta.get("val")
        if node.op == "get_attr" or not isinstance(value, torch.Tensor):
            continue
        if node.op == "placeholder":
            values.update(zip(sizes_of_result(node), next(tensors).shape, strict=True))
        sizes[node] = value.dtype.itemsize * math.prod(
            _resolve_sizes(sizes_of_result(node), values)
        )
    reading = ({node, *node.all_input_nodes} for node in sizes)
    return max(sum(sizes.get(operand, 0) for operand in nodes) for nodes in reading)


def _resolve_sizes(sizes: Iterable[Any], known: dict[Any, int]) -> Iterator[int]:
    """Yield sizes; those that depend on values, which are not known before a run, as 1."""
    for size in sizes:
        if size not in known:
            value = size if isinstance(size, int) else size.xreplace(known)
            known[size] = int(value) if isinstance(value, int) or value.is_number else 1
        yield known[size]


_NAMES_ON_VALUES = (
    "relu gelu silu sigmoid tanh hardtanh hardswish elu hardsigmoid leaky_relu mish softplus "
    "exp abs neg clamp clamp_min _to_copy clone contiguous maximum minimum"
)
#: Ops on single values, whose operands are broadcast.
_ON_VALUES = {
    *(getattr(aten, name).default for name in _NAMES_ON_VALUES.split()),
    *(getattr(aten, name).Tensor for name in ("add", "sub", "mul", "div")),
    *(getattr(aten, name).Scalar for name in ("add", "sub", "mul", "div")),
    aten.pow.Tensor_Scalar,
    ops.quantize,
    ops.dequantize,
}
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
            if batch in _free_symbols(get_size_expressions([node.meta["val"]])):
                of_size.add(node)
        elif sources.isdisjoint(samples):
            if not sources.isdisjoint(of_size):
                of_size.add(node)
        else:
            # Values computed from the size of the batch may only shape a result.
            sizes_read = sources & of_size
            reshapes = node.target is aten.reshape.default and all(map(_is_size, sizes_read))
            if not _keeps_samples_apart(node, samples, batch) or (sizes_read and not reshapes):
                return False
            samples.add(node)
    return False


def _is_size(node: Node) -> bool:
    return isinstance(node.meta.get("val"), int | torch.SymInt)


def _has_batch_first(node: Node, batch: object) -> bool:
    """Whether the first axis of a result, and no other, has the length of the batch."""
    value = node.meta.get("val")
    if not isinstance(value, torch.Tensor) or not value.ndim:
        return False
    first, *remaining = sizes_of_result(node)
    return bool(first == batch) and batch not in _free_symbols(remaining)


def _free_symbols(sizes: Iterable[Any]) -> set[Any]:
    return {symbol for size in sizes for symbol in getattr(size, "free_symbols", ())}


def _keeps_samples_apart(node: Node, samples: set[Node], batch: object) -> bool:
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
            node.args[1], ops.dequantize_weight, ops.dequantize_grouped, *RESTORING
        )
    if target in _ALONG_AXES:
        axes = max(axes, node.meta["val"].ndim)  # `unsqueeze` counts those of its result
        return all(axis % axes for axis in _list_affected_axes(node))
    return False


def _list_affected_axes(node: Node) -> list[int]:
    args = get_arguments(node)
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
