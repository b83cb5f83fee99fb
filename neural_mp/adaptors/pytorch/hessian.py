"""Derivatives of captured graphs with respect to layer weights: Hessian traces and gradients."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from typing import Any

import numpy as np
import torch
from torch.fx import GraphModule, Node
from torch.utils import _pytree as pytree

from neural_mp.adaptors.common.optional import Direction
from neural_mp.adaptors.common.sensitivity.hessian import Array, Squares, summed_traces
from neural_mp.adaptors.pytorch.capture.module_capture import visited
from neural_mp.adaptors.pytorch.graph import graph_edit as fx
from neural_mp.adaptors.pytorch.graph.call_signature import CallArgs
from neural_mp.adaptors.pytorch.graph.model import TorchModel
from neural_mp.adaptors.pytorch.graph.quantizable_ops import WEIGHTED
from neural_mp.util.pytree import as_numpy


def hessian_traces(
    model: TorchModel, batches: Iterable[Any], ops: Collection[str]
) -> dict[str, float]:
    """Return op → trace of the Hessian with respect to its weight."""
    run, leaves = _differentiable_model(model)
    weights = {name: node for name, (_, node) in _weight_nodes(model).items() if name in ops}

    def differentiate_batch(inputs: Any) -> tuple[list[torch.Size], Squares]:
        results = pytree.tree_leaves(run(model.call(inputs)))
        outputs = [y for y in results if getattr(y, "requires_grad", False)]
        parameters = {name: leaves[node] for name, node in weights.items() if node in leaves}

        def squared_gradients(signs: list[Array]) -> dict[str, float]:
            gradients = torch.autograd.grad(
                outputs,
                list(parameters.values()),
                [torch.from_numpy(v).to(y.dtype) for v, y in zip(signs, outputs, strict=True)],
                retain_graph=True,
                allow_unused=True,
            )
            return {
                name: float(gradient.square().sum())
                for name, gradient in zip(parameters, gradients, strict=True)
                if gradient is not None
            }

        return [y.shape for y in outputs], squared_gradients

    return summed_traces(weights, map(differentiate_batch, batches))


class _WeightsInFloat32(Mapping[str, Array]):
    """Weights by op; those in 16 bits are converted whenever one is read.

    All of them in float32 at once would take more memory than the model.
    """

    def __init__(self, tensors: Mapping[str, torch.Tensor]) -> None:
        self._tensors = tensors

    def __getitem__(self, op: str) -> Array:
        return as_numpy(self._tensors[op]).astype(np.float32, copy=False)

    def __contains__(self, op: object) -> bool:
        return op in self._tensors

    def __iter__(self) -> Iterator[str]:
        return iter(self._tensors)

    def __len__(self) -> int:
        return len(self._tensors)


def weights(model: TorchModel) -> Mapping[str, Array]:
    """Return op → its constant weight, for dense layers and tables."""
    constants = {}
    for name, (module, node) in _weight_nodes(model).items():
        value = fx.constant(module, node)
        if value is not None and value.ndim == 2:
            constants[name] = value
    return _WeightsInFloat32(constants)


def weight_gradients(
    model: TorchModel, inputs: Any, ops: Collection[str], direction: Direction
) -> dict[str, Array]:
    """Return op → gradient of the outputs along a direction, by the op's weight."""
    run, leaves = _differentiable_model(model)
    returned = run(model.call(inputs))
    named = returned if isinstance(returned, Mapping) else {}
    results = [named["logits"]] if "logits" in named else pytree.tree_leaves(returned)
    outputs = [y for y in results if getattr(y, "requires_grad", False)]
    if not outputs:
        return {}
    along = direction([as_numpy(y.detach().float()) for y in outputs], "logits" in named)
    nodes = {name: node for name, (_, node) in _weight_nodes(model).items() if name in ops}
    parameters = {name: leaves[node] for name, node in nodes.items() if node in leaves}
    gradients = torch.autograd.grad(
        outputs,
        list(parameters.values()),
        [torch.from_numpy(v).to(y.dtype) for v, y in zip(along, outputs, strict=True)],
        allow_unused=True,
    )
    pairs = zip(parameters, gradients, strict=True)
    return {name: as_numpy(gradient.float()) for name, gradient in pairs if gradient is not None}


def _differentiable_model(
    model: TorchModel,
) -> tuple[Callable[[CallArgs], Any], dict[Node, torch.Tensor]]:
    """Return the model as a function of its call, and constant → leaf, filled by calls."""
    leaves: dict[Node, torch.Tensor] = {}

    def run_with_leaves(node: Node, run: Callable[[], Any]) -> Any:
        # Stays on for user code after this graph, until the caller's `no_grad` exits.
        torch.set_grad_enabled(True)
        result = run()
        if node.op != "get_attr" or not fx.is_float(result):
            return result
        # One leaf for all calls of a module.
        if node not in leaves:
            leaves[node] = result.detach().requires_grad_()
        return leaves[node]

    return visited(model, run_with_leaves, portable=True), leaves


def _weight_nodes(model: TorchModel) -> dict[str, tuple[GraphModule, Node]]:
    """Return op → the graph of the op and the node of its weight."""
    return {
        name: (part.portable, fx.arguments(node)["weight"])
        for part in model.parts.values()
        for name, node in fx.op_nodes(part.portable).items()
        if node.target in WEIGHTED
    }
