"""Packages that define architectures, each with the names and builders of its models."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

from zoo_cases.case import ZooCase

#: Source → module with `names`, `build` and `build_warm_up`.
SOURCES = {
    "transformers": "transformers_nets",
    "keras": "keras_nets",
    "onnx": "onnx_cases",
    "torchvision": "torchvision_nets",
    "timm": "timm_nets",
    "sklearn": "sklearn_pipelines",
}


def names_of(source: str) -> list[str]:
    """Return the names of the architectures of a source."""
    return list(_module(source).names())


def build_warm_up(source: str) -> ZooCase:
    """Build a common case, which imports what most cases of a source import."""
    case: ZooCase = _module(source).build_warm_up()
    return case


def build_case(source: str, name: str, seed: int, batches: int, folder: Path) -> ZooCase:
    """Build a small instance of an architecture.

    Raises:
        NotBuiltError: no small instance builds and runs.
    """
    case: ZooCase = _module(source).build(name, seed, batches, folder)
    return case


def _module(source: str) -> Any:
    return importlib.import_module(f"zoo_cases.{SOURCES[source]}")
