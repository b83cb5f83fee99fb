"""All kinds of attack."""

from __future__ import annotations

from attacks.disks import DISKS
from attacks.formats import hdf5_links, safetensors_files, sqlite_files, yaml_bombs, zip_members
from attacks.hostile_files import HOSTILE_FILES
from attacks.hostile_torch import HOSTILE_TORCH
from attacks.interrupted.forks import FORKS
from attacks.interrupted.killed_commands import KILLED_COMMANDS
from attacks.interrupted.stopped_runs import COPIED_WORKSPACES, STOPPED_RUNS
from attacks.kills import KILLS
from attacks.mutations import KINDS_OF_FILES, MUTATIONS
from attacks.surroundings import entry_points, ordinary_users, passwords, strange_paths
from attacks.together import TOGETHER
from attacks.user_objects import USER_OBJECTS
from attacks.verdicts import Family

FAMILIES: tuple[Family, ...] = (
    KILLS,
    *KILLED_COMMANDS,
    STOPPED_RUNS,
    COPIED_WORKSPACES,
    FORKS,
    TOGETHER,
    DISKS,
    MUTATIONS,
    USER_OBJECTS,
    HOSTILE_FILES,
    HOSTILE_TORCH,
    *(
        module.FAMILY
        for module in (
            yaml_bombs,
            zip_members,
            hdf5_links,
            safetensors_files,
            sqlite_files,
            strange_paths,
            entry_points,
            passwords,
            ordinary_users,
        )
    ),
)
#: Parts of families, which are attacked alone where they are named.
PARTS: tuple[Family, ...] = KINDS_OF_FILES
