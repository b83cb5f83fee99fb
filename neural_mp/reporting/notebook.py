"""A run as it goes on, in the output of a notebook's cell."""

from __future__ import annotations

import io
import sys
import time
from collections.abc import Callable
from typing import Any

from rich.console import RenderableType

from neural_mp.reporting.console import SafeConsole

#: Seconds between two pictures of a run: a browser that draws each step would be all that is busy.
_BETWEEN = 0.25
#: Columns of a cell's output.
_COLUMNS = 110
_FRAME = (
    "<pre style=\"white-space:pre;overflow-x:auto;line-height:1.2;font-family:Menlo,'DejaVu Sans "
    "Mono',Consolas,monospace\">{code}</pre>"
)


def is_notebook() -> bool:
    """Whether this process is the kernel of a notebook."""
    if "ipykernel" not in sys.modules:
        return False
    from IPython import get_ipython

    return get_ipython() is not None


class NotebookLive:
    """What is drawn over and over in one place of a cell's output; needs no widgets.

    Args:
        render: gives what is to be seen now.
        show: shows HTML, and returns what takes the HTML that is to replace it; IPython's own
            display by default.
    """

    def __init__(
        self,
        render: Callable[[], RenderableType],
        show: Callable[[str], Callable[[str], Any]] | None = None,
    ) -> None:
        self._render, self._show = render, show or _displayed
        self._replace: Callable[[str], Any] | None = None
        self._drawn = 0.0

    def update(self) -> None:
        """Draw it anew, unless that was done a moment ago."""
        now = time.monotonic()
        if now - self._drawn >= _BETWEEN:
            self._drawn = now
            self.draw(self._render())

    def draw(self, shown: RenderableType) -> None:
        """Draw something in the same place."""
        html = html_of(shown)
        if self._replace is None:
            self._replace = self._show(html)
        else:
            self._replace(html)


def html_of(shown: RenderableType) -> str:
    """What a terminal would show, as HTML with its own styles."""
    console = SafeConsole(
        record=True, file=io.StringIO(), width=_COLUMNS, force_jupyter=False, color_system="256"
    )
    console.print(shown)
    return console.export_html(inline_styles=True, code_format=_FRAME)


def _displayed(html: str) -> Callable[[str], Any]:
    from IPython.display import HTML, display

    handle = display(HTML(html), display_id=True)
    return lambda newer: handle.update(HTML(newer))
