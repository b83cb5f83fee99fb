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

from neural_mp.util.environment import override_variables

#: TensorFlow's log level: 3 logs only fatal errors.
_LEVEL = "TF_CPP_MIN_LOG_LEVEL"
_FATAL_ONLY = "3"
#: Output of its libraries on loading, before they read the log level (as of 2.21): that the log is
#: not ready yet, and lines that begin `I0000 00:00:1795426275.535542   25132 `.
_BANNER = re.compile(
    rb"^(?:WARNING: All log messages before absl::InitializeLog\(\)|[IWE]\d{4} [\d:.]+ +\d+ )"
    rb"[^\n]*\n",
    re.MULTILINE,
)
#: Second line of a two-line banner.
_REST = re.compile(rb"^To enable the following instructions: [^\n]*\n", re.MULTILINE)
_STANDARD_ERROR = 2


def suppress_startup_logs() -> None:
    """Keep the log of a later TensorFlow import off standard error.

    No effect if TensorFlow is imported already, or if the user has set its log level.
    """
    if _LEVEL in os.environ or "tensorflow" in sys.modules:
        return
    override_variables(_LEVEL, {_LEVEL: _FATAL_ONLY})
    sys.meta_path.insert(0, _Finder())


class _Finder(importlib.abc.MetaPathFinder):
    """Finder that loads TensorFlow without startup logs."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        """Return the spec of TensorFlow; None for any other module."""
        if fullname != "tensorflow":
            return None
        spec = importlib.machinery.PathFinder.find_spec(fullname, path, target)
        if spec is not None and spec.loader is not None:
            self._wrap(spec.loader)
        return spec

    def _wrap(self, loader: Any) -> None:
        run = loader.exec_module

        def exec_module(module: ModuleType) -> None:
            # Not earlier: looking for the package without importing also calls the finder.
            with suppress(ValueError):
                sys.meta_path.remove(self)
            del loader.exec_module
            with _without_banners():
                run(module)

        loader.exec_module = exec_module


@contextmanager
def _without_banners() -> Iterator[None]:
    """Remove the banners from standard error within the context."""
    try:
        kept = os.dup(_STANDARD_ERROR)
    except OSError:  # there is none
        yield
        return
    reading, writing = os.pipe()
    os.dup2(writing, _STANDARD_ERROR)
    os.close(writing)
    passing = threading.Thread(target=_pass, args=(reading, os.dup(kept)), daemon=True)
    passing.start()
    try:
        yield
    finally:
        os.dup2(kept, _STANDARD_ERROR)  # ends the pipe
        passing.join(timeout=5)
        os.close(kept)


def _pass(reading: int, writing: int) -> None:
    # Each log line is written in a single call, so lines arrive complete.
    while part := os.read(reading, 1 << 16):
        os.write(writing, _REST.sub(b"", _BANNER.sub(b"", part)))
    os.close(reading)
    os.close(writing)
