"""HTML and SVG built from elements, never from strings, so that op names cannot inject markup."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any
from xml.etree import ElementTree

from neural_mp.errors import visible

Element = ElementTree.Element
#: Content of an element: elements, strings, numbers, lists of these; None is omitted.
Child = Any

#: Maximum rows of a table in a notebook cell.
_MAX_ROWS = 60


def create_element(_tag: str, *children: Child, **attributes: object) -> Element:
    """Return an element.

    Args:
        _tag: such as `div`.
        children: content.
        attributes: `class_` stands for `class`, `stroke_width` for `stroke-width`; None is omitted,
            True is a bare attribute.
    """
    attrs = {
        name.rstrip("_").replace("_", "-"): _format_attribute_text(value)
        for name, value in attributes.items()
        if value is not None and value is not False
    }
    node = ElementTree.Element(_tag, attrs)
    _append_children(node, children)
    return node


def create_raw_element(tag: str, text: str, **attributes: object) -> Element:
    """Return a trusted script or style, whose text is not escaped.

    Raises:
        ValueError: the text would end the element.
    """
    if "</" in text:
        raise ValueError(f"the text of <{tag}> must not contain '</'")
    node = create_element(tag, **attributes)
    node.text = text
    return node


def render_html(node: Element) -> str:
    """Return an element as HTML."""
    return ElementTree.tostring(node, encoding="unicode", method="html")


def create_table(
    headings: Sequence[str],
    rows: Iterable[Sequence[Child]],
    caption: str = "",
    **attributes: object,
) -> Element:
    """Return a table; the first column contains row headings."""
    return create_element(
        "table",
        create_element("caption", caption) if caption else None,
        create_element(
            "thead", create_element("tr", [create_element("th", h, scope="col") for h in headings])
        ),
        create_element(
            "tbody",
            [
                create_element(
                    "tr",
                    create_element("th", row[0], scope="row"),
                    [create_element("td", cell) for cell in row[1:]],
                )
                for row in rows
            ],
        ),
        **attributes,
    )


def create_notebook_table(
    headings: Sequence[str], rows: Sequence[Sequence[Child]], caption: str
) -> str:
    """Return a table for a notebook cell, in the notebook's style; long tables are truncated."""
    left_out = len(rows) - _MAX_ROWS
    note = create_element("p", f"… and {left_out} more") if left_out > 0 else None
    return render_html(
        create_element("div", create_table(headings, rows[:_MAX_ROWS], caption), note)
    )


def _format_attribute_text(value: object) -> str:
    if value is True:
        return ""
    if isinstance(value, float):
        return f"{value:.6g}"
    return visible(str(value))


def _append_children(parent: Element, children: Iterable[Child]) -> None:
    for child in children:
        if child is None:
            continue
        if isinstance(child, Element):
            parent.append(child)
        elif isinstance(child, list | tuple):
            _append_children(parent, child)
        elif len(parent):
            parent[-1].tail = (parent[-1].tail or "") + visible(str(child))
        else:
            parent.text = (parent.text or "") + visible(str(child))
