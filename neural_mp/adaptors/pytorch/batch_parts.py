"""Large batches in parts, whose intermediate results stay in the cache and in freed memory."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import cache
from typing import Any

import torch
from torch.fx import GraphModule, Interpreter, Node
from torch.utils import _pytree as pytree

from neural_mp.adaptors.common.call_layouts import remember
from neural_mp.adaptors.pytorch.sample_independence import computes_samples_alone

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


class _Sizes(Interpreter):
    """Runs a graph, and keeps the bytes of every result but constants."""

    def __init__(self, module: GraphModule) -> None:
        super().__init__(module)
        self.results: dict[Node, int] = {}

    def run_node(self, n: Node) -> Any:
        """Return a node's result."""
        result = super().run_node(n)
        if n.op != "get_attr":
            tensors = [leaf for leaf in pytree.tree_leaves(result) if torch.is_tensor(leaf)]
            self.results[n] = sum(tensor.nbytes for tensor in tensors)
        return result


def _largest_op(sample: Sequence[torch.Tensor], module: GraphModule) -> int:
    """Return the most bytes of activations that an op reads and writes, for one sample."""
    sizes = _Sizes(module)
    sizes.enable_io_processing = False
    sizes.run(*sample)
    return max(
        sum(sizes.results.get(read, 0) for read in {node, *node.all_input_nodes})
        for node in sizes.results
    )
