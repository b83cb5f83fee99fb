"""`neural-mp kernels` and `hardware`."""

from __future__ import annotations

import io
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer.core import TyperCommand

from neural_mp.cli.errors import ExitCode
from neural_mp.cli.output import Output
from neural_mp.errors import ConfigurationError, KernelLogError

if TYPE_CHECKING:
    from neural_mp.profiling import KernelKey, KernelLog


#: Key in the context for the program after `--`.
_PROGRAM = "neural_mp.program"
_STANDARD_INPUT = "-"


class WithProgram(TyperCommand):
    """Command that accepts a program and its arguments after `--`."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Remove the program from the arguments before options are parsed."""
        if "--" in args:
            position = args.index("--")
            ctx.meta[_PROGRAM] = args[position + 1 :]
            args = args[:position]
        rest: list[str] = super().parse_args(ctx, args)
        return rest

    def collect_usage_pieces(self, ctx: Any) -> list[str]:
        """Return the parts of the usage line."""
        return [*super().collect_usage_pieces(ctx), "[-- PROGRAM [ARGUMENT]...]"]


def kernels(
    context: typer.Context,
    log: Annotated[
        str | None, typer.Argument(help="Log of a program run with ONEDNN_VERBOSE=1; - for stdin.")
    ] = None,
    other: Annotated[
        str | None, typer.Argument(help="Second log, to compare with the first.")
    ] = None,
    by: Annotated[
        list[str] | None,
        typer.Option(
            help="Group by implementation, primitive, isa, precision or problem; repeatable."
        ),
    ] = None,
    output: Annotated[
        Path | None, typer.Option("--output", "-o", help="File to write the log of the program to.")
    ] = None,
    *,
    out: Output,
) -> None:
    """Show the kernels that ran, with times, from oneDNN or ONNX Runtime logs."""
    from neural_mp.profiling import KernelKey

    keys = [KernelKey.parse(key, "--by") for key in by or (KernelKey.IMPLEMENTATION,)]
    program = context.meta.get(_PROGRAM)
    if program is not None:
        if log is not None:
            raise ConfigurationError(
                f"a log ({log!r}) and a program after -- exclude each other; give one of them"
            )
        _run_and_show_kernels(out, program, keys, output)
        return
    if output is not None:
        raise ConfigurationError("--output requires a program after --")
    if log is None:
        raise ConfigurationError(
            "no log is given; give a file, or a program after --, e.g. "
            "neural-mp kernels -- python train.py"
        )
    with out.show_progress(f"Reading {log}"):
        logs = [_read_log(name) for name in (log, other) if name is not None]
    if len(logs) == 1:
        _show_kernels(out, logs[0], keys, {})
    else:
        _show_kernel_changes(out, logs[0], logs[1], keys)


def _read_log(name: str) -> KernelLog:
    from neural_mp.profiling import read_kernel_log

    if name != _STANDARD_INPUT:
        return read_kernel_log(name)
    return read_kernel_log(io.TextIOWrapper(sys.stdin.buffer, "utf-8", "replace"))


def _run_and_show_kernels(
    out: Output, program: Sequence[str], keys: Sequence[KernelKey], output: Path | None
) -> None:
    """Run a program and exit with its exit code; raise if no kernel ran."""
    from neural_mp.profiling.kernel_log import run_with_kernel_log

    if not program:
        raise ConfigurationError("a program must follow --, e.g. -- python train.py")

    def forward_output(text: bytes) -> None:
        sys.stdout.buffer.write(text)
        sys.stdout.flush()
        out.check_written()  # a program may write for ever

    with _open_log_writer(output) as keep:
        out.saved = output
        log, code = run_with_kernel_log(program, forward_output, keep)
    if log.calls:
        _show_kernels(out, log, keys, {"exit_code": code})
    elif code == ExitCode.DONE:
        raise KernelLogError(f"no kernel to show: {log.empty_because}")
    if code:
        ended = f"{program[0]} ended with exit code {code}"
        out.show_warning(ended if log.calls else f"{ended}, before any kernel of oneDNN ran")
        raise typer.Exit(code)


def _show_kernels(
    out: Output, log: KernelLog, keys: Sequence[KernelKey], more: dict[str, Any]
) -> None:
    from neural_mp.reporting.tables import build_kernel_table

    for key in keys:
        out.show_table(build_kernel_table(log, key))
    if out.as_json:
        rows = {key: [vars(row) for row in log.by(key)] for key in keys}
        out.show_document({**_make_log_summary(log), "by": rows, **more})


def _show_kernel_changes(
    out: Output, baseline: KernelLog, candidate: KernelLog, keys: Sequence[KernelKey]
) -> None:
    from neural_mp.profiling import changed_kernels, side_by_side
    from neural_mp.reporting.tables import kernel_changes_table, kernel_pairs_table, summarize_log

    logs = {"before": baseline, "after": candidate}
    pairs = {key: side_by_side(baseline, candidate, key) for key in keys}
    changes = changed_kernels(baseline, candidate)
    for label, log in logs.items():
        out.show_line(f"{label}: {summarize_log(log)}")
    for key, rows in pairs.items():
        out.show_table(kernel_pairs_table(rows, key, (baseline, candidate)))
    out.show_table(kernel_changes_table(changes))
    for label, log in logs.items():
        for note in log.notes:
            out.show_line(f"{label}: {note}")
    if out.as_json:
        out.show_document(
            {
                **{label: _make_log_summary(log) for label, log in logs.items()},
                "by": {key: [asdict(pair) for pair in rows] for key, rows in pairs.items()},
                "changed": [vars(change) for change in changes],
            }
        )


def _make_log_summary(log: KernelLog) -> dict[str, Any]:
    return {
        "library": log.library,
        "isa": log.isa,
        "calls": len(log.calls),
        "milliseconds": log.total,
        "malformed": log.malformed,
        "notes": list(log.notes),
    }


@contextmanager
def _open_log_writer(output: Path | None) -> Iterator[Callable[[str], None]]:
    """Yield a function that writes log lines to a file, or discards them without a file."""
    if output is None:
        yield lambda line: None
        return
    try:
        file = output.open("w", encoding="utf-8")
    except OSError as error:
        raise ConfigurationError(f"--output {output} cannot be written: {error.strerror}") from None
    with file:
        yield lambda line: print(line.rstrip("\r\n"), file=file)


def hardware(*, out: Output) -> None:
    """Show the precisions that run natively, and whether INT8 kernels are exact."""
    from neural_mp.adaptors.registry import probe_installed_accumulation
    from neural_mp.core import hardware as machine
    from neural_mp.core.precision import CPU_PRECISIONS
    from neural_mp.reporting import build_hardware_table

    host = machine.detect()
    with out.show_progress("Reading the kernels of the installed frameworks"):
        products = probe_installed_accumulation(host)
    out.show_table(build_hardware_table(host, products))
    if out.as_json:
        supports = {p.value: vars(host.support(p)) for p in CPU_PRECISIONS}
        described = {"name": host.name, "cores": host.cores, "cpu": supports}
        out.show_document({**described, "int8_accumulation": products})
