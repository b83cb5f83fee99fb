"""Suppression of TensorFlow's startup logs, without importing TensorFlow."""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import os
import re
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from types import ModuleType
from typing import Any

from neural_mp.util.system.environment import override_variables

#: TensorFlow's log level: 3 logs only fatal errors.
_LEVEL = "TF_CPP_MIN_LOG_LEVEL"
_FATAL_ONLY = "3"
#: Log level → lines below that level that its libraries write on loading, before they read the
#: level (as of 2.21): lines that begin `I0000 00:00:1795426275.535542   25132 `, and that the log
#: is not ready yet.
_BANNERS = {
    level: re.compile(
        rb"^(?:WARNING: All log messages before absl::InitializeLog\(\)|[%b]\d{4} [\d:.]+ +\d+ )"
        rb"[^\n]*\n" % severities,
        re.MULTILINE,
    )
    for level, severities in (("1", b"I"), ("2", b"IW"), (_FATAL_ONLY, b"IWE"))
}
#: Second line of a two-line banner.
_REST = re.compile(rb"^To enable the following instructions: [^\n]*\n", re.MULTILINE)
_STANDARD_ERROR = 2


def suppress_startup_logs() -> None:
    """Keep the log of a later TensorFlow import off standard error.

    If the user has set the log level, only lines below that level. No effect if TensorFlow is
    imported already.
    """
    if "tensorflow" in sys.modules:
        return
    level = os.environ.get(_LEVEL)
    if level is None:
        override_variables(_LEVEL, {_LEVEL: _FATAL_ONLY})
        level = _FATAL_ONLY
    if level in _BANNERS:
        sys.meta_path.insert(0, _Finder(_BANNERS[level]))


class _Finder(importlib.abc.MetaPathFinder):
    """Finder that loads TensorFlow without the startup logs that match a pattern."""

    def __init__(self, banner: re.Pattern[bytes]) -> None:
        self._banner = banner

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        """Return the spec of TensorFlow; None for any other module."""
        if fullname != "tensorflow":
            return None
        spec = importlib.machinery.PathFinder.find_spec(fullname, path, target)
        if spec is not None and spec.loader is not None:
            self._wrap_loader(spec.loader)
        return spec

    def _wrap_loader(self, loader: Any) -> None:
        run = loader.exec_module

        def exec_module(module: ModuleType) -> None:
            # Not earlier: looking for the package without importing also calls the finder.
            with suppress(ValueError):
                sys.meta_path.remove(self)
            del loader.exec_module
            with _suppress_banners(self._banner):
                run(module)

        loader.exec_module = exec_module


@contextmanager
def _suppress_banners(banner: re.Pattern[bytes]) -> Iterator[None]:
    try:
        original = os.dup(_STANDARD_ERROR)
    except OSError:  # there is none
        yield
        return
    reading, writing = os.pipe()
    os.dup2(writing, _STANDARD_ERROR)
    os.close(writing)
    passing = threading.Thread(
        target=_forward_without_banners, args=(reading, os.dup(original), banner), daemon=True
    )
    passing.start()
    try:
        yield
    finally:
        os.dup2(original, _STANDARD_ERROR)  # ends the pipe
        passing.join(timeout=5)
        os.close(original)


def _forward_without_banners(reading: int, writing: int, banner: re.Pattern[bytes]) -> None:
    # Each log line is written in a single call, so lines arrive complete.
    while part := os.read(reading, 1 << 16):
        os.write(writing, _REST.sub(b"", banner.sub(b"", part)))
    os.close(reading)
    os.close(writing)
