"""The number of threads for runtimes that fix the number when a model is compiled."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager


class ThreadLimit:
    """The number of threads of `limited_threads`; None outside of such a context."""

    threads: int | None = None


@contextmanager
def limited_threads(count: int | None) -> Iterator[None]:
    """Limit the threads of models compiled within this context; existing ones keep theirs."""
    previous, ThreadLimit.threads = ThreadLimit.threads, count
    try:
        yield
    finally:
        ThreadLimit.threads = previous


def allowed_threads() -> int | None:
    """Return threads per op: the requested number, or else `OMP_NUM_THREADS`.

    ONNX Runtime and OpenVINO ignore that variable; ONNX Runtime also ignores the CPU affinity of
    the process: its threads are bound to all cores. None leaves the choice to the runtime.
    """
    if ThreadLimit.threads is not None:
        return ThreadLimit.threads
    first = os.environ.get("OMP_NUM_THREADS", "").split(",")[0].strip()
    return int(first) if first.isdecimal() and int(first) else None
