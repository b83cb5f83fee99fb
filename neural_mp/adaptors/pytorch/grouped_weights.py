"""Moments of the inputs of dense layers, and models with weights that were rounded elsewhere."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import replace
from typing import Any

from torch.fx import Node

from neural_mp.adaptors.common.grouped_weight import GroupedWeight
from neural_mp.adaptors.common.input_moments import MomentSums
from neural_mp.adaptors.common.weight_corrections import InputMoments
from neural_mp.adaptors.pytorch import graph_edit as fx
from neural_mp.adaptors.pytorch.model import TorchModel
from neural_mp.adaptors.pytorch.module_capture import visited
from neural_mp.adaptors.pytorch.quantizable_ops import LINEAR


def input_moments(
    model: TorchModel, batches: Iterable[Any], ops: Collection[str]
) -> dict[str, InputMoments]:
    """Return op → the moments of its inputs, for dense layers that the batches reach."""
    readers: defaultdict[Node, list[str]] = defaultdict(list)
    for part in model.parts.values():
        for name, node in fx.op_nodes(part.portable).items():
            if name in ops and node.target is LINEAR:
                readers[node.args[0]].append(name)
    sums: dict[Node, MomentSums] = {}

    def visit(node: Node, run: Callable[[], Any]) -> Any:
        result = run()
        if node in readers:
            rows = result.detach().float().numpy()
            if node not in sums:
                sums[node] = MomentSums.of_size(rows.shape[-1])
            sums[node].add(rows)
        return result

    run = visited(model, visit, portable=True)
    for inputs in batches:
        run(model.call(inputs))
    return {
        name: moments
        for node, moments in ((node, found.moments()) for node, found in sums.items())
        for name in readers[node]
    }


def with_weights(model: TorchModel, weights: Mapping[str, GroupedWeight]) -> TorchModel:
    """Return a model whose next conversion stores these weights, by op."""
    return replace(model, grouped=weights)
