"""Large batches in parts, whose intermediate results stay in the cache and in freed memory."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from functools import cache
from typing import Any

import torch
from torch.fx import GraphModule, Node

from neural_mp.adaptors.common.signatures.call_layouts import remember
from neural_mp.adaptors.pytorch.graph.graph_edit import sizes_of_result
from neural_mp.adaptors.pytorch.kernels.sample_independence import computes_samples_alone

#: Maximum size, for each thread, of the activations that an op reads and writes. Parts of 8 to 32
#: MiB take equally long on a CPU with 16 MiB of cache per core (`benchmarks/large_batches.py`);
#: more parts cost more calls.
MAX_PART_BYTES = 32 << 20
#: Size of the tensor that raises glibc's thresholds: just below the largest that does.
_FREED_BYTES = 31 << 20
#: Key of `GraphModule.meta`: whether batches may be computed in parts.
_SPLITS = "neural_mp_splits"


@cache
def keep_freed_memory() -> None:
    """Make glibc keep up to 62 MiB of freed memory in this process, as after any large batch.

    Otherwise, the memory of each intermediate result may return to the system, which clears its
    pages for the next. Freeing one tensor raises the thresholds (mallopt(3), M_MMAP_THRESHOLD); its
    memory is never touched. Other C libraries ignore this.
    """
    torch.empty(_FREED_BYTES, dtype=torch.uint8)


def mark_splits(runnable: GraphModule, portable: GraphModule) -> None:
    """Keep whether a graph may compute batches in parts, as its portable form shows."""
    runnable.meta[_SPLITS] = computes_samples_alone(portable)


class BatchParts:
    """Parts of the batches that a graph computes.

    Attributes:
        is_splitting: whether the graph computes every sample of a batch on its own.
    """

    def __init__(self, module: GraphModule) -> None:
        self.is_splitting: bool = module.meta.get(_SPLITS, False)
        self._module = module
        self._inputs = sum(node.op == "placeholder" for node in module.graph.nodes)
        self._bytes: dict[Any, int] = {}

    def fit(self, leaves: Sequence[torch.Tensor]) -> bool:
        """Whether a batch with the inputs of the graph may have parts."""
        return self.is_splitting and len(leaves) == self._inputs

    def of(self, leaves: Sequence[torch.Tensor]) -> list[tuple[torch.Tensor, ...]]:
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
            needed = _largest_op([leaf[:1] for leaf in leaves], self._module)
            remember(self._bytes, key, needed)
        count = math.ceil(samples * needed / MAX_PART_BYTES / torch.get_num_threads())
        if count < 2:
            return [tuple(leaves)]
        parts = [leaf.tensor_split(min(count, samples)) for leaf in leaves]
        return list(zip(*parts, strict=True))


def joined(parts: Sequence[Sequence[torch.Tensor]]) -> list[torch.Tensor]:
    """Return the results for a batch from those for its parts."""
    return [torch.cat(pieces) for pieces in zip(*parts, strict=True)]


def _largest_op(sample: Sequence[torch.Tensor], module: GraphModule) -> int:
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
