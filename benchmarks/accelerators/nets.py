"""The nets by name."""

from __future__ import annotations

from dataclasses import replace
from functools import cache

from benchmarks.accelerators.shipped import SHIPPED
from benchmarks.accelerators.trained import RECIPES, trained_case
from benchmarks.real.case import Case

NAMES = (*SHIPPED, *RECIPES)


def case_named(name: str, seed: int) -> Case:
    """Return a net with its data and metric; `seed` is that of trained nets."""
    case = SHIPPED[name] if name in SHIPPED else trained_case(name, seed)
    return replace(case, batches=cache(case.batches))
