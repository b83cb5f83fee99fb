"""Where plans are tried side by side, as the user set it."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from neural_mp.errors import ConfigurationError, did_you_mean, inside

#: The engine of processes on this machine.
LOCAL = "local"
#: The engine of nodes of a Ray cluster.
RAY = "ray"
#: How often work is begun again whose machine was lost.
RUNS_AGAIN = 3
#: No machine has so many cores; libraries that are told to use more threads never come back.
_MOST_THREADS = 4096
_OWN_KEYS = ("engine", "count", "threads")
#: The option that follows the name of an engine in a word such as `ray:10.0.0.1:6379`.
_ADDRESS = "address"


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

    @classmethod
    def read(cls, value: int | str | Mapping[str, Any]) -> Workers:
        """The setting that a user's value stands for.

        Args:
            value: a number of processes; a word, `4`, `ray` or `ray:10.0.0.1:6379`, which is an
                engine with the address that it takes; or a mapping with `engine`, `count` and
                others.

        Raises:
            ConfigurationError: a key or the engine is unknown, or a number is not from 1.
        """
        if isinstance(value, str):
            return cls._of_word(value)
        if not isinstance(value, Mapping):
            return cls(count=_whole("workers", value))
        from neural_mp.tuning.executors import executor_named

        engine = value.get("engine", LOCAL)
        with inside("engine"):
            known = (*_OWN_KEYS, *executor_named(engine).options)
        for key in value:
            if key not in known:
                with inside(key):
                    raise ConfigurationError(
                        f"workers of engine {engine!r} have no key {key!r}"
                        f"{did_you_mean(key, known)}"
                    )
        numbers = {
            name: None if value.get(name) is None else _whole(f"workers: {name}", value[name])
            for name in ("count", "threads")
        }
        if (numbers["threads"] or 0) > _MOST_THREADS:
            raise ConfigurationError(
                f"workers: threads must be at most {_MOST_THREADS}, got {numbers['threads']}"
            )
        options = {key: value[key] for key in value if key not in _OWN_KEYS}
        return cls(engine, numbers["count"], numbers["threads"], options)

    @classmethod
    def _of_word(cls, word: str) -> Workers:
        from neural_mp.tuning.executors import executor_named

        with suppress(ValueError):
            return cls(count=_whole("workers", int(word)))
        engine, colon, address = word.partition(":")
        known = executor_named(engine).options
        if colon and _ADDRESS not in known:
            raise ConfigurationError(f"workers of engine {engine!r} have no address, got {word!r}")
        return cls(engine, None, options={_ADDRESS: address} if colon else {})

    def __str__(self) -> str:
        if self.engine == LOCAL and self.count is not None:
            return f"workers = {self.count}"
        return f"the engine {self.engine!r} of workers"

    @property
    def several(self) -> bool:
        """Whether plans are evaluated anywhere else than in this process."""
        return self.engine != LOCAL or self.count != 1


def _whole(option: str, value: Any) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ConfigurationError(f"{option} must be at least 1, got {value!r}")
    return value
