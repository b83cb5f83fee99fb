"""Tracing of code with torch: one thread at a time, symbolic sizes within a limit of time."""

from __future__ import annotations

import threading
from contextlib import AbstractContextManager

from torch import nn
from torch.fx import GraphModule

from neural_mp.util.system.watched_thread import interrupt_after_seconds

#: Held while code is traced, exported or read as a program: torch keeps the modes of a trace, and
#: this package exchanges kernels, methods and the error output, for the whole process. A trace in
#: another thread would fail, or restore what the first one still needs.
TRACING = threading.RLock()
#: CPU seconds of an export with symbolic sizes, plus seconds for each module without children, or
#: op of a graph: sizes computed from other sizes, as in windows that are padded, may grow without
#: bound. Three convolutions with sizes rounded up take 7 s in a new process.
MAX_EXPORT_SECONDS, MAX_EXPORT_SECONDS_PER_LAYER = 20.0, 0.08
#: The same for graphs of any size: beyond, an export with fewer dynamic axes takes a fraction.
MAX_LARGE_EXPORT_SECONDS = 60.0


def max_symbolic_seconds(layers: nn.Module | int) -> float:
    """Return the most CPU seconds of an export of a module or graph, or of so many ops."""
    if isinstance(layers, GraphModule):
        layers = len(layers.graph.nodes)
    elif isinstance(layers, nn.Module):
        layers = sum(1 for part in layers.modules() if not any(True for _ in part.children()))
    seconds = MAX_EXPORT_SECONDS + MAX_EXPORT_SECONDS_PER_LAYER * layers
    return min(seconds, MAX_LARGE_EXPORT_SECONDS)


def limit_symbolic_time(layers: nn.Module | int) -> AbstractContextManager[None]:
    """Return a context of at most `max_symbolic_seconds`, then raises `TimeLimitError`.

    Code is interrupted in the package of symbolic expressions only: without any, there is no limit.
    """
    return interrupt_after_seconds(max_symbolic_seconds(layers), within="sympy")
