"""The log of scripts, with the format and levels of INC."""

from __future__ import annotations

import logging
import os
import sys


class _ScriptHandler(logging.StreamHandler):
    """Handler for standard error; silent if the program has configured logging."""

    def emit(self, record: logging.LogRecord) -> None:
        """Write a record unless a handler of the root logger does."""
        if not logging.getLogger().handlers:
            self.setStream(sys.stderr)  # programs may replace the stream at any time
            super().emit(record)


def _create_script_logger() -> logging.Logger:
    """Return the log of scripts, with INC's format and levels: `LOGLEVEL`, by default INFO."""
    inc_logger = logging.getLogger("neural_compressor")
    handler = _ScriptHandler()
    handler.setFormatter(
        logging.Formatter("%(asctime)s [%(levelname)s] %(message)s", "%Y-%m-%d %H:%M:%S")
    )
    inc_logger.addHandler(handler)
    level = logging.getLevelNamesMapping().get(os.environ.get("LOGLEVEL", "").upper())
    inc_logger.setLevel(logging.INFO if level is None else level)
    return inc_logger


logger = _create_script_logger()
