"""Seconds of every op, from runs op by op."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable
from typing import Any

from torch.fx import Node

from neural_mp.adaptors.pytorch.convention import Call
from neural_mp.adaptors.pytorch.model import OP_NAME, TorchModel
from neural_mp.adaptors.pytorch.submodules import visited


def time_ops(model: TorchModel, call: Call, runs: int) -> dict[str, list[float]]:
    """Op (or conversion, by node name) → the seconds of each of so many runs."""
    seconds: dict[str, list[float]] = defaultdict(lambda: [0.0] * runs)
    number = 0

    def visit(node: Node, run: Callable[[], Any]) -> Any:
        start = time.perf_counter()
        result = run()
        if node.op == "call_function":
            name = node.meta.get(OP_NAME, node.name)
            seconds[name][number] += time.perf_counter() - start
        return result

    run = visited(model, visit)
    for number in range(runs):  # noqa: B007 - the visits read it
        run(call)
    return seconds
