"""The number of threads for runtimes that fix the number when a model is compiled."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager


class _Limit:
    """The number of threads for newly compiled models; None for no limit."""

    threads: int | None = None


@contextmanager
def limited_threads(count: int | None) -> Iterator[None]:
    """Limit the threads of models compiled within this context; existing ones keep theirs."""
    previous, _Limit.threads = _Limit.threads, count
    try:
        yield
    finally:
        _Limit.threads = previous


def requested_threads() -> int | None:
    """Return the number of threads of `limited_threads`; None outside of such a context."""
    return _Limit.threads


def allowed_threads() -> int | None:
    """Return threads per op: the requested number, or else `OMP_NUM_THREADS`.

    ONNX Runtime and OpenVINO ignore that variable; ONNX Runtime also ignores the CPU affinity of
    the process: its threads are bound to all cores. None leaves the choice to the runtime.
    """
    if _Limit.threads is not None:
        return _Limit.threads
    first = os.environ.get("OMP_NUM_THREADS", "").split(",")[0].strip()
    return int(first) if first.isdecimal() and int(first) else None
