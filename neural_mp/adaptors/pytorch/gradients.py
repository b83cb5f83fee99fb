"""Gradients of a captured graph by the weights of its layers."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import Any

import torch
from torch.fx import GraphModule, Interpreter, Node
from torch.utils import _pytree as pytree

from neural_mp.adaptors.common.hessian import DIRECTIONS, directions
from neural_mp.adaptors.pytorch.convention import Call
from neural_mp.adaptors.pytorch.graph import WEIGHT_ARGUMENT
from neural_mp.adaptors.pytorch.model import TorchModel, op_nodes
from neural_mp.adaptors.pytorch.submodules import interpreted


class _WithGradients(Interpreter):
    """Runs a graph with its weights as leaves, which it keeps in `leaves`."""

    def __init__(self, module: GraphModule, leaves: dict[Node, torch.Tensor]) -> None:
        super().__init__(module)
        self.leaves = leaves

    def run_node(self, n: Node) -> Any:
        # For the user's code behind this graph as well; whoever calls it all switches it off.
        torch.set_grad_enabled(True)
        result = super().run_node(n)
        floating = isinstance(result, torch.Tensor) and result.is_floating_point()
        if n.op != "get_attr" or not floating:
            return result
        # One leaf for all the times that a module is called.
        if n not in self.leaves:
            self.leaves[n] = result.detach().clone().requires_grad_()
        return self.leaves[n]


def hessian_traces(
    model: TorchModel, calls: Iterable[Call], ops: Collection[str]
) -> dict[str, float]:
    """Op → trace of the Hessian by its weight."""
    leaves: dict[Node, torch.Tensor] = {}
    run = interpreted(model, lambda part: _WithGradients(part.portable, leaves))
    weights = {
        name: node.args[WEIGHT_ARGUMENT[node.target]]
        for part in model.parts.values()
        for name, node in op_nodes(part.portable).items()
        if name in ops and node.target in WEIGHT_ARGUMENT
    }
    traces = dict.fromkeys(weights, 0.0)
    for call in calls:
        outputs = [y for y in pytree.tree_leaves(run(call)) if _has_gradient(y)]
        read = {name: leaves[node] for name, node in weights.items() if node in leaves}
        for draw in range(DIRECTIONS if outputs else 0):
            signs = directions([tuple(y.shape) for y in outputs], draw)
            gradients = torch.autograd.grad(
                outputs,
                list(read.values()),
                [torch.from_numpy(v).to(y.dtype) for v, y in zip(signs, outputs, strict=True)],
                retain_graph=True,
                allow_unused=True,
            )
            for name, gradient in zip(read, gradients, strict=True):
                if gradient is not None:
                    traces[name] += float(gradient.square().sum()) / DIRECTIONS
    return traces


def _has_gradient(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.requires_grad
