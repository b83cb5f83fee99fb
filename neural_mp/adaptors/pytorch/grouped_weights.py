"""Moments of the inputs of dense layers, and models with weights that were rounded elsewhere."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch.fx import Node

from neural_mp.adaptors.common.low_bit_weights import GroupedWeight
from neural_mp.adaptors.common.weight_corrections import InputMoments
from neural_mp.adaptors.pytorch import graph_edit as fx
from neural_mp.adaptors.pytorch.model import TorchModel
from neural_mp.adaptors.pytorch.module_capture import visited
from neural_mp.adaptors.pytorch.quantizable_ops import LINEAR


@dataclass
class _Sums:
    """Sums over the rows that a layer read."""

    products: torch.Tensor
    magnitudes: torch.Tensor
    rows: int = 0

    def add(self, rows: torch.Tensor) -> None:
        """Add rows [rows, inputs]."""
        self.products.addmm_(rows.t(), rows)
        self.magnitudes += rows.abs().sum(dim=0)
        self.rows += len(rows)


def input_moments(
    model: TorchModel, batches: Iterable[Any], ops: Collection[str]
) -> dict[str, InputMoments]:
    """Return op → the moments of its inputs, for dense layers that the batches reach."""
    readers: defaultdict[Node, list[str]] = defaultdict(list)
    for part in model.parts.values():
        for name, node in fx.op_nodes(part.portable).items():
            if name in ops and node.target is LINEAR:
                readers[node.args[0]].append(name)
    sums: dict[Node, _Sums] = {}

    def visit(node: Node, run: Callable[[], Any]) -> Any:
        result = run()
        if node in readers:
            rows = result.detach().reshape(-1, result.shape[-1]).float()
            if node not in sums:
                size = rows.shape[1]
                sums[node] = _Sums(torch.zeros(size, size), torch.zeros(size))
            sums[node].add(rows)
        return result

    run = visited(model, visit, portable=True)
    for inputs in batches:
        run(model.call(inputs))
    return {
        name: InputMoments(
            (found.products / max(found.rows, 1)).numpy(),
            (found.magnitudes / max(found.rows, 1)).numpy(),
        )
        for node, found in sums.items()
        for name in readers[node]
    }


def with_weights(model: TorchModel, weights: Mapping[str, GroupedWeight]) -> TorchModel:
    """Return a model whose next conversion stores these weights, by op."""
    return replace(model, grouped=weights)
