"""Seconds of every op, from an interpreted run."""

from __future__ import annotations

import statistics
import time
from collections import defaultdict
from typing import Any

import torch
from torch.fx import GraphModule, Interpreter, Node

from neural_mp.adaptors.pytorch.calls import Call
from neural_mp.adaptors.pytorch.model import OP_NAME


class _Clock(Interpreter):
    def __init__(self, module: GraphModule) -> None:
        super().__init__(module)
        self.seconds: dict[str, list[float]] = defaultdict(list)

    def run_node(self, n: Node) -> Any:
        start = time.perf_counter()
        result = super().run_node(n)
        if n.op == "call_function":
            self.seconds[n.meta.get(OP_NAME, n.name)].append(time.perf_counter() - start)
        return result


def profile(module: GraphModule, call: Call, runs: int = 5) -> dict[str, float]:
    """Op (or conversion, by node name) → median seconds of `runs` runs after one to warm up."""
    clock = _Clock(module)
    flat = call.leaves()
    with torch.no_grad():
        clock.run(*flat, enable_io_processing=False)
        clock.seconds.clear()
        for _ in range(runs):
            clock.run(*flat, enable_io_processing=False)
    return {name: statistics.median(seconds) for name, seconds in clock.seconds.items()}
