"""The number of threads for runtimes that fix the number when a model is compiled."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from neural_mp.util.system.environment import read_omp_threads


class ThreadLimit:
    """The number of threads of `limit_op_threads`; None outside of such a context."""

    threads: int | None = None


@contextmanager
def limit_op_threads(count: int | None) -> Iterator[None]:
    """Limit the threads of models compiled within this context; existing ones keep theirs."""
    previous, ThreadLimit.threads = ThreadLimit.threads, count
    try:
        yield
    finally:
        ThreadLimit.threads = previous


def get_allowed_threads() -> int | None:
    """Return threads per op: the requested number, or else `OMP_NUM_THREADS`.

    ONNX Runtime and OpenVINO ignore that variable; ONNX Runtime also ignores the CPU affinity of
    the process: its threads are bound to all cores. None leaves the choice to the runtime.
    """
    if ThreadLimit.threads is not None:
        return ThreadLimit.threads
    return read_omp_threads()
