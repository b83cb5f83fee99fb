"""Entry point of the `neural-mp` command, which handles Ctrl-C before slow imports."""

from __future__ import annotations

import os
import signal
from types import FrameType

#: Exit code and message of `ExitCode.INTERRUPTED`, whose module is imported later.
_INTERRUPTED, _MESSAGE = 130, b"interrupted; nothing was saved\n"
_STANDARD_ERROR = 2


def exit_at_once(number: int, frame: FrameType | None) -> None:
    """Handle Ctrl-C outside a command: no code of a library can catch or report it."""
    os.write(_STANDARD_ERROR, _MESSAGE)
    os._exit(_INTERRUPTED)


def main() -> None:
    """Run the command and exit with its exit code (see `ExitCode`)."""
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, exit_at_once)
    from neural_mp.cli.app import main as run

    run()


if __name__ == "__main__":
    main()
