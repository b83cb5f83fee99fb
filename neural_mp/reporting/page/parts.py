"""Pieces that several sections are made of."""

from __future__ import annotations

from collections.abc import Iterable

from neural_mp.util.html import Child, Element, element


def card(title: str, lead: Child, *content: Child, kind: str = "") -> Element:
    """A section with a heading and a sentence below it."""
    said = element("p", lead, class_="lead") if lead else None
    return element("section", element("h2", title), said, content, class_=f"card {kind}".rstrip())


def none(words: str) -> Element:
    """What stands where there is nothing to show."""
    return element("p", words, class_="none")


def facts(pairs: Iterable[tuple[str, Child]]) -> Element:
    """Names and what they are."""
    return element(
        "dl", [[element("dt", name), element("dd", value)] for name, value in pairs], class_="facts"
    )


def scrolling(content: Element, what: str, kind: str = "") -> Element:
    """What is wider or longer than the page lets it be; keys scroll it, too."""
    return element(
        "div",
        content,
        class_=f"scroll {kind}".rstrip(),
        tabindex=0,
        role="region",
        aria_label=what,
    )


def name(text: str) -> Element:
    """The name of an op or a tensor."""
    return element("code", text)


def joined(parts: Iterable[str]) -> str:
    """Words with a dot between them, empty ones left out."""
    return " · ".join(part for part in parts if part)
