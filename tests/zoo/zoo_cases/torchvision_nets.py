"""Nets of torchvision."""

from __future__ import annotations

from pathlib import Path

from zoo_cases.case import ZooCase
from zoo_cases.vision_families import build_torchvision, torchvision_names

names = torchvision_names


def build_warm_up() -> ZooCase:
    """Return a small net."""
    return build("mobilenet_v2", 0, 1)


def build(name: str, seed: int, batches: int, folder: Path | None = None) -> ZooCase:
    """Return a net with random weights."""
    return build_torchvision(name, seed, batches)
