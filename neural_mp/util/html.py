"""HTML and SVG built of elements, never of strings, so that no name of an op can break out."""

from __future__ import annotations

import unicodedata
from collections.abc import Iterable, Sequence
from typing import Any
from xml.etree import ElementTree

Element = ElementTree.Element
#: What may stand in an element: elements, texts, numbers, lists of those; None is left out.
Child = Any

#: Rows of a table in a notebook's cell.
_MOST_ROWS = 60


def visible(text: str) -> str:
    """A text whose control characters are written as their code.

    Among them are those that turn the direction of what is around them (Unicode Standard Annex
    #9), so that a name can neither hide nor reorder anything.
    """
    if text.isascii() and text.isprintable():
        return text
    return "".join(
        f"\\u{ord(letter):04x}"
        if unicodedata.category(letter) in ("Cc", "Cf", "Cs", "Co", "Zl", "Zp")
        and letter not in "\n\t"
        else letter
        for letter in text
    )


def element(_tag: str, *children: Child, **attributes: object) -> Element:
    """An element.

    Args:
        _tag: such as `div`.
        children: what stands in it.
        attributes: `class_` stands for `class`, `stroke_width` for `stroke-width`; None is left
            out, True is the bare attribute.
    """
    given = {
        name.rstrip("_").replace("_", "-"): _attribute(value)
        for name, value in attributes.items()
        if value is not None and value is not False
    }
    made = ElementTree.Element(_tag, given)
    _put(made, children)
    return made


def raw(tag: str, text: str, **attributes: object) -> Element:
    """A script or a style of our own: its text is written as it is.

    Raises:
        ValueError: the text would end the element.
    """
    if "</" in text:
        raise ValueError(f"the text of <{tag}> must not hold '</'")
    made = element(tag, **attributes)
    made.text = text
    return made


def markup(made: Element) -> str:
    """An element as HTML."""
    return ElementTree.tostring(made, encoding="unicode", method="html")


def table(
    headings: Sequence[str],
    rows: Iterable[Sequence[Child]],
    caption: str = "",
    **attributes: object,
) -> Element:
    """A table; the first column is its rows' headings."""
    return element(
        "table",
        element("caption", caption) if caption else None,
        element("thead", element("tr", [element("th", h, scope="col") for h in headings])),
        element(
            "tbody",
            [
                element(
                    "tr",
                    element("th", row[0], scope="row"),
                    [element("td", cell) for cell in row[1:]],
                )
                for row in rows
            ],
        ),
        **attributes,
    )


def notebook_table(headings: Sequence[str], rows: Sequence[Sequence[Child]], caption: str) -> str:
    """A small table for a notebook's cell, in the notebook's own style; long ones are cut."""
    left_out = len(rows) - _MOST_ROWS
    note = element("p", f"… and {left_out} more") if left_out > 0 else None
    return markup(element("div", table(headings, rows[:_MOST_ROWS], caption), note))


def _attribute(value: object) -> str:
    if value is True:
        return ""
    if isinstance(value, float):
        return f"{value:.6g}"
    return visible(str(value))


def _put(parent: Element, children: Iterable[Child]) -> None:
    for child in children:
        if child is None:
            continue
        if isinstance(child, Element):
            parent.append(child)
        elif isinstance(child, list | tuple):
            _put(parent, child)
        elif len(parent):
            parent[-1].tail = (parent[-1].tail or "") + visible(str(child))
        else:
            parent.text = (parent.text or "") + visible(str(child))
