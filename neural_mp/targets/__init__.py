"""Targets: profiles of NPUs and accelerators, and the widths that their ops compute in."""

from neural_mp.targets.profile import (
    FOLLOWING,
    TargetProfile,
    Widths,
    is_profile,
    load_profile,
    profile_names,
    words_of,
)

__all__ = [
    "FOLLOWING",
    "TargetProfile",
    "Widths",
    "is_profile",
    "load_profile",
    "profile_names",
    "words_of",
]
