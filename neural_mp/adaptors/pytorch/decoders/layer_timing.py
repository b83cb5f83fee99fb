"""Runs of single layers of a model that was captured layer by layer, for timing."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from functools import partial

import torch

from neural_mp.adaptors.pytorch.graph import graph_edit as fx
from neural_mp.adaptors.pytorch.graph.model import Part, TorchModel
from neural_mp.adaptors.pytorch.graph.quantizable_ops import LINEAR
from neural_mp.adaptors.pytorch.kernels.direct_calls import DirectGraph
from neural_mp.errors import ConversionError


def layer_shapes(model: TorchModel) -> dict[str, Hashable]:
    """Return dense layer → the properties that decide on its time; empty for one whole graph."""
    if model.shell is None:
        return {}
    return {
        name: (*args["weight"].meta["val"].shape, args["bias"] is not None)
        for part in model.parts.values()
        for name, node in fx.op_nodes(part.portable).items()
        if node.target is LINEAR and (args := fx.arguments(node))
    }


def layer_run(model: TorchModel, op: str, rows: int) -> Callable[[], object]:
    """Return a function that runs the part of a dense layer on random rows.

    Raises:
        ConversionError: no part of the model holds the layer.
    """
    example = _part_of(model, op).example.args[0]
    shape = (*(1 for _ in example.shape[:-2]), rows, example.shape[-1])
    values = torch.randn(shape, generator=torch.Generator().manual_seed(0)).to(example.dtype)
    return partial(DirectGraph(_part_of(model, op).runnable), values)


def _part_of(model: TorchModel, op: str) -> Part:
    for part in model.parts.values():
        if op in fx.op_nodes(part.portable):
            return part
    raise ConversionError(f"the model must hold the layer {op!r} to time it, found none")
