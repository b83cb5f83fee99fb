"""Executors, which evaluate plans outside this process, and their registry."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from typing import Any

from neural_mp.errors import ConfigurationError, did_you_mean, error_path
from neural_mp.tuning.executors.contract import (
    LOCAL,
    Executor,
    Task,
    TaskResult,
    Worker,
    WorkerException,
    WorkerPayload,
    Workers,
    taken,
)
from neural_mp.util.plug_ins import load_plug_ins, require_importable
from neural_mp.util.validators import MOST, integer_between, optional, validate_option

#: Entry-point group of third-party executors.
ENTRY_POINT_GROUP = "neural_mp.executors"
#: Exceeds the cores of any machine; libraries hang if asked for more threads.
_MAX_THREADS = 4096
_OWN_KEYS = ("engine", "count", "threads")
#: Option for the part after the engine in e.g. `ray:10.0.0.1:6379`.
_ADDRESS = "address"


def list_executor_classes() -> dict[str, type[Executor]]:
    """Return name → executor class; its dependencies need not be installed."""
    # Imported on demand: most runs have no workers.
    from neural_mp.tuning.executors.local import LocalExecutor
    from neural_mp.tuning.executors.ray_cluster import RayExecutor

    kinds: tuple[type[Executor], ...] = (LocalExecutor, RayExecutor)
    own = {executor.name: executor for executor in kinds}
    return {**own, **load_plug_ins(ENTRY_POINT_GROUP, own, Executor)}


def get_executor_named(name: object) -> type[Executor]:
    """Return an executor class by its name.

    Raises:
        ConfigurationError: no executor has this name.
    """
    engines = list_executor_classes()
    if not isinstance(name, str) or name not in engines:
        what = f"there is no engine {name!r} for workers"
        require_importable(ENTRY_POINT_GROUP, name, Executor, ConfigurationError, what)
        raise ConfigurationError(f"{what}{did_you_mean(name, engines)}")
    return engines[name]


def read_workers(value: int | str | Mapping[str, Any]) -> Workers:
    """Parse the user's `workers` option.

    Args:
        value: a number of processes; a string `4`, `ray` or `ray:10.0.0.1:6379`, i.e. an engine
            with its address; or a mapping with `engine`, `count` and other keys.

    Raises:
        ConfigurationError: a key or the engine is unknown, or a number is not positive.
    """
    if isinstance(value, str):
        return _workers_of_word(value)
    if not isinstance(value, Mapping):
        return Workers(count=validate_option("workers", integer_between(1), value))
    engine = value.get("engine", LOCAL)
    with error_path("engine"):
        keys = (*_OWN_KEYS, *get_executor_named(engine).options)
    for key in value:
        if key not in keys:
            with error_path(key):
                raise ConfigurationError(
                    f"workers of engine {engine!r} have no key {key!r}{did_you_mean(key, keys)}"
                )
    count, threads = (
        validate_option(f"workers: {name}", optional(integer_between(1, most)), value.get(name))
        for name, most in (("count", MOST), ("threads", _MAX_THREADS))
    )
    options = {key: value[key] for key in value if key not in _OWN_KEYS}
    return Workers(engine, count, threads, options)


def _workers_of_word(text: str) -> Workers:
    with suppress(ValueError):
        return read_workers(int(text))
    engine, colon, address = text.partition(":")
    options = get_executor_named(engine).options
    if colon and _ADDRESS not in options:
        raise ConfigurationError(
            f"workers of engine {engine!r} must be given without an address, got {text!r}"
        )
    return Workers(engine, None, options={_ADDRESS: address} if colon else {})


__all__ = [
    "Executor",
    "Task",
    "TaskResult",
    "Worker",
    "WorkerException",
    "WorkerPayload",
    "get_executor_named",
    "list_executor_classes",
    "read_workers",
    "taken",
]
