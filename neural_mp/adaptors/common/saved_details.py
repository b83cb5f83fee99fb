"""The details of a saved model: a JSON file beside the framework's own, in the same folder."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from neural_mp.errors import ModelLoadError


def write_details(file: Path, details: Mapping[str, Any]) -> None:
    """Write plain dicts, lists, texts and numbers."""
    file.write_text(json.dumps(details, indent=1), encoding="utf-8")


@contextmanager
def read_details(file: Path) -> Iterator[dict[str, Any]]:
    """The details, for a `with` block that takes them apart.

    Raises:
        ModelLoadError: there is no such file, or the block does not find in it what it looks for.
    """
    try:
        yield json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise ModelLoadError(f"{str(file)!r} is damaged: {error}") from error
