"""The folder that a user wants a log in."""

from __future__ import annotations

import tempfile
from pathlib import Path

from neural_mp.errors import ConfigurationError


def prepared_folder(log_path: str | None) -> Path | None:
    """The folder to log to, made and found to be writable before anything is computed.

    Raises:
        ConfigurationError: it cannot be written to.
    """
    if log_path is None:
        return None
    try:
        folder = Path(log_path).expanduser()
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            return folder
    except (OSError, ValueError, RuntimeError) as error:
        raise ConfigurationError(f"log_path {log_path!r} cannot be written to: {error}") from error
