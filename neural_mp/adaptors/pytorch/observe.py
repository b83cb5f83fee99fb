"""Models run node by node, to see the values of their tensors and the op where NaN begins."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator
from typing import Any

import torch
from torch.fx import Node
from torch.utils import _pytree as pytree

from neural_mp.adaptors.common.calibration import TensorSummary, summarized
from neural_mp.adaptors.pytorch.calibration_form import calibration_form
from neural_mp.adaptors.pytorch.call_signature import Call
from neural_mp.adaptors.pytorch.model import OP_NAME, TorchModel, is_float, tensor_name
from neural_mp.adaptors.pytorch.module_capture import visited
from neural_mp.adaptors.pytorch.quantizable_ops import CONVOLUTIONS, INTEGER_LAYERS
from neural_mp.util.pytree import as_numpy


def watch(
    model: TorchModel, calls: Iterable[Call], tensors: Collection[str]
) -> Iterator[tuple[str, TensorSummary]]:
    """Tensor name and a summary of its values, for the named tensors in every call."""
    found: list[tuple[str, TensorSummary]] = []
    nodes = (node for part in model.parts.values() for node in part.portable.graph.nodes)
    computed = (node for node in nodes if node.op in ("placeholder", "call_function"))
    wanted = {tensor_name(node): node for node in computed if tensor_name(node) in tensors}

    def visit(node: Node, run: Callable[[], Any]) -> Any:
        result, name = run(), tensor_name(node)
        if node.op != "get_attr" and name in wanted and is_float(result):
            # At once: the next op may write over it.
            seen = summarized(as_numpy(result.float()), _channel_axis(wanted[name], result.ndim))
            found.extend([(name, seen)] if seen is not None else [])
        return result

    run = visited(calibration_form(model), visit, portable=True)
    for call in calls:
        run(call)
        yield from found
        found.clear()


def _channel_axis(node: Node, axes: int) -> int:
    """The axis of a result's channels: as the layers that read it see it, else as usual."""
    for reader in node.users:
        if reader.target in INTEGER_LAYERS and reader.args[0] is node:
            return axes - 1 - CONVOLUTIONS.get(reader.target, 0)
    return 1 if axes >= 4 else axes - 1


def first_non_finite(model: TorchModel, call: Call) -> str | None:
    """The first op whose result holds NaN or Inf; None if there is none."""
    found: list[str] = []

    def visit(node: Node, run: Callable[[], Any]) -> Any:
        result = run()
        if OP_NAME in node.meta:
            floats = filter(is_float, pytree.tree_leaves(result))
            if any(not torch.isfinite(leaf).all() for leaf in floats):
                found.append(str(node.meta[OP_NAME]))
        return result

    visited(model, visit)(call)
    return found[0] if found else None
