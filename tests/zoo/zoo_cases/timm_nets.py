"""Families of timm."""

from __future__ import annotations

from pathlib import Path

from zoo_cases.case import ZooCase
from zoo_cases.vision_families import build_timm, timm_names

names = timm_names


def build_warm_up() -> ZooCase:
    """Return a small net."""
    return build("mobilenetv3_small_050", 0, 1)


def build(name: str, seed: int, batches: int, folder: Path | None = None) -> ZooCase:
    """Return a net with random weights."""
    return build_timm(name, seed, batches)
