"""The details of a saved model: a JSON file beside the framework's own, in the same folder."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeVar

from neural_mp.core.kinds import Kind
from neural_mp.core.reading import read_json
from neural_mp.errors import ModelLoadError

T = TypeVar("T")


def write_details(file: Path, details: Mapping[str, Any]) -> None:
    """Write plain dicts, lists, texts and numbers."""
    file.write_text(json.dumps(details, indent=1), encoding="utf-8")


def read_details(file: Path, kind: Kind[T]) -> T:
    """The details.

    Args:
        file: theirs.
        kind: what the adaptor expects in it.

    Raises:
        ModelLoadError: there is no such file, or it holds something else.
    """
    return read_json(file, kind, ModelLoadError)
