"""JSON, and what is packed, in files of data, which may be large.

Files of our own are read by `core.reading`, which bounds them more closely.
"""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any


def read_json(path: Path) -> Any:
    """What a file in UTF-8 holds.

    Raises:
        OSError: it cannot be read.
        ValueError: it is no JSON, or nested without end.
    """
    return json_of(path.read_text(encoding="utf-8"))


def json_of(text: str | bytes) -> Any:
    """What a text holds.

    Raises:
        ValueError: it is no JSON, or nested without end.
    """
    try:
        return json.loads(text)
    except RecursionError as error:
        raise ValueError("it is nested too deeply") from error


def read_packed(path: Path, most: int) -> bytes:
    """What a file of gzip holds.

    Args:
        path: the file.
        most: bytes that it may hold.

    Raises:
        OSError, EOFError, zlib.error: it cannot be read, or is no such file.
        ValueError: it holds more.
    """
    with gzip.open(path) as file:
        found = file.read(most + 1)
    if len(found) > most:
        raise ValueError(f"it holds more than {most} bytes")
    return found
