"""Whose words a tuning file is written in: ours, or those of Intel Neural Compressor."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from neural_mp.config.inc import (
    IGNORED_APPROACHES,
    INT8_APPROACHES,
    ONLY_THEIR_NAMES,
    ONLY_THEIRS,
    why_ignored,
)
from neural_mp.config.source import KeyPath
from neural_mp.core.enums import Dialect
from neural_mp.data.registry import plain_name

_LOADERS: tuple[KeyPath, ...] = (
    ("quantization", "calibration", "dataloader"),
    ("evaluation", "accuracy", "dataloader"),
    ("evaluation", "performance", "dataloader"),
)
_METRICS: tuple[KeyPath, ...] = (
    ("evaluation", "accuracy", "metric"),
    ("evaluation", "accuracy", "multi_metrics"),
)
#: Where a file names datasets, transforms and metrics.
_NAMES: tuple[KeyPath, ...] = (
    *((*path, key) for path in _LOADERS for key in ("dataset", "transform")),
    ("evaluation", "accuracy", "postprocess", "transform"),
    *_METRICS,
)


def dialect_of(data: Mapping[str, Any]) -> Dialect:
    """Whose words a file is written in.

    It is theirs where it has a `version`, as their templates do, or anything else that only they
    have: a framework, a way of INT8, a key, a dataset, a transform or a metric.

    Args:
        data: the content of the file, as it was read.
    """
    theirs = (
        "version" in data
        or _word(data, ("model", "framework")).lower() in ONLY_THEIRS
        or _word(data, ("quantization", "approach")) in {*INT8_APPROACHES, *IGNORED_APPROACHES}
        or any(why_ignored(path) for path in _paths(data))
        or any(name in ONLY_THEIR_NAMES for path in _NAMES for name in _names(data, path))
    )
    return Dialect.INC if theirs else Dialect.OWN


def _at(data: Any, path: KeyPath) -> Any:
    for key in path:
        data = data.get(key) if isinstance(data, Mapping) else None
    return data


def _word(data: Mapping[str, Any], path: KeyPath) -> str:
    value = _at(data, path)
    return value if isinstance(value, str) else ""


def _names(data: Mapping[str, Any], path: KeyPath) -> Iterator[str]:
    """The names at a key, as registries compare them."""
    value = _at(data, path)
    names = value if isinstance(value, Mapping) else [value]
    yield from (plain_name(str(name)) for name in names)


def _paths(data: Any, path: KeyPath = ()) -> Iterator[KeyPath]:
    """The paths of all keys, those of a section before those in it."""
    if isinstance(data, Mapping):
        for key, value in data.items():
            yield (*path, key)
            yield from _paths(value, (*path, key))
