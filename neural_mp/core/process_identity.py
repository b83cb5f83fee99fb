"""Which process somebody was, and whether it is still there."""

from __future__ import annotations

import os
import platform
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

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
        place: within which numbers of processes mean the same: one boot of a machine, and there one
            container.
        pid: its number.
        began: when it began, in seconds since 1970; numbers are given out again.
    """

    host: str
    place: str
    pid: int
    began: float

    @classmethod
    def here(cls) -> ProcessIdentity:
        """This process."""
        import psutil

        return cls(platform.node(), _place(), os.getpid(), psutil.Process().create_time())

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> ProcessIdentity:
        """The process that `to_dict` wrote down.

        Raises:
            KeyError, TypeError, ValueError: these are no such values.
        """
        pid, began = int(values["pid"]), float(values["began"])
        return cls(str(values["host"]), str(values["place"]), pid, began)

    def to_dict(self) -> dict[str, Any]:
        """All that tells the process, as JSON takes it."""
        return asdict(self)

    @property
    def is_this_one(self) -> bool:
        """Whether it is the process that asks."""
        return self.pid == os.getpid() and self.lives is True

    @property
    def lives(self) -> bool | None:
        """Whether it is still there; None where that cannot be seen from here."""
        import psutil

        if self.place != _place():
            return None
        try:
            found = psutil.Process(self.pid)
            if found.status() == psutil.STATUS_ZOMBIE:
                return False
            return bool(abs(found.create_time() - self.began) <= _SPREAD)
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
