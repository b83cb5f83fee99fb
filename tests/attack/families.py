"""All kinds of attack."""

from __future__ import annotations

from verdicts import Family

FAMILIES: tuple[Family, ...] = ()
