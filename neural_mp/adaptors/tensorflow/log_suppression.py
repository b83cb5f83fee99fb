"""TensorFlow without what it logs of itself; imports nothing of it."""

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

from neural_mp.util.environment import set_own

#: The level of TensorFlow's own log: 3 leaves nothing but what ends the process.
_LEVEL = "TF_CPP_MIN_LOG_LEVEL"
_FATAL_ONLY = "3"
#: What its libraries write while they are loaded, before they have read that level (of 2.21):
#: that their log is not ready yet, and lines that begin `I0000 00:00:1795426275.535542   25132 `.
_BANNER = re.compile(
    rb"^(?:WARNING: All log messages before absl::InitializeLog\(\)|[IWE]\d{4} [\d:.]+ +\d+ )"
    rb"[^\n]*\n",
    re.MULTILINE,
)
#: The second line of one of them.
_REST = re.compile(rb"^To enable the following instructions: [^\n]*\n", re.MULTILINE)
_STANDARD_ERROR = 2


def suppress_startup_logs() -> None:
    """Keep TensorFlow's log off standard error, once it is imported, by whomever.

    Nothing is done where it is imported already, or where the user has set the level of its log.
    """
    if _LEVEL in os.environ or "tensorflow" in sys.modules:
        return
    set_own(_LEVEL, {_LEVEL: _FATAL_ONLY})
    sys.meta_path.insert(0, _Finder())


class _Finder(importlib.abc.MetaPathFinder):
    """Finds TensorFlow as others do, and has it loaded quietly."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        """The module's spec; None for any other module."""
        if fullname != "tensorflow":
            return None
        spec = importlib.machinery.PathFinder.find_spec(fullname, path, target)
        if spec is not None and spec.loader is not None:
            spec.loader = _Loader(spec.loader, self)
        return spec


class _Loader(importlib.abc.Loader):
    def __init__(self, usual: importlib.abc.Loader, finder: _Finder) -> None:
        self._usual, self._finder = usual, finder

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType | None:
        return self._usual.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        # Not before: whether a package is there is asked by looking for it, too.
        with suppress(ValueError):
            sys.meta_path.remove(self._finder)
        # Others ask the module for its loader, such as for files that lie beside it.
        module.__loader__ = self._usual
        if module.__spec__ is not None:
            module.__spec__.loader = self._usual
        with _without_banners():
            self._usual.exec_module(module)


@contextmanager
def _without_banners() -> Iterator[None]:
    """Leave the banners out of what is written to standard error meanwhile; all else passes."""
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
        os.dup2(kept, _STANDARD_ERROR)  # which ends the pipe
        passing.join(timeout=5)
        os.close(kept)


def _pass(reading: int, writing: int) -> None:
    # Each line of the log is written at once, so that none comes in two parts.
    while part := os.read(reading, 1 << 16):
        os.write(writing, _REST.sub(b"", _BANNER.sub(b"", part)))
    os.close(reading)
    os.close(writing)
