"""Entry point of the `neural-mp` command, which handles Ctrl-C before slow imports."""

from __future__ import annotations

import atexit
import gc
import signal

from neural_mp.cli.ctrl_c import exit_at_once


def main() -> None:
    """Run the command and exit with its exit code (see `ExitCode`)."""
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:  # else ignored or handled
        signal.signal(signal.SIGINT, exit_at_once)
    # Python collects garbage as it ends, which takes a second with a framework loaded.
    atexit.register(gc.freeze)
    from neural_mp.cli.app import main as run

    run()


if __name__ == "__main__":
    main()
