"""Handling of Ctrl-C and SIGTERM, which end a command alike; imports nothing slow."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Mapping
from contextlib import suppress
from types import FrameType
from typing import Any

#: Signals that end a command → their handlers in a new Python process.
_DEFAULTS: Mapping[int, Any] = {
    signal.SIGINT: signal.default_int_handler,
    signal.SIGTERM: signal.SIG_DFL,
}
_MESSAGE = b"interrupted; nothing was saved\n"
_STANDARD_ERROR = 2


def to_exit_code(number: int) -> int:
    """Return the exit code of a program that a signal ends, as in a shell."""
    return 128 + number


def exit_at_once(number: int, frame: FrameType | None) -> None:
    """Handle a signal outside a command: no code of a library can catch or report it."""
    with suppress(OSError):  # e.g. a closed standard error
        os.write(_STANDARD_ERROR, _MESSAGE)
    os._exit(to_exit_code(number))


def handle_interrupts(handle: Callable[[int, FrameType | None], None]) -> dict[int, Any]:
    """Install a handler for the signals, except those that others ignore or handle.

    Returns:
        Number of each such signal → its previous handler, for `signal.signal`.
    """
    previous: dict[int, Any] = {}
    for number, default in _DEFAULTS.items():
        if signal.getsignal(number) in (default, exit_at_once):
            previous[number] = signal.signal(number, handle)
    return previous


def handle_by_default(number: int) -> None:
    """Handle a signal as a new Python process does."""
    signal.signal(number, _DEFAULTS[number])
    signal.raise_signal(number)
