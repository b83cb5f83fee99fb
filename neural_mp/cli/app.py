"""The `neural-mp` command."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

import neural_mp
from neural_mp.adaptors.tensorflow.log_suppression import suppress_startup_logs
from neural_mp.cli import (
    advise,
    audit,
    benchmark,
    compare,
    convert,
    explain,
    hardware,
    init,
    inspect,
    kernels,
    report,
    sensitivity,
    tune,
    tune_many,
)
from neural_mp.cli.errors import ExitCode, epilog, reported, say_error
from neural_mp.cli.options import command

_STANDARD_ERROR = 2


class _OneLineErrors(TyperGroup):
    """Commands whose usage errors are one line, like all other errors of a user."""

    def main(
        self,
        args: Sequence[str] | None = None,
        prog_name: str | None = None,
        complete_var: str | None = None,
        standalone_mode: bool = True,
        windows_expand_args: bool = True,
        **extra: Any,
    ) -> Any:
        """Run the command line and exit, if `standalone_mode`."""
        arguments = (args, prog_name, complete_var)
        if not standalone_mode:
            return super().main(*arguments, False, windows_expand_args, **extra)
        try:
            code = super().main(*arguments, False, windows_expand_args, **extra)
        except Exception as error:
            code = _usage_code(error)
            if code is None:
                raise
        sys.exit(code if isinstance(code, int) else ExitCode.DONE)


def _usage_code(error: Exception) -> int | None:
    """Print an error of the command line; return its exit code, None for other errors.

    Typer has its own copy of click's exceptions, or none: they are known by their methods.
    """
    show, format_message = getattr(error, "show", None), getattr(error, "format_message", None)
    if show is None or format_message is None:
        return None
    context = getattr(error, "ctx", None)
    if context is None or "NoArgsIsHelp" in type(error).__name__:
        show()
    else:
        of = f" {context.info_name}" if context.parent is not None else ""
        say_error(f"UsageError: {format_message().rstrip('.')}; see neural-mp{of} --help")
    return int(getattr(error, "exit_code", ExitCode.MISTAKE))


app = typer.Typer(
    name="neural-mp",
    cls=_OneLineErrors,
    help="Find the fastest version of a trained model that meets an accuracy target.",
    epilog=epilog("tune conf.yaml --output tuned"),
    context_settings={"help_option_names": ["-h", "--help"]},
    no_args_is_help=True,
    pretty_exceptions_enable=False,
)


def _show_version(asked: bool) -> None:
    if asked:
        typer.echo(f"neural-mp {neural_mp.__version__}")
        raise typer.Exit


@app.callback()
def _parse_global_options(
    version: Annotated[
        bool,
        typer.Option("--version", callback=_show_version, is_eager=True, help="Show the version."),
    ] = False,
) -> None:
    pass


app.command(epilog=tune.EPILOG)(command(tune.tune))
app.command(epilog=init.EPILOG)(command(init.init))
app.command("tune-many", epilog=tune_many.EPILOG)(command(tune_many.tune_many))
app.command(epilog=inspect.EPILOG)(command(inspect.inspect))
app.command(epilog=explain.EPILOG)(command(explain.explain))
app.command(epilog=convert.EPILOG)(command(convert.convert))
app.command(epilog=audit.EPILOG)(command(audit.audit))
app.command(epilog=benchmark.EPILOG)(command(benchmark.benchmark))
app.command(epilog=report.EPILOG)(command(report.report))
app.command(epilog=compare.EPILOG)(command(compare.compare))
app.command(epilog=sensitivity.EPILOG)(command(sensitivity.sensitivity))
app.command(epilog=advise.EPILOG)(command(advise.advise))
app.command(cls=kernels.WithProgram, epilog=kernels.EPILOG)(command(kernels.kernels))
app.command(epilog=hardware.EPILOG)(command(hardware.hardware))


def _open_streams() -> None:
    """Open closed standard streams as `/dev/null`.

    Otherwise the next opened file, e.g. the history of a run, gets the stream's file descriptor and
    receives the output of libraries.
    """
    while (opened := os.open(os.devnull, os.O_RDWR)) <= _STANDARD_ERROR:
        os.set_inheritable(opened, True)
    os.close(opened)
    for number, (name, mode) in enumerate((("stdin", "r"), ("stdout", "w"), ("stderr", "w"))):
        if getattr(sys, name) is None:
            setattr(sys, name, open(number, mode, encoding="utf-8", closefd=False))  # noqa: SIM115


def main() -> None:
    """Run the command and exit with its exit code (see `ExitCode`)."""
    _open_streams()
    suppress_startup_logs()
    try:
        app()
    except Exception as error:
        raise SystemExit(int(reported(error))) from error


if __name__ == "__main__":
    main()
