"""One pass over calibration batches, reducing every tensor as soon as it is there."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np
import torch
from torch.fx import GraphModule, Interpreter, Node
from torch.utils import _pytree as pytree

from neural_mp.adaptors.calibration import SAMPLES_PER_BATCH, TensorStatistics, summarize
from neural_mp.adaptors.pytorch.calls import Call
from neural_mp.adaptors.pytorch.graph import tensor_name
from neural_mp.adaptors.pytorch.model import OP_NAME
from neural_mp.observations import Observations


class _Observer(Interpreter):
    def __init__(self, module: GraphModule, tensors: frozenset[str]) -> None:
        super().__init__(module)
        self.tensors = tensors
        self.statistics: dict[str, TensorStatistics] = {}

    def run_node(self, n: Node) -> Any:
        result = super().run_node(n)
        wanted = n.op in ("placeholder", "call_function") and tensor_name(n) in self.tensors
        if wanted and _is_float(result) and result.numel():
            statistics = self.statistics.setdefault(tensor_name(n), TensorStatistics())
            _take(statistics, result.detach())
        return result


def _is_float(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.is_floating_point()


def _take(statistics: TensorStatistics, values: torch.Tensor) -> None:
    low, high = torch.aminmax(values)
    channels = 1 if values.ndim == 4 else values.ndim - 1
    rest = [axis for axis in range(values.ndim) if axis != channels]
    power = values.square().mean(rest) if rest else values.square()
    sample = values.flatten()
    if sample.numel() > SAMPLES_PER_BATCH:
        # Drawn, not strided: a stride falls into step with an axis and sees some channels only.
        draw = torch.Generator().manual_seed(0)
        sample = sample[torch.randint(sample.numel(), (SAMPLES_PER_BATCH,), generator=draw)]
    statistics.update(
        low.item(),
        high.item(),
        power.float().numpy(),
        max(1, values.numel() // values.shape[channels]),
        sample.float().numpy().astype(np.float32),
    )


def observe(module: GraphModule, calls: Iterable[Call], tensors: frozenset[str]) -> Observations:
    """Run the calls and summarize what the named tensors held."""
    observer = _Observer(module, tensors)
    samples = 0
    with torch.no_grad():
        for call in calls:
            flat = call.leaves()
            observer.run(*flat, enable_io_processing=False)
            samples += next((x.shape[0] for x in flat if isinstance(x, torch.Tensor) and x.ndim), 1)
    return summarize(observer.statistics, samples)


class _NonFinite(Interpreter):
    found: str | None = None

    def run_node(self, n: Node) -> Any:
        result = super().run_node(n)
        if self.found is None and OP_NAME in n.meta:
            for leaf in pytree.tree_leaves(result):
                if _is_float(leaf) and not torch.isfinite(leaf).all():
                    self.found = str(n.meta[OP_NAME])
        return result


def first_non_finite(module: GraphModule, call: Call) -> str | None:
    """The first op whose result holds NaN or Inf."""
    search = _NonFinite(module)
    with torch.no_grad():
        search.run(*call.leaves(), enable_io_processing=False)
    return search.found
