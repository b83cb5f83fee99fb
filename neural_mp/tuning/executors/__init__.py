"""What evaluates plans outside of this process, and its registry; third parties by entry point."""

from __future__ import annotations

from importlib import metadata
from typing import Any

from neural_mp.errors import ConfigurationError, did_you_mean
from neural_mp.tuning.executors.contract import Executor, Finding, Raised, Task, Work, Worker, taken

#: Where third parties announce executors of their own.
ENTRY_POINT_GROUP = "neural_mp.executors"


def executor_classes() -> dict[str, type[Executor]]:
    """Name → executor; what an executor is built on need not be installed."""
    # Not at the top: most runs have no workers.
    from neural_mp.tuning.executors.local import LocalExecutor
    from neural_mp.tuning.executors.ray_cluster import RayExecutor

    own: tuple[type[Executor], ...] = (LocalExecutor, RayExecutor)
    found = {executor.name: executor for executor in own}
    for entry in metadata.entry_points(group=ENTRY_POINT_GROUP):
        if entry.name not in found:
            found[entry.name] = entry.load()
    return found


def executor_named(name: Any) -> type[Executor]:
    """An executor by its name.

    Raises:
        ConfigurationError: there is none of that name.
    """
    known = executor_classes()
    if not isinstance(name, str) or name not in known:
        raise ConfigurationError(
            f"there is no engine {name!r} for workers{did_you_mean(name, known)}"
        )
    return known[name]


__all__ = [
    "Executor",
    "Finding",
    "Raised",
    "Task",
    "Work",
    "Worker",
    "executor_classes",
    "executor_named",
    "taken",
]
