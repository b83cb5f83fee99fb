"""Options for parallel trials."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

#: Engine of processes on this machine.
LOCAL = "local"
#: Engine of nodes of a Ray cluster.
RAY = "ray"
#: Maximum number of restarts of work on lost machines.
RUNS_AGAIN = 3


@dataclass(frozen=True)
class Workers:
    """The value of the option `workers`.

    Attributes:
        engine: name of the executor.
        count: number of parallel plans; None for as many as fit.
        threads: threads per plan; None for the engine's default.
        options: further options of the engine.
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
        """Whether plans are evaluated outside this process."""
        return self.engine != LOCAL or self.count != 1
