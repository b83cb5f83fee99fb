"""The `neural-mp` command."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

import neural_mp
from neural_mp.adaptors.tensorflow.log_suppression import suppress_startup_logs
from neural_mp.cli.errors import (
    ExitCode,
    help_epilog,
    print_error_document,
    print_error_line,
    report_error,
)
from neural_mp.cli.inspection import audit, explain, inspect
from neural_mp.cli.kernels import WithProgram, hardware, kernels
from neural_mp.cli.measurements import advise, benchmark, compare, sensitivity
from neural_mp.cli.options import make_command
from neural_mp.cli.report import report, ui
from neural_mp.cli.streams import check_written, guard_streams
from neural_mp.cli.tuning import convert, init, tune, tune_many


class _OneLineErrors(TyperGroup):
    """Commands whose usage errors are one line, like all other errors of a user."""

    def main(self, *args: Any, standalone_mode: bool = True, **extra: Any) -> Any:
        """Run the command line and exit, if `standalone_mode`."""
        options = {**extra, "standalone_mode": False}
        if not standalone_mode:
            return super().main(*args, **options)
        try:
            code = super().main(*args, **options)
        except Exception as error:
            code = _report_usage_error(error)
            if code is None:
                raise
        sys.exit(code if isinstance(code, int) else ExitCode.DONE)


def _report_usage_error(error: Exception) -> int | None:
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
        message = f"{format_message().rstrip('.')}; see neural-mp{of} --help"
        arguments = sys.argv[1 : sys.argv.index("--") if "--" in sys.argv else None]
        if "--json" in arguments:
            print_error_document("UsageError", message, sys.stdout)
        print_error_line(f"UsageError: {message}")
    return int(getattr(error, "exit_code", ExitCode.MISTAKE))


app = typer.Typer(
    name="neural-mp",
    cls=_OneLineErrors,
    help="Find the fastest version of a trained model that meets an accuracy target.",
    epilog=help_epilog("tune conf.yaml --output tuned"),
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


#: Command → examples, in the order of the help.
_COMMANDS: dict[Callable[..., None], tuple[str, ...]] = {
    tune: (
        "tune conf.yaml --output tuned",
        "tune net.onnx --data test.npz --metric accuracy --tolerance 1% -o tuned",
        "tune my_classifier --task text-classification --data reviews.jsonl -o tuned",
        "tune conf.yaml --json | jq .report.speedup",
    ),
    init: ("init net.onnx --data test.npz && neural-mp tune conf.yaml --output tuned",),
    tune_many: ("tune-many jobs/*.yaml --workers 2 --output results",),
    inspect: ("inspect model.onnx --type Conv --match 'layer4.*'", "inspect model.pt2 --summary"),
    explain: ("explain model.onnx Softmax_7 --precision bf16",),
    convert: ("convert model.pt2 --plan tuned/plan.yaml --output replayed",),
    audit: ("audit tuned", "audit model.onnx --plan plan.yaml --all"),
    benchmark: ("benchmark model.pt2 tuned --batch-size 64",),
    report: (
        "report neural_mp_workspace",
        "report workspace --model 1f0c --run 3 --output third.html",
        "report workspace --run 2 --against 1",
    ),
    ui: ("ui neural_mp_workspace --open",),
    compare: (
        "compare model.pt2 tuned --data images.npy",
        "compare tuned other --data conf.yaml",
    ),
    sensitivity: (
        "sensitivity model.onnx --data images.npy --most 10",
        "sensitivity conf.yaml --csv > costs.csv",
    ),
    advise: ("advise conf.yaml --precision fp16 --output plan.yaml",),
    kernels: ("kernels fp32.log bf16.log --by isa", "kernels -o fp32.log -- python train.py"),
    hardware: ("hardware", "hardware --json | jq .cpu.bf16.native"),
}
for _function, _examples in _COMMANDS.items():
    _kind = WithProgram if _function is kernels else None
    app.command(cls=_kind, epilog=help_epilog(*_examples))(make_command(_function))


def main() -> None:
    """Run the command and exit with its exit code (see `ExitCode`)."""
    with guard_streams():
        suppress_startup_logs()
        try:
            _run_command()
        except Exception as error:
            raise SystemExit(int(report_error(error))) from error


def _run_command() -> None:
    """Run the command and exit.

    Raises:
        NeuralMPError: standard output cannot be written; help and version are output, too.
    """
    try:
        app()
    except SystemExit as end:
        if end.code == ExitCode.DONE:
            check_written(sys.stdout, "nothing was saved")
        raise


if __name__ == "__main__":
    main()
