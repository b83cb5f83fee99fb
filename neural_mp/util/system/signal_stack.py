"""Stack on which the main thread handles signals."""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Iterator
from contextlib import contextmanager


class _Stack(ctypes.Structure):
    """`stack_t` of Linux (`sigaltstack(2)`)."""

    _fields_ = (
        ("address", ctypes.c_void_p),
        ("flags", ctypes.c_int),
        ("nbytes", ctypes.c_size_t),
    )


@contextmanager
def preserve_signal_stack() -> Iterator[None]:
    """Restore the alternate signal stack of the calling thread on exit; no effect but on Linux.

    Where a CPU has AMX, OpenVINO (2026.4) sets one for each of its plugins, and frees the memory
    with the plugin. If another thread does that, or the plugins end in another order than that of
    their start, the next signal of this thread ends the process.
    """
    if not sys.platform.startswith("linux"):
        yield
        return
    library, stack = ctypes.CDLL(None), _Stack()
    is_known = library.sigaltstack(None, ctypes.byref(stack)) == 0
    try:
        yield
    finally:
        if is_known:
            library.sigaltstack(ctypes.byref(stack), None)
