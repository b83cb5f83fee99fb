"""Entry point of the `neural-mp` command, which handles Ctrl-C before slow imports."""

from __future__ import annotations

from neural_mp.cli.ctrl_c import handle_early


def main() -> None:
    """Run the command and exit with its exit code (see `ExitCode`)."""
    handle_early()
    from neural_mp.cli.app import main as run

    run()


if __name__ == "__main__":
    main()
