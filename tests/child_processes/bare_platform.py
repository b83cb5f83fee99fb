"""Python without the parts that only Linux has, as code of this project sees it.

Hidden from modules of `neural_mp`: POSIX modules, functions that Windows lacks, files below
`/proc` and `/sys`, and the symbols of the process itself. Libraries, which have branches of their
own for each system, still see Linux.
"""

import builtins
import ctypes
import os
import signal
import sys
import time
from contextlib import suppress

#: Variable that hides them in all processes of a test session.
VARIABLE = "NEURAL_MP_BARE_PLATFORM"
MODULES = frozenset({"fcntl", "grp", "pty", "pwd", "resource", "termios"})
FUNCTIONS = (
    (os, ("killpg", "pread", "sched_getaffinity", "sched_setaffinity")),
    (signal, ("SIGALRM", "SIGPIPE", "setitimer")),
    (time, ("pthread_getcpuclockid",)),
)
_FOLDERS = ("/proc/", "/sys/")
#: Modules of Python that open files for their callers.
_OPENING = frozenset({"pathlib", "io", "codecs", "os"})


def hide() -> None:
    """Hide all of them, until the process ends."""
    builtins.__import__ = _hiding_modules(builtins.__import__)
    ctypes.CDLL = _hiding_symbols(ctypes.CDLL)
    sys.addaudithook(_hide_files)
    for module, names in FUNCTIONS:
        for name in names:
            with suppress(AttributeError):
                delattr(module, name)


def _is_ours(frame) -> bool:
    """Whether the first frame that is not of Python's own file functions is of this project."""
    while frame is not None and frame.f_globals.get("__name__") in _OPENING:
        frame = frame.f_back
    return frame is not None and frame.f_globals.get("__name__", "").startswith("neural_mp")


def _hiding_modules(original):
    def import_module(name, globals=None, *arguments, **options):
        if name in MODULES and _is_ours(sys._getframe(1)):
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)
        return original(name, globals, *arguments, **options)

    return import_module


def _hiding_symbols(original):
    class Library(original):
        def __init__(self, name=None, *arguments, **options):
            if name is None and _is_ours(sys._getframe(1)):
                raise TypeError("LoadLibrary() argument 1 must be str, not None")
            super().__init__(name, *arguments, **options)

    return Library


def _hide_files(event, arguments) -> None:
    if event != "open" or not str(arguments[0]).startswith(_FOLDERS):
        return
    if _is_ours(sys._getframe(1)):
        raise FileNotFoundError(2, "No such file or directory", str(arguments[0]))
