"""A process that ends with the one that owns it, however that one ends."""

from __future__ import annotations

import ctypes
import os
import signal
import sys
import threading
import time
from collections.abc import Callable

#: Seconds between two looks at whether the owner is there.
_LOOK_AGAIN = 1.0
#: What `prctl` is asked for: a signal at the end of the thread that made this process.
_PARENT_DEATH_SIGNAL = 1


def end_with(owner: int) -> None:
    """End this process, and those that it forks, with the one that owns it.

    The kernel sees to that, where it can: code that never gives back the interpreter would keep a
    thread from looking. A thread looks all the same, for systems other than Linux.

    Args:
        owner: the number of the process that started this one.
    """
    ask = _kernel()
    if ask is not None:
        ask()
        _ask_in_what_is_forked(ask)
    threading.Thread(target=_watch, args=(owner,), daemon=True).start()


def _kernel() -> Callable[[], object] | None:
    """Asks the kernel to kill this process at the end of its parent; None where it cannot."""
    if not sys.platform.startswith("linux"):
        return None
    control = ctypes.CDLL(None).prctl
    return lambda: control(_PARENT_DEATH_SIGNAL, signal.SIGKILL, 0, 0, 0)


def _ask_in_what_is_forked(ask: Callable[[], object]) -> None:
    """Have forked processes, such as those that load data, end with this one as well."""
    by_main_thread = False

    def note() -> None:
        nonlocal by_main_thread
        by_main_thread = threading.current_thread() is threading.main_thread()

    def begin() -> None:
        # The kernel counts the end of the thread that forked; others may end before the process.
        if by_main_thread:
            ask()

    os.register_at_fork(before=note, after_in_child=begin)


def _watch(owner: int) -> None:
    while os.getppid() == owner:
        time.sleep(_LOOK_AGAIN)
    os._exit(1)
