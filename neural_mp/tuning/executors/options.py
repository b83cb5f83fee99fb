"""Where plans are tried side by side, as the user set it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

#: The engine of processes on this machine.
LOCAL = "local"
#: The engine of nodes of a Ray cluster.
RAY = "ray"
#: How often work is begun again whose machine was lost.
RUNS_AGAIN = 3


@dataclass(frozen=True)
class Workers:
    """What the option `workers` says.

    Attributes:
        engine: the executor, by its name.
        count: plans tried at the same time; None for as many as the engine has room for.
        threads: threads that one of them may use; None leaves it to the engine.
        options: what the engine takes beside these.
    """

    engine: str = LOCAL
    count: int | None = 1
    threads: int | None = None
    options: Mapping[str, Any] = field(default_factory=dict)

    def __str__(self) -> str:
        if self.engine == LOCAL and self.count is not None:
            return f"workers = {self.count}"
        return f"the engine {self.engine!r} of workers"

    @property
    def several(self) -> bool:
        """Whether plans are evaluated anywhere else than in this process."""
        return self.engine != LOCAL or self.count != 1
