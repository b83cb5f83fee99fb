"""What the ops of a model compute, of the graphs that are run."""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Any

import torch
from torch.fx import Node

from neural_mp.adaptors.common.integer_encoding import Encoding
from neural_mp.adaptors.common.op_outputs import OpValue, op_value
from neural_mp.adaptors.pytorch.call_signature import Call
from neural_mp.adaptors.pytorch.graph import build_graph
from neural_mp.adaptors.pytorch.model import OP_NAME, RESULT, TorchModel
from neural_mp.adaptors.pytorch.module_capture import visited
from neural_mp.core.graph import OpGraph


def results(model: TorchModel) -> OpGraph:
    """The ops whose results a run has; see `Adaptor.results`."""
    found = {
        place[0]
        for part in model.parts.values()
        for node in part.runnable.graph.nodes
        if (place := _place(node)) is not None
    }
    graph = build_graph({path: part.portable for path, part in model.parts.items()})
    return graph.with_only({op.name: op for op in graph if op.name in found})


def values(model: TorchModel, ops: Collection[str]) -> Callable[[Call], dict[str, OpValue]]:
    """A function that runs the model and gives the results of some ops.

    An op that runs several times in one run gives the first of its results.
    """
    wanted, found = frozenset(ops), dict[str, OpValue]()

    def visit(node: Node, run: Callable[[], Any]) -> Any:
        result, place = run(), _place(node)
        if place is None or place[0] not in wanted or place[0] in found:
            return result
        value = _value(result, place[1]) if isinstance(result, torch.Tensor) else None
        if value is not None:
            found[place[0]] = value
        return result

    run = visited(model, visit)

    def called(call: Call) -> dict[str, OpValue]:
        found.clear()
        run(call)
        return dict(found)

    return called


def _place(node: Node) -> tuple[str, Encoding | None] | None:
    """The op whose result a node has, and how that is stored in uint8, if it is."""
    if node.op != "call_function":
        return None
    if RESULT in node.meta:
        name, encoding = node.meta[RESULT]
        return name, encoding
    return (node.meta[OP_NAME], None) if OP_NAME in node.meta else None


def _value(result: torch.Tensor, encoding: Encoding | None) -> OpValue | None:
    if encoding is not None:
        return op_value(result.numpy(), encoding)
    if not result.is_floating_point() or not result.numel():
        return None
    # A copy: a kernel that runs later may write over it.
    real = result.detach().to(torch.float32, copy=True)
    return OpValue(real.numpy(), str(result.dtype).removeprefix("torch."))
