"""All kinds of attack."""

from __future__ import annotations

from disks import DISKS
from hostile_files import HOSTILE_FILES
from hostile_torch import HOSTILE_TORCH
from kills import KILLS
from mutations import KINDS_OF_FILES, MUTATIONS
from together import TOGETHER
from user_objects import USER_OBJECTS
from verdicts import Family

FAMILIES: tuple[Family, ...] = (
    KILLS,
    TOGETHER,
    DISKS,
    MUTATIONS,
    USER_OBJECTS,
    HOSTILE_FILES,
    HOSTILE_TORCH,
)
#: Parts of families, which are attacked alone where they are named.
PARTS: tuple[Family, ...] = KINDS_OF_FILES
