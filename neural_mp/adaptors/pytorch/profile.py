"""Seconds of every op, from runs op by op."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable
from typing import Any

from torch.fx import Node

from neural_mp.adaptors.pytorch import kernel_ops, qdq_ops
from neural_mp.adaptors.pytorch.call_signature import Call
from neural_mp.adaptors.pytorch.casts import CAST
from neural_mp.adaptors.pytorch.model import OP_NAME, TorchModel
from neural_mp.adaptors.pytorch.module_capture import visited

#: What the nodes are that our conversion adds, in words.
_CONVERSIONS = {
    kernel_ops.quantize_uint8: "quantize",
    qdq_ops.quantize_dynamic: "quantize",
    kernel_ops.dequantize_uint8: "dequantize",
    CAST: "cast",
}


def time_ops(model: TorchModel, call: Call, runs: int) -> dict[str, list[float]]:
    """Op (or conversion, by node name) → the seconds of each of so many runs."""
    seconds: dict[str, list[float]] = defaultdict(lambda: [0.0] * runs)
    number = 0

    def visit(node: Node, run: Callable[[], Any]) -> Any:
        start = time.perf_counter()
        result = run()
        if node.op == "call_function":
            name = node.meta.get(OP_NAME) or _conversion_name(node)
            seconds[name][number] += time.perf_counter() - start
        return result

    run = visited(model, visit)
    for number in range(runs):  # noqa: B007 - the visits read it
        run(call)
    return seconds


def _conversion_name(node: Node) -> str:
    """A name of its own for a conversion, which begins with that of what it converts."""
    if node.target not in _CONVERSIONS:
        return str(node.name)
    source = node.args[0]
    named = source.meta.get(OP_NAME, source.name) if isinstance(source, Node) else node.name
    return f"{named}/{_CONVERSIONS[node.target]}"
