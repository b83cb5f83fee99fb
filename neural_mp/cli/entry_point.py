"""Entry point of the `neural-mp` command, which handles Ctrl-C and SIGTERM before slow imports."""

from __future__ import annotations

import atexit
import gc

from neural_mp.cli.interrupts import exit_at_once, handle_interrupts


def main() -> None:
    """Run the command and exit with its exit code (see `ExitCode`)."""
    handle_interrupts(exit_at_once)
    # Python collects garbage as it ends, which takes a second with a framework loaded.
    atexit.register(gc.freeze)
    from neural_mp.cli.app import main as run

    run()


if __name__ == "__main__":
    main()
