"""All kinds of attack."""

from __future__ import annotations

from hostile_files import HOSTILE_FILES
from user_objects import USER_OBJECTS
from verdicts import Family

FAMILIES: tuple[Family, ...] = (HOSTILE_FILES, USER_OBJECTS)
