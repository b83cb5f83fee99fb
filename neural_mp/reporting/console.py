"""The consoles that everything is printed on: a terminal, a pipe or a file, in any encoding."""

from __future__ import annotations

import codecs
import os
import signal
import sys
from typing import Any

from rich.console import Console

#: Columns of a line where there is no screen that it must fit on: wide enough for any table.
_UNLIMITED = 100_000
#: What stands for characters that an encoding lacks.
_PLAIN = {
    "×": "x",
    "–": "-",
    "—": "-",
    "−": "-",
    "…": "...",
    "µ": "u",
    "μ": "u",
    "±": "+/-",
    "→": "->",
    "‖": "||",
    "·": "*",
    "’": "'",
    "‘": "'",
    "“": '"',
    "”": '"',
    "²": "^2",
    "≥": ">=",
    "≤": "<=",
}
_IN_PLAIN_WORDS = "neural_mp.plain"


class _Console(Console):
    """A console that ends the process as the shell expects where nobody reads any more."""

    def on_broken_pipe(self) -> None:
        """Exit as a program does that the signal SIGPIPE ended."""
        self.quiet = True
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        raise SystemExit(128 + signal.SIGPIPE)


def output_console() -> Console:
    """Where results go: standard output as it is now."""
    return _console(stderr=False)


def error_console() -> Console:
    """Where progress, warnings and errors go: standard error as it is now."""
    return _console(stderr=True)


def _console(*, stderr: bool) -> Console:
    stream = sys.stderr if stderr else sys.stdout
    _make_printable(stream)
    # Asked once: while TensorFlow is imported, standard error leads through a pipe.
    on_terminal = stream.isatty()
    coloured = bool(os.environ.get("FORCE_COLOR")) and not on_terminal
    return _Console(
        # Kept: a bar must move on while a framework's own words are caught.
        file=stream,
        stderr=stderr,
        # `FORCE_COLOR` asks for colours, not for bars that move within a file.
        force_terminal=on_terminal,
        color_system="standard" if coloured else "auto",
        # What is read by another program has no edge that lines would have to be broken at.
        width=None if on_terminal else _UNLIMITED,
    )


def _make_printable(stream: Any) -> None:
    """Let a stream whose encoding lacks a character print the nearest that it has."""
    encoding = (getattr(stream, "encoding", None) or "utf-8").lower().replace("-", "")
    if encoding.startswith("utf") or not hasattr(stream, "reconfigure"):
        return
    codecs.register_error(_IN_PLAIN_WORDS, _plain)
    stream.reconfigure(errors=_IN_PLAIN_WORDS)


def _plain(error: UnicodeError) -> tuple[str, int]:
    if not isinstance(error, UnicodeEncodeError):
        raise error
    missing = error.object[error.start : error.end]
    return "".join(_PLAIN.get(character, "?") for character in missing), error.end
