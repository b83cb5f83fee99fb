"""Files as bytes: written once, into a folder that is removed."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any


def written(name: str, write: Callable[[Path], Any]) -> bytes:
    """Return the bytes of the file that a function writes under a name."""
    with tempfile.TemporaryDirectory() as folder:
        write(Path(folder) / name)
        return (Path(folder) / name).read_bytes()
