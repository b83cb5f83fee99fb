"""All example scripts that the bench runs."""

from __future__ import annotations

from inc_examples import (
    classifiers_v1,
    classifiers_v2,
    decoders_v3,
    detection,
    others,
    scripts_v3,
    text,
)
from inc_examples.case import Case

CASES: tuple[Case, ...] = (
    *classifiers_v1.CASES,
    *classifiers_v2.CASES,
    *detection.CASES,
    *text.CASES,
    *others.CASES,
    *scripts_v3.CASES,
    *decoders_v3.CASES,
)
