"""Python subprocesses that never import modules from the working directory, and forks.

With `-m` or `-c`, Python searches the working directory first, so an untrusted file there, such as
`json.py`, would be executed.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import platform
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from weakref import WeakSet

from neural_mp.errors import ConfigurationError, ForkError
from neural_mp.util.json_fields import JsonFields

_START = (
    "import sys; sys.path[:] = [place for place in sys.path if place]; import runpy; "
    "runpy.run_module(sys.argv.pop(1), run_name='__main__', alter_sys=True)"
)
#: Equivalent for workers, whose command line is fixed; requires Python 3.11.
_SAFE_PATH = "PYTHONSAFEPATH"
_SAFE_PATH_WORKS = hasattr(sys.flags, "safe_path")
#: Variable that passes the user's value to workers.
_USERS_VALUE = "NEURAL_MP_PYTHONSAFEPATH"


def make_python_command(module: str, *arguments: str) -> list[str]:
    """Return the command that runs a module of this package like `python -m`."""
    return [sys.executable, "-c", _START, module, *arguments]


def make_worker_environment(variables: Mapping[str, str]) -> dict[str, str]:
    """Return the variables for loky workers, which then call `restore_environment`.

    Raises:
        ConfigurationError: on Python 3.10, if a file in the working directory would shadow a module
            of Python's.
    """
    if not _SAFE_PATH_WORKS:
        _check_working_directory()
    _start_resource_trackers()
    return {**variables, _USERS_VALUE: os.environ.get(_SAFE_PATH, ""), _SAFE_PATH: "1"}


def restore_environment() -> None:
    """Restore the user's value in a worker, for processes started by the user's code."""
    if _USERS_VALUE in os.environ:
        previous = os.environ.pop(_USERS_VALUE)
        if previous:
            os.environ[_SAFE_PATH] = previous
        else:
            os.environ.pop(_SAFE_PATH, None)


def _check_working_directory() -> None:
    conflicts = sorted(
        path.name
        for path in Path.cwd().iterdir()
        if path.name.partition(".")[0] in {*sys.stdlib_module_names, "loky", "cloudpickle"}
        and (path.suffix in (".py", ".pyc", ".so") or (path / "__init__.py").exists())
    )
    if conflicts:
        raise ConfigurationError(
            f"on Python 3.10, the working directory of workers must not contain modules that "
            f"shadow Python's, got {conflicts[0]!r}; rename the file, or set workers to 1"
        )


def _start_resource_trackers() -> None:
    """Start the clean-up processes of workers, which start only once; Windows needs none."""
    if os.name != "posix":
        return
    from multiprocessing import resource_tracker

    from loky.backend import resource_tracker as loky_tracker

    previous = os.environ.get(_SAFE_PATH)
    os.environ[_SAFE_PATH] = "1"
    try:
        loky_tracker.ensure_running()
        resource_tracker.ensure_running()
    finally:
        if previous is None:
            del os.environ[_SAFE_PATH]
        else:
            os.environ[_SAFE_PATH] = previous


_BOOT = Path("/proc/sys/kernel/random/boot_id")
_PID_NAMESPACE = Path("/proc/self/ns/pid")
#: Tolerance in seconds of a process's start time: the system clock may be adjusted.
_START_TOLERANCE_SECONDS = 2.0


@dataclass(frozen=True)
class ProcessIdentity(JsonFields):
    """Unique identity of a process, past or present.

    Attributes:
        namespace: scope of process ids: one boot of a machine, and one container.
        pid: process id.
        started: start time in seconds since 1970; ids are reused.
    """

    namespace: str
    pid: int
    started: float

    @classmethod
    def of_this_process(cls) -> ProcessIdentity:
        """Return the current process."""
        import psutil

        return cls(_read_pid_namespace(), os.getpid(), psutil.Process().create_time())

    @property
    def is_this_one(self) -> bool:
        """Whether the process is the current one."""
        return self.pid == os.getpid() and self.is_alive is True

    @property
    def is_alive(self) -> bool | None:
        """Whether the process is running; None if not visible from here."""
        import psutil

        if self.namespace != _read_pid_namespace():
            return None
        try:
            process = psutil.Process(self.pid)
            if process.status() == psutil.STATUS_ZOMBIE:
                return False
            return bool(abs(process.create_time() - self.started) <= _START_TOLERANCE_SECONDS)
        except (psutil.NoSuchProcess, ValueError):  # ValueError: a negative id
            return False
        except psutil.Error:
            return None

    def __str__(self) -> str:
        local = self.namespace == _read_pid_namespace()
        return f"process {self.pid} {'on this machine' if local else 'elsewhere'}"


def _read_pid_namespace() -> str:
    """Return the namespace, without the name of the machine, since files contain the identity."""
    try:
        return f"{_BOOT.read_text().strip()} {_PID_NAMESPACE.readlink()}"
    except OSError:  # not Linux
        return hashlib.sha256(platform.node().encode()).hexdigest()


#: Runtime → process that used its threads first; a forked child inherits the entry.
_PROCESSES: dict[str, int] = {}


def check_process(runtime: str, remedy: str = "") -> None:
    """Note that this process uses the threads of a runtime.

    Args:
        runtime: the name for messages.
        remedy: what else helps, beside loading in the child and other ways to start children.

    Raises:
        ForkError: a parent of this process used them before the fork.
    """
    process = os.getpid()
    if _PROCESSES.setdefault(runtime, process) != process:
        raise ForkError(
            f"{runtime} must not be used in a child that was forked after {runtime} ran in its "
            f"parent, since calls may block for ever; use {runtime} in the child only, or start "
            f"the child by multiprocessing.get_context('spawn'){remedy}"
        )


def keep_in_forks(objects: WeakSet[Any]) -> None:
    """Never destroy the objects of a set in forked children.

    The destructor of a native thread pool waits for its threads, which a child does not have, so a
    child that drops a model of its parent, or collects the parent's garbage, would block for ever.
    """

    def keep_objects() -> None:
        for item in objects:
            ctypes.pythonapi.Py_IncRef(ctypes.py_object(item))

    if hasattr(os, "register_at_fork"):
        os.register_at_fork(after_in_child=keep_objects)
