"""Entry point of the `neural-mp` command, which handles Ctrl-C before slow imports."""

from __future__ import annotations

import signal

from neural_mp.cli.early_interrupt import exit_at_once


def main() -> None:
    """Run the command and exit with its exit code (see `ExitCode`)."""
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, exit_at_once)
    from neural_mp.cli.app import main as run

    run()


if __name__ == "__main__":
    main()
