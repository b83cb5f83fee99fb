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
_TIME = re.compile(r"\d{4}-\d\d-\d\d[T ][\d:.+]+( UTC)?")
_DURATION = re.compile(r"# (?:ms|µs|s)\b")
_DIGEST = re.compile(r"\b[0-9a-f]{12}\b")
_NUMBER = re.compile(r"(?<![\w#.])\d+(?:\.\d+)?(?:e[+-]?\d+)?")


def masked(value: Any, key: str = "") -> Any:
    """Return a JSON value with `#` for numbers, and without what a machine decides."""
    if _MACHINE.search(key) and value is not None:
        return "…"
    if isinstance(value, dict):
        return {name: masked(item, name) for name, item in value.items()}
    if isinstance(value, list):
        return [masked(item, key) for item in value if _SPEED not in str(item)]
    if isinstance(value, bool) or value is None:
        return value
    return masked_text(value) if isinstance(value, str) else "#"


def masked_text(text: str) -> str:
    """Return a text with placeholders for numbers, digests and absolute paths."""
    named = _DIGEST.sub("<digest>", _PATH.sub("<path>", _TIME.sub("<time>", text)))
    return _DURATION.sub("# s", _NUMBER.sub("#", named)).replace(_REDUCED, "")


def headings_of_page(page: str) -> list[str]:
    """Return the headings, and the headings of tables, of an HTML page in order.

    Without that of warnings: a result may be slower than FP32 on a busy machine.
    """
    elements = re.findall(r"<(h[1-4]|th|summary|legend)\b[^>]*>(.*?)</\1>", page, re.DOTALL)
    texts = (masked_text(html.unescape(re.sub(r"<[^>]*>", " ", text))) for _, text in elements)
    headings = dict.fromkeys(" ".join(text.split()) for text in texts if text.strip("#. "))
    return [heading for heading in headings if heading not in ("# warning", "# warnings")]
