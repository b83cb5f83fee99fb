"""The map and the table of ops: places that the script fills."""

from __future__ import annotations

from neural_mp.core.grammar import counted
from neural_mp.reporting.page.page_model import View
from neural_mp.reporting.page.parts import scrolling
from neural_mp.util.html import Element, element


def map_section(view: View) -> Element:
    """The model, one box a kernel, coloured by what is asked."""
    colours = {"precision": "precision", "noise": "noise in INT8"}
    if view.arriving:
        colours["arriving"] = "noise at the outputs"
    if _times(view):
        colours |= {"time": "time", "gain": "gain over FP32"}
    select = element(
        "select", [element("option", said, value=v) for v, said in colours.items()], id="colour"
    )
    canvas = element(
        "canvas",
        id="map",
        tabindex=0,
        role="application",
        aria_label=f"Map of {counted(len(view.graph), 'op')}; arrow keys follow the edges, plus "
        "and minus zoom. The table of ops below says the same in words.",
    )
    buttons = [
        element("button", sign, aria_label=said, data_zoom=by)
        for sign, said, by in (
            ("+", "Zoom in", 1.4),
            ("−", "Zoom out", 0.714),
            ("⤢", "Show all", 0),
        )
    ]
    return element(
        "section",
        element(
            "div",
            element(
                "div",
                element("h2", "Map"),
                element(
                    "p",
                    "One box a kernel; read down, then the next column. ",
                    element("span", id="showing", class_="showing"),
                    class_="lead",
                ),
            ),
            element(
                "div",
                element("label", "colour by ", select),
                _search("find", "find an op", "Find an op"),
                element("button", "Show the result", id="back", hidden=True),
                class_="tools",
            ),
            class_="head",
        ),
        element(
            "div",
            canvas,
            element("div", buttons, class_="zoom"),
            element("div", "drag to move · ctrl + wheel or pinch to zoom", class_="hint"),
            class_="map",
        ),
        element("ul", id="maplegend", class_="legend"),
        element("div", id="detail", aria_live="polite"),
        element("noscript", element("p", "The map and the table of ops need scripts.")),
        class_="card one",
    )


def ops_section() -> Element:
    """The table of ops."""
    return element(
        "section",
        element(
            "div",
            element("h2", "Ops"),
            element("div", _search("filter", "name, type or reason", "Filter ops"), class_="tools"),
            class_="head",
        ),
        scrolling(element("table", id="ops"), "Table of ops"),
        element("p", id="more", class_="lead after"),
        class_="card one",
    )


def _times(view: View) -> bool:
    timed = view.ending is not None and bool(view.ending.baseline_times)
    return timed or bool(view.record.measured.times.ops)


def _search(name: str, hint: str, said: str) -> Element:
    return element("input", type="search", id=name, placeholder=hint, aria_label=said)
