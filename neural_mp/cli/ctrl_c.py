"""Handling of Ctrl-C outside a command; imports nothing slow."""

from __future__ import annotations

import os
import signal
from types import FrameType

#: Exit code and message of `ExitCode.INTERRUPTED`, whose module is imported later.
_INTERRUPTED, _MESSAGE = 130, b"interrupted; nothing was saved\n"
_STANDARD_ERROR = 2


def exit_at_once(number: int, frame: FrameType | None) -> None:
    """Handle Ctrl-C: no code of a library can catch or report it."""
    os.write(_STANDARD_ERROR, _MESSAGE)
    os._exit(_INTERRUPTED)


def handle_early() -> None:
    """Exit at once on Ctrl-C, unless the signal is ignored or handled already."""
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, exit_at_once)
