"""Model folders of tasks, made once a session."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest


@pytest.fixture(scope="session")
def folder_of(tmp_path_factory) -> Callable[[str], Path]:
    """Name of a function of `task_folders` → the folder that it writes."""
    pytest.importorskip("transformers")
    import task_folders

    made: dict[str, Path] = {}

    def make(name: str) -> Path:
        if name not in made:
            made[name] = getattr(task_folders, name)(tmp_path_factory.mktemp(name) / "model")
        return made[name]

    return make
