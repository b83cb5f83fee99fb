"""All kinds of attack."""

from __future__ import annotations

from hostile_files import HOSTILE_FILES
from hostile_torch import HOSTILE_TORCH
from mutations import MUTATIONS
from user_objects import USER_OBJECTS
from verdicts import Family

FAMILIES: tuple[Family, ...] = (HOSTILE_FILES, HOSTILE_TORCH, MUTATIONS, USER_OBJECTS)
