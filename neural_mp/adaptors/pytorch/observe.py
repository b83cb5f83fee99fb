"""One pass over calibration batches, reducing every tensor as soon as it is there."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np
import torch
from torch.fx import GraphModule, Interpreter, Node
from torch.utils import _pytree as pytree

from neural_mp.adaptors.common.calibration import SAMPLES_PER_BATCH, TensorStatistics, summarize
from neural_mp.adaptors.pytorch.convention import Call
from neural_mp.adaptors.pytorch.graph import CONVOLUTIONS, INTEGER_LAYERS, tensor_name
from neural_mp.adaptors.pytorch.model import OP_NAME, TorchModel
from neural_mp.adaptors.pytorch.submodules import interpreted
from neural_mp.core.observations import Observations


class _Observer(Interpreter):
    def __init__(
        self,
        module: GraphModule,
        tensors: frozenset[str],
        statistics: dict[str, TensorStatistics],
    ) -> None:
        super().__init__(module)
        self.tensors = tensors
        self.statistics = statistics

    def run_node(self, n: Node) -> Any:
        result = super().run_node(n)
        wanted = n.op in ("placeholder", "call_function") and tensor_name(n) in self.tensors
        if wanted and _is_float(result) and result.numel():
            statistics = self.statistics.setdefault(tensor_name(n), TensorStatistics())
            _take(statistics, result.detach(), _channel_axis(n, result.ndim))
        return result


def _channel_axis(node: Node, axes: int) -> int:
    """The axis of a result's channels: as the layers that read it see it, else as usual."""
    for reader in node.users:
        if reader.target in INTEGER_LAYERS and reader.args[0] is node:
            return axes - 1 - CONVOLUTIONS.get(reader.target, 0)
    return 1 if axes >= 4 else axes - 1


def _is_float(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.is_floating_point()


def _take(statistics: TensorStatistics, values: torch.Tensor, channels: int) -> None:
    if values.ndim == 0:
        values, channels = values.reshape(1), 0
    rest = [axis for axis in range(values.ndim) if axis != channels]
    count = max(1, values.numel() // values.shape[channels])
    # A norm reads the values once and keeps none; squaring them would take as much memory again.
    norms = torch.linalg.vector_norm(values, dim=rest, dtype=torch.float32) if rest else values
    power = norms.float().square() / count
    sample = values.flatten()
    if sample.numel() > SAMPLES_PER_BATCH:
        # Drawn, not strided: a stride falls into step with an axis and sees some channels only.
        draw = torch.Generator().manual_seed(0)
        sample = sample[torch.randint(sample.numel(), (SAMPLES_PER_BATCH,), generator=draw)]
    low, high, mean = values, values, values
    if rest:
        low, high, mean = values.amin(rest), values.amax(rest), values.mean(rest, dtype=torch.float)
    statistics.update(
        low.float().numpy(),
        high.float().numpy(),
        power.numpy(),
        count,
        sample.float().numpy().astype(np.float32),
        mean.float().numpy(),
    )


def observe(model: TorchModel, calls: Iterable[Call], tensors: frozenset[str]) -> Observations:
    """Run the calls and summarize what the named tensors held."""
    statistics: dict[str, TensorStatistics] = {}
    run = interpreted(model, lambda part: _Observer(part.portable, tensors, statistics))
    samples = 0
    for call in calls:
        run(call)
        leaves = call.leaves()
        samples += next((x.shape[0] for x in leaves if isinstance(x, torch.Tensor) and x.ndim), 1)
    return summarize(statistics, samples)


class _NonFinite(Interpreter):
    def __init__(self, module: GraphModule, found: list[str]) -> None:
        super().__init__(module)
        self.found = found

    def run_node(self, n: Node) -> Any:
        result = super().run_node(n)
        if OP_NAME in n.meta:
            for leaf in pytree.tree_leaves(result):
                if _is_float(leaf) and not torch.isfinite(leaf).all():
                    self.found.append(str(n.meta[OP_NAME]))
        return result


def first_non_finite(model: TorchModel, call: Call) -> str | None:
    """The first op whose result holds NaN or Inf."""
    found: list[str] = []
    interpreted(model, lambda part: _NonFinite(part.runnable, found))(call)
    return found[0] if found else None
