"""Consoles for terminals, pipes and files in any encoding."""

from __future__ import annotations

import codecs
import os
import sys
from collections.abc import Iterable
from typing import Any

from rich.console import Console, ConsoleOptions, RenderableType
from rich.segment import Segment
from rich.text import Text

from neural_mp.errors import visible

#: Width without a terminal, which fits any table.
_UNLIMITED = 100_000
#: Replacements of characters that an encoding lacks.
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
    """Console that prints names from files literally.

    Markup and emoji codes are not interpreted, and control characters, which could manipulate the
    terminal, are printed as their codes.
    """

    def __init__(self, **settings: Any) -> None:
        super().__init__(markup=False, emoji=False, **settings)

    def render_str(self, text: str, **settings: Any) -> Text:
        """Return a text with its replacements, so that its width is known."""
        return super().render_str(visible(text), **settings)

    def render(
        self, renderable: RenderableType, options: ConsoleOptions | None = None
    ) -> Iterable[Segment]:
        """Render an object, with replacements in all its texts."""
        for piece in super().render(renderable, options):
            text, style, control = piece
            yield piece if control else Segment(visible(text), style)

    def on_broken_pipe(self) -> None:
        """Print nothing from now on: a run must not end because nobody reads its progress."""
        self.quiet = True


def create_output_console() -> Console:
    """Return a console for results on the current standard output."""
    return _build_console(stderr=False)


def create_error_console() -> Console:
    """Return a console for progress, warnings and errors on the current standard error."""
    return _build_console(stderr=True)


def _build_console(*, stderr: bool) -> SafeConsole:
    stream = sys.stderr if stderr else sys.stdout
    _make_printable(stream)
    # Checked in advance: while TensorFlow is imported, standard error is redirected to a pipe.
    on_terminal = stream.isatty()
    coloured = bool(os.environ.get("FORCE_COLOR")) and not on_terminal
    return SafeConsole(
        # Kept open, so that a progress bar still updates while framework output is captured.
        file=stream,
        stderr=stderr,
        # `FORCE_COLOR` requests colours, not progress bars in a file.
        force_terminal=on_terminal,
        color_system="standard" if coloured else "auto",
        # Output for other programs must not be wrapped.
        width=None if on_terminal else _UNLIMITED,
    )


def _make_printable(stream: object) -> None:
    """Let a stream print the nearest available character for those its encoding lacks."""
    encoding = (getattr(stream, "encoding", None) or "utf-8").lower().replace("-", "")
    if encoding.startswith("utf") or not hasattr(stream, "reconfigure"):
        return
    codecs.register_error(_IN_PLAIN_WORDS, _replace_unencodable)
    stream.reconfigure(errors=_IN_PLAIN_WORDS)


def _replace_unencodable(error: UnicodeError) -> tuple[str, int]:
    if not isinstance(error, UnicodeEncodeError):
        raise error
    missing = error.object[error.start : error.end]
    return "".join(_PLAIN.get(character, "?") for character in missing), error.end
