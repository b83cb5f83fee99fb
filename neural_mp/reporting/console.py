"""The consoles that everything is printed on: a terminal, a pipe or a file, in any encoding."""

from __future__ import annotations

import codecs
import os
import signal
import sys
from collections.abc import Iterable
from typing import Any

from rich.console import Console, ConsoleOptions, RenderableType
from rich.segment import Segment
from rich.text import Text

from neural_mp.util.html import visible

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


class SafeConsole(Console):
    """A console on which names out of files are just names.

    They are no markup and no emoji, and control characters in them, with which a terminal could be
    made to do something, are shown as their code. Where nobody reads any more, the process ends as
    the shell expects.
    """

    def __init__(self, **settings: Any) -> None:
        super().__init__(markup=False, emoji=False, **settings)

    def render_str(self, text: str, **settings: Any) -> Text:
        """A text as it is shown; so it is known how wide that is."""
        return super().render_str(visible(text), **settings)

    def render(
        self, renderable: RenderableType, options: ConsoleOptions | None = None
    ) -> Iterable[Segment]:
        """Pieces of what is shown, whoever made the text in them."""
        for piece in super().render(renderable, options):
            text, style, control = piece
            yield piece if control else Segment(visible(text), style)

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


def _console(*, stderr: bool) -> SafeConsole:
    stream = sys.stderr if stderr else sys.stdout
    _make_printable(stream)
    # Asked once: while TensorFlow is imported, standard error leads through a pipe.
    on_terminal = stream.isatty()
    coloured = bool(os.environ.get("FORCE_COLOR")) and not on_terminal
    return SafeConsole(
        # Kept: a bar must move on while a framework's own words are caught.
        file=stream,
        stderr=stderr,
        # `FORCE_COLOR` asks for colours, not for bars that move within a file.
        force_terminal=on_terminal,
        color_system="standard" if coloured else "auto",
        # What is read by another program has no edge that lines would have to be broken at.
        width=None if on_terminal else _UNLIMITED,
    )


def _make_printable(stream: object) -> None:
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
