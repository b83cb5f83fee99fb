"""The page of a run: one file that loads nothing, and a smaller form for a notebook's cell."""

from __future__ import annotations

import base64
import hashlib
from functools import cache
from importlib import resources
from pathlib import Path

from neural_mp.errors import NeuralMPError
from neural_mp.reporting.page.page_data import island, plan_link
from neural_mp.reporting.page.page_model import View
from neural_mp.reporting.page.sections import (
    machine_section,
    map_section,
    noise_section,
    ops_section,
    run_section,
)
from neural_mp.reporting.page.summary import about, notices, tiles
from neural_mp.reporting.page.time_section import (
    conversions_section,
    single_ops_section,
    time_section,
)
from neural_mp.reporting.page.trials_chart import trials_chart
from neural_mp.reporting.page.trials_section import (
    finalists_section,
    predicted_section,
    trials_section,
)
from neural_mp.reporting.tables import before_and_after
from neural_mp.runs.record import RunRecord
from neural_mp.runs.report import Report
from neural_mp.util.html import Child, Element, element, markup, notebook_table, raw
from neural_mp.util.validators import file_path, validate_option

_SCRIPTS = ("map.js", "table.js", "page.js")


def page_of(record: RunRecord) -> str:
    """The page of a run as an HTML document.

    It is complete: it loads nothing, and its content policy lets nothing but its own script run.

    Args:
        record: what was kept of the run; one that did not end has a page, too.
    """
    view = View(record)
    body = element(
        "body",
        element("main", _content(view)),
        element("div", id="tip", role="tooltip"),
        island(view),
        raw("script", _script()),
        class_="nmp",
    )
    return "<!doctype html>\n" + markup(
        element(
            "html", head(f"{view.record.setup.model}: neural-mp report", _script()), body, lang="en"
        )
    )


def write_page(path: str | Path, page: str) -> None:
    """Write a page into a file; folders on its way are made.

    Raises:
        NeuralMPError: it cannot be written.
    """
    target = validate_option("the file of the page", file_path, path)
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(page, encoding="utf-8", newline="\n")
    except OSError as error:
        raise NeuralMPError(f"the page {str(target)!r} cannot be written: {error}") from error


def cell_of(record: RunRecord) -> str:
    """What a notebook shows of a run: the verdict, the figures, the trials.

    No script, and styles that hold within it alone.
    """
    view = View(record)
    return markup(
        element(
            "div",
            raw("style", _file("charts.css")),
            tiles(view),
            element("div", trials_chart(view, narrow=False, chosen=False), class_="card")
            if view.drawn
            else None,
            class_="nmp cell",
        )
    )


def report_cell(report: Report, caption: str = "Before and after") -> str:
    """The figures of a run as a small table for a notebook's cell."""
    headings = ("", "FP32", "result", "change")
    return notebook_table(headings, before_and_after(report), caption)


def head(title: str, script: str = "") -> Element:
    """The head of a page in our look, which lets nothing be loaded and only its own script run.

    Args:
        title: of the page.
        script: what it runs; nothing by default.
    """
    style = _file("charts.css") + _file("page.css")
    scripts = f"'{_digest(script)}'" if script else "'none'"
    policy = (
        f"default-src 'none'; style-src '{_digest(style)}'; script-src {scripts}; "
        f"img-src data:; base-uri 'none'; form-action 'none'"
    )
    return element(
        "head",
        element("meta", charset="utf-8"),
        element("meta", name="viewport", content="width=device-width,initial-scale=1"),
        element("meta", http_equiv="Content-Security-Policy", content=policy),
        element("title", title),
        raw("style", style),
    )


def _content(view: View) -> list[Child]:
    single = single_ops_section(view)
    return [
        element(
            "header",
            element(
                "div",
                element("h1", view.record.setup.model),
                element("p", about(view), class_="sub"),
            ),
            element("div", plan_link(view), class_="buttons"),
        ),
        tiles(view),
        notices(view),
        _beside(trials_section(view), time_section(view)),
        map_section(view),
        _beside(noise_section(view, wide=single is None), single),
        _in_pairs(finalists_section(view), predicted_section(view), conversions_section(view)),
        ops_section(),
        _beside(run_section(view), machine_section(view)),
        element("footer", "Written by neural-mp. This file is complete: it loads nothing."),
    ]


def _beside(*sections: Element | None) -> Element | None:
    """Sections side by side, where there is room; the only one has it all."""
    shown = [section for section in sections if section is not None]
    if not shown:
        return None
    return element("div", shown, class_="two" if len(shown) > 1 else "one")


def _in_pairs(*sections: Element | None) -> list[Element | None]:
    """Sections two by two, those left out that there are not."""
    shown = [section for section in sections if section is not None]
    return [_beside(*shown[at : at + 2]) for at in range(0, len(shown), 2)]


@cache
def _file(name: str) -> str:
    text = resources.files(__package__).joinpath(name).read_text(encoding="utf-8")
    return text.replace("\r\n", "\n")


@cache
def _script() -> str:
    return '"use strict";\n' + "".join(_file(name) for name in _SCRIPTS)


def _digest(text: str) -> str:
    """A text as a content policy names it (W3C, Content Security Policy Level 3, 2.3.1)."""
    return "sha256-" + base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
