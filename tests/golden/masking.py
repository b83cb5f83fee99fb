"""Documents without what differs from run to run: numbers, times, paths and versions."""

from __future__ import annotations

import html
import re
from typing import Any

#: Keys whose values are those of a machine or of a moment.
_MACHINE = re.compile(
    r"seconds|time|version|hardware|machine|cpu|digest|fingerprint|path|folder|file|date|speed|"
    r"latency|throughput|kernels?$|flags|^node$|^exact_on$"
)
#: Words of an INT8 weight on a CPU whose products saturate, and of a measured speed.
_REDUCED, _SPEED = " reduced_range", "the speed of FP32 on this machine"
_PATH = re.compile(r"(?<![\w<])/(?:[\w.+-]+/)*[\w.+-]+")
_DIGEST = re.compile(r"\b[0-9a-f]{12}\b")
_NUMBER = re.compile(r"(?<![\w#.])\d+(?:\.\d+)?(?:e[+-]?\d+)?")


def masked(value: Any, key: str = "") -> Any:
    """Return a JSON value with `#` for numbers, and without what a machine decides."""
    if isinstance(value, dict):
        return {name: masked(item, name) for name, item in value.items()}
    if isinstance(value, list):
        return [masked(item, key) for item in value if _SPEED not in str(item)]
    if _MACHINE.search(key) and value is not None:
        return "…"
    if isinstance(value, bool) or value is None:
        return value
    return masked_text(value) if isinstance(value, str) else "#"


def masked_text(text: str) -> str:
    """Return a text with placeholders for numbers, digests and absolute paths."""
    named = _DIGEST.sub("<digest>", _PATH.sub("<path>", text))
    return _NUMBER.sub("#", named).replace(_REDUCED, "")


def words_of_page(page: str) -> list[str]:
    """Return the texts of an HTML page in order, without scripts, drawings and repeated texts.

    The last section, about the machine, is left out.
    """
    page = page.partition("Machine and versions")[0]
    body = re.sub(r"<(script|style|svg)\b.*?</\1>", "", page, flags=re.DOTALL)
    texts = (masked_text(html.unescape(text).strip()) for text in re.findall(r">([^<]+)<", body))
    return list(dict.fromkeys(text for text in texts if text.strip("#. ")))
