"""Seconds of every op, from an interpreted run."""

from __future__ import annotations

import statistics
import time
from collections import defaultdict
from typing import Any

from torch.fx import GraphModule, Interpreter, Node

from neural_mp.adaptors.pytorch.convention import Call
from neural_mp.adaptors.pytorch.model import OP_NAME, TorchModel
from neural_mp.adaptors.pytorch.submodules import interpreted


class _Clock(Interpreter):
    def __init__(self, module: GraphModule, seconds: dict[str, list[float]]) -> None:
        super().__init__(module)
        self.seconds = seconds

    def run_node(self, n: Node) -> Any:
        start = time.perf_counter()
        result = super().run_node(n)
        if n.op == "call_function":
            self.seconds[n.meta.get(OP_NAME, n.name)].append(time.perf_counter() - start)
        return result


def profile(model: TorchModel, call: Call, runs: int = 5) -> dict[str, float]:
    """Op (or conversion, by node name) → median seconds of `runs` runs after one to warm up."""
    seconds: dict[str, list[float]] = defaultdict(list)
    run = interpreted(model, lambda part: _Clock(part.runnable, seconds))
    run(call)
    seconds.clear()
    for _ in range(runs):
        run(call)
    return {name: statistics.median(taken) for name, taken in seconds.items()}
