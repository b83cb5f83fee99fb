"""Files that others see whole, or not at all."""

from __future__ import annotations

import uuid
from pathlib import Path


def write_whole(path: Path, content: bytes) -> None:
    """Write a file; who reads it meanwhile sees what was there before. Folders are made.

    Raises:
        OSError: it cannot be written; what was there before stays.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    scratch = path.with_name(f".{path.name}.{uuid.uuid4().hex}")
    try:
        scratch.write_bytes(content)
        scratch.replace(path)
    except BaseException:
        scratch.unlink(missing_ok=True)
        raise
