"""Refusal of runtimes whose threads do not exist in a forked child: calls would block for ever."""

from __future__ import annotations

import os

from neural_mp.errors import ForkError

#: Runtime → process that used its threads first; a forked child inherits the entry.
_PROCESSES: dict[str, int] = {}


def check_process(runtime: str, remedy: str = "") -> None:
    """Note that this process uses the threads of a runtime.

    Args:
        runtime: the name for messages.
        remedy: what else helps, beside loading in the child and other ways to start children.

    Raises:
        ForkError: a parent of this process used them before the fork.
    """
    process = os.getpid()
    if _PROCESSES.setdefault(runtime, process) != process:
        raise ForkError(
            f"{runtime} must not be used in a child that was forked after {runtime} ran in its "
            f"parent, since calls may block for ever; use {runtime} in the child only, or start "
            f"the child by multiprocessing.get_context('spawn'){remedy}"
        )
