"""All kinds of attack."""

from __future__ import annotations

from attacks.disks import DISKS
from attacks.hostile_files import HOSTILE_FILES
from attacks.hostile_torch import HOSTILE_TORCH
from attacks.kills import KILLS
from attacks.mutations import KINDS_OF_FILES, MUTATIONS
from attacks.together import TOGETHER
from attacks.user_objects import USER_OBJECTS
from attacks.verdicts import Family

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
