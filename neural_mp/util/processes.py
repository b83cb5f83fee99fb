"""Processes that run Python for us, and that find no module in the working directory first.

Python looks there before everywhere else in a process that is started by `-m` or `-c`, so that a
file `json.py` of whoever made the folder would be run.
"""

from __future__ import annotations

import os
import platform
import sys
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from neural_mp.errors import ConfigurationError

_START = (
    "import sys; sys.path[:] = [place for place in sys.path if place]; import runpy; "
    "runpy.run_module(sys.argv.pop(1), run_name='__main__', alter_sys=True)"
)
#: Does the same for workers, whose command is not ours; Python 3.10 does not know it.
_SAFE_PATH = "PYTHONSAFEPATH"
_SAFE_PATH_WORKS = hasattr(sys.flags, "safe_path")
#: What was set by the user is handed to workers under this name.
_USERS = "NEURAL_MP_PYTHONSAFEPATH"


def python_command(module: str, *arguments: str) -> list[str]:
    """The command that runs one of our modules as a program, as `python -m` would."""
    return [sys.executable, "-c", _START, module, *arguments]


def worker_environment(variables: Mapping[str, str]) -> dict[str, str]:
    """The variables for workers of loky, which are begun by `restore_environment`.

    Args:
        variables: what else they are given.

    Raises:
        ConfigurationError: this is Python 3.10, and a file in the working directory would be taken
            for a module of Python's own.
    """
    if not _SAFE_PATH_WORKS:
        _check_working_directory()
    _start_trackers()
    return {**variables, _USERS: os.environ.get(_SAFE_PATH, ""), _SAFE_PATH: "1"}


def restore_environment() -> None:
    """In a worker: let processes that the user's code starts find modules as ever."""
    if _USERS in os.environ:
        before = os.environ.pop(_USERS)
        if before:
            os.environ[_SAFE_PATH] = before
        else:
            os.environ.pop(_SAFE_PATH, None)


def _check_working_directory() -> None:
    found = sorted(
        path.name
        for path in Path.cwd().iterdir()
        if path.name.partition(".")[0] in {*sys.stdlib_module_names, "loky", "cloudpickle"}
        and (path.suffix in (".py", ".pyc", ".so") or (path / "__init__.py").exists())
    )
    if found:
        raise ConfigurationError(
            f"workers of Python 3.10 would run {found[0]!r} in the working directory in place of "
            f"the module of that name; rename it, or set workers to 1"
        )


def _start_trackers() -> None:
    """Start the processes that clean up after workers, which are started but once."""
    from multiprocessing import resource_tracker

    from loky.backend import resource_tracker as loky_tracker

    before = os.environ.get(_SAFE_PATH)
    os.environ[_SAFE_PATH] = "1"
    try:
        loky_tracker.ensure_running()
        resource_tracker.ensure_running()
    finally:
        if before is None:
            del os.environ[_SAFE_PATH]
        else:
            os.environ[_SAFE_PATH] = before


_BOOT = Path("/proc/sys/kernel/random/boot_id")
_NUMBERING = Path("/proc/self/ns/pid")
#: Seconds by which the time at which a process began may differ when it is told again: the clock
#: of the machine is set now and then.
_SPREAD = 2.0


@dataclass(frozen=True)
class ProcessIdentity:
    """A process among all that there ever were.

    Attributes:
        host: the machine, as people call it.
        namespace: the scope of process numbers: one boot of a machine, and one container.
        pid: its number.
        started: when it began, in seconds since 1970; numbers are given out again.
    """

    host: str
    namespace: str
    pid: int
    started: float

    @classmethod
    def current(cls) -> ProcessIdentity:
        """This process."""
        import psutil

        return cls(platform.node(), _place(), os.getpid(), psutil.Process().create_time())

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> ProcessIdentity:
        """The process that `to_dict` wrote down.

        Raises:
            KeyError, TypeError, ValueError: these are no such values.
        """
        pid, started = int(values["pid"]), float(values["started"])
        return cls(str(values["host"]), str(values["namespace"]), pid, started)

    def to_dict(self) -> dict[str, Any]:
        """All that tells the process, as JSON takes it."""
        return asdict(self)

    @property
    def is_this_one(self) -> bool:
        """Whether it is the process that asks."""
        return self.pid == os.getpid() and self.is_alive is True

    @property
    def is_alive(self) -> bool | None:
        """Whether it is still there; None where that cannot be seen from here."""
        import psutil

        if self.namespace != _place():
            return None
        try:
            found = psutil.Process(self.pid)
            if found.status() == psutil.STATUS_ZOMBIE:
                return False
            return bool(abs(found.create_time() - self.started) <= _SPREAD)
        except (psutil.NoSuchProcess, ValueError):  # the latter of a number below 0
            return False
        except psutil.Error:
            return None

    def __str__(self) -> str:
        return f"process {self.pid} on {self.host}"


def _place() -> str:
    try:
        return f"{_BOOT.read_text().strip()} {_NUMBERING.readlink()}"
    except OSError:  # another system than Linux
        return platform.node()
