"""All kinds of attack."""

from __future__ import annotations

from hostile_files import HOSTILE_FILES
from verdicts import Family

FAMILIES: tuple[Family, ...] = (HOSTILE_FILES,)
