"""Hessian traces of captured graphs with respect to layer weights."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from typing import Any

import torch
from torch.fx import Node
from torch.utils import _pytree as pytree

from neural_mp.adaptors.common.hessian import Array, Squares, summed_traces
from neural_mp.adaptors.pytorch import graph_edit as fx
from neural_mp.adaptors.pytorch.model import TorchModel
from neural_mp.adaptors.pytorch.module_capture import visited
from neural_mp.adaptors.pytorch.quantizable_ops import WEIGHTED


def hessian_traces(
    model: TorchModel, batches: Iterable[Any], ops: Collection[str]
) -> dict[str, float]:
    """Return op → trace of the Hessian with respect to its weight."""
    leaves: dict[Node, torch.Tensor] = {}

    def visit(node: Node, run: Callable[[], Any]) -> Any:
        """Run a node, with weights as leaves."""
        # Stays on for user code after this graph, until the caller's `no_grad` exits.
        torch.set_grad_enabled(True)
        result = run()
        if node.op != "get_attr" or not fx.is_float(result):
            return result
        # One leaf for all calls of a module.
        if node not in leaves:
            leaves[node] = result.detach().clone().requires_grad_()
        return leaves[node]

    run = visited(model, visit, portable=True)
    weights = {
        name: fx.arguments(node)["weight"]
        for part in model.parts.values()
        for name, node in fx.op_nodes(part.portable).items()
        if name in ops and node.target in WEIGHTED
    }

    def outputs_of(inputs: Any) -> tuple[list[torch.Size], Squares]:
        given = pytree.tree_leaves(run(model.call(inputs)))
        outputs = [y for y in given if getattr(y, "requires_grad", False)]
        read = {name: leaves[node] for name, node in weights.items() if node in leaves}

        def squares(signs: list[Array]) -> dict[str, float]:
            gradients = torch.autograd.grad(
                outputs,
                list(read.values()),
                [torch.from_numpy(v).to(y.dtype) for v, y in zip(signs, outputs, strict=True)],
                retain_graph=True,
                allow_unused=True,
            )
            return {
                name: float(gradient.square().sum())
                for name, gradient in zip(read, gradients, strict=True)
                if gradient is not None
            }

        return [y.shape for y in outputs], squares

    return summed_traces(weights, map(outputs_of, batches))
