"""Contrast of the colours of pages in both schemes, by the formula of WCAG 2."""

from __future__ import annotations

import re
from importlib import resources

import pytest

from neural_mp.reporting.page.page_model import WIDE_LETTER

CSS = (resources.files("neural_mp.reporting.page") / "charts.css").read_text(encoding="utf-8")


def _colours(text: str) -> dict[str, str]:
    return dict(re.findall(r"--([\w-]+): (#[0-9a-f]{3,6});", text))


LIGHT, DARK = (_colours(part) for part in CSS.split("prefers-color-scheme: dark")[:2])


def _luminance(colour: str) -> float:
    digits = colour[1:] if len(colour) == 7 else "".join(2 * digit for digit in colour[1:])
    parts = (int(digits[i : i + 2], 16) / 255 for i in (0, 2, 4))
    red, green, blue = (c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in parts)
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue


def _contrast(first: str, second: str) -> float:
    low, high = sorted((_luminance(first), _luminance(second)))
    return (high + 0.05) / (low + 0.05)


def test_the_contrast_of_black_and_white_is_21():
    assert _contrast("#fff", "#000000") == pytest.approx(21)


@pytest.mark.parametrize("scheme", [LIGHT, DARK], ids=["light", "dark"])
@pytest.mark.parametrize("ground", ["bg", "card"])
@pytest.mark.parametrize("text", ["ink", "soft", "good", "bad", "amber"])
def test_text_has_the_contrast_that_wcag_asks_for(scheme, ground, text):
    """Level AA asks for 4.5 to 1."""
    assert _contrast(scheme[text], scheme[ground]) >= 4.5


@pytest.mark.parametrize("scheme", [LIGHT, DARK], ids=["light", "dark"])
def test_warnings_are_readable_on_their_ground(scheme):
    assert _contrast(scheme["amber"], scheme["amber-bg"]) >= 4.5


@pytest.mark.parametrize("scheme", [LIGHT, DARK], ids=["light", "dark"])
@pytest.mark.parametrize(
    "precision",
    ["int2", "int3", "int4", "int8", "int16", "w16a16", "bf16", "fp16", "fp32"],
)
def test_precisions_stand_out_from_a_card(scheme, precision):
    """Level AA asks for 3 to 1 of graphical objects."""
    assert _contrast(scheme[precision], scheme["card"]) >= 3


@pytest.mark.parametrize("scheme", [LIGHT, DARK], ids=["light", "dark"])
def test_weights_of_16_bits_have_a_colour_of_their_own(scheme):
    """On the map, `w16a16` costs twice `w8a16`; the style and the script have the same classes."""
    assert scheme["w16a16"] not in {v for name, v in scheme.items() if name != "w16a16"}
    script = (resources.files("neural_mp.reporting.page") / "map.js").read_text(encoding="utf-8")
    assert re.search(rf'const CLASSES = .*\b{WIDE_LETTER}: "w16a16"', script)
