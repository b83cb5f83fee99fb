"""Handling of Ctrl-C outside a command; imports nothing slow."""

from __future__ import annotations

import os
from types import FrameType

#: Exit code and message of `ExitCode.INTERRUPTED`, whose module is imported later.
_INTERRUPTED, _MESSAGE = 130, b"interrupted; nothing was saved\n"
_STANDARD_ERROR = 2


def exit_at_once(number: int, frame: FrameType | None) -> None:
    """Handle Ctrl-C: no code of a library can catch or report it."""
    os.write(_STANDARD_ERROR, _MESSAGE)
    os._exit(_INTERRUPTED)
