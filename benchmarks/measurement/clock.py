"""Cost of a job: seconds of its parts, and memory."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path

#: Modules that a call imports when it needs them.
_IMPORTED_BY_CALLS = (
    "neural_mp.strategies.mincut",
    "scipy.special",
    "neural_mp.adaptors.pytorch.adaptor",
    "neural_mp.adaptors.onnxrt.adaptor",
    "neural_mp.adaptors.openvino.adaptor",
    "onnxscript",
    "optuna.storages._rdb.storage",
    "sqlalchemy.orm",
    "alembic.migration",
    "torch.onnx._internal.exporter._core",
    "torch._functorch.aot_autograd",
)


def import_before_calls() -> None:
    """Import what a call needs: imports count in memory only, as for the other tools."""
    for module in _IMPORTED_BY_CALLS:
        import_module(module)


class Clock:
    """Times parts of a job by their names.

    Attributes:
        parts: part → CPU seconds of the process, and seconds by the clock.
    """

    def __init__(self) -> None:
        self.parts: dict[str, tuple[float, float]] = {}

    @contextmanager
    def part(self, name: str) -> Iterator[None]:
        """Time what is done within."""
        start = time.process_time(), time.perf_counter()
        yield
        self.parts[name] = (time.process_time() - start[0], time.perf_counter() - start[1])


def peak_memory() -> float:
    """In bytes. Not `ru_maxrss`: that begins with what the parent process held."""
    lines = Path("/proc/self/status").read_text(encoding="utf-8").splitlines()
    (kilobytes,) = (line.split()[1] for line in lines if line.startswith("VmHWM"))
    return int(kilobytes) * 1024.0
