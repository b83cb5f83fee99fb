"""Standard streams of the command: a full or closed stream never ends a command early."""

from __future__ import annotations

import io
import os
import select
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, TextIO

from neural_mp.cli.interrupts import to_exit_code
from neural_mp.errors import NeuralMPError

_STANDARD_ERROR = 2
#: SIGPIPE, a signal that Windows lacks.
_BROKEN_PIPE_SIGNAL = 13
_STREAMS = (("stdin", "r"), ("stdout", "w"), ("stderr", "w"))


@contextmanager
def guard_streams() -> Iterator[None]:
    """Context in which closed streams are `/dev/null`, and failed ones discard what is written.

    A search of hours must not end because its output cannot be shown: results are saved first,
    and `check_written` reports the failure.
    """
    _open_closed_streams()
    original = sys.stdout, sys.stderr
    guarded = [_discard_after_error(stream) for stream in original]
    sys.stdout, sys.stderr = guarded
    try:
        yield
    finally:
        for stream in guarded:
            stream.flush()
        sys.stdout, sys.stderr = original


def check_written(stream: TextIO, kept: str) -> None:
    """Check that all output of a stream was written; `kept` says what the command has kept.

    Raises:
        NeuralMPError: output is lost, e.g. on a full disk.
        SystemExit: the reader has closed the stream; with the exit code of SIGPIPE, as of programs
            that this signal ends.
    """
    stream.flush()
    error = getattr(_get_raw(stream), "error", None)
    if isinstance(error, BrokenPipeError):
        raise SystemExit(to_exit_code(_BROKEN_PIPE_SIGNAL))
    if isinstance(error, OSError):
        raise NeuralMPError(f"standard output cannot be written: {error.strerror}; {kept}")


def _open_closed_streams() -> None:
    """Open closed standard streams as `/dev/null`.

    Otherwise the next opened file, e.g. the history of a run, gets the stream's file descriptor and
    receives the output of libraries.
    """
    while (opened := os.open(os.devnull, os.O_RDWR)) <= _STANDARD_ERROR:
        os.set_inheritable(opened, True)
    os.close(opened)
    for number, (name, mode) in enumerate(_STREAMS):
        if getattr(sys, name) is None:
            setattr(sys, name, open(number, mode, encoding="utf-8", closefd=False))  # noqa: SIM115


class _DiscardingFile(io.FileIO):
    """File that discards what is written after an error.

    Attributes:
        error: the first error; None if there was none.
    """

    error: OSError | None = None

    def write(self, data: Any) -> int:
        """Write all bytes, or discard them after an error; return their number."""
        remaining = memoryview(data).cast("B")
        size = remaining.nbytes
        try:
            while remaining:
                count = super().write(remaining)
                if count is None:  # a full pipe that does not block
                    select.select((), (self,), ())
                remaining = remaining[count or 0 :]
        except OSError as error:
            self.error = self.error or error
            nothing = os.open(os.devnull, os.O_WRONLY)
            os.dup2(nothing, self.fileno())
            os.close(nothing)
        return size


def _get_raw(stream: TextIO) -> object:
    """Return the unbuffered file of a stream; None if the stream is not of a file."""
    buffer = getattr(stream, "buffer", None)
    return getattr(buffer, "raw", buffer)


def _discard_after_error(stream: TextIO) -> TextIO:
    """Return a stream like this one, on a `_DiscardingFile`; unchanged if not of a file."""
    raw = _get_raw(stream)
    if not isinstance(stream, io.TextIOWrapper) or type(raw) is not io.FileIO:
        return stream  # e.g. of a test, or a console of Windows
    stream.flush()
    file = _DiscardingFile(raw.fileno(), "w", closefd=False)
    unbuffered = stream.buffer is raw
    return io.TextIOWrapper(
        file if unbuffered else io.BufferedWriter(file),  # type: ignore[type-var,unused-ignore]
        stream.encoding,
        stream.errors,
        line_buffering=stream.line_buffering,
        write_through=unbuffered or stream.write_through,
    )
