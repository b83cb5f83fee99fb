"""Every net of `keras.applications`, with random weights and small pictures."""

from __future__ import annotations

import inspect
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from zoo_cases.case import NotBuiltError, ZooCase

#: Sides of pictures, tried in this order.
_SIDES = (64, 96, 224)
SAMPLES, CLASSES = 2, 10
#: Pictures whose statistics batch norms keep.
STATISTICS_SAMPLES = 16


def names() -> list[str]:
    """Return the names of the functions that build a net."""
    from keras import applications

    return sorted(name for name, value in vars(applications).items() if inspect.isfunction(value))


def build(name: str, seed: int, batches: int, folder: Path | None = None) -> ZooCase:
    """Return a net with random weights.

    Raises:
        NotBuiltError: the net takes none of the sizes tried.
    """
    import keras

    keras.utils.set_random_seed(seed)
    reasons: list[str] = []
    for side in _SIDES:
        try:
            make: Any = getattr(keras.applications, name)
            net = make(weights=None, classes=CLASSES, input_shape=(side, side, 3))
        except ValueError as error:
            reasons.append(f"side {side}: {' '.join(str(error).split())[:160]}")
            continue
        numbers = np.random.default_rng(seed)
        shape = (SAMPLES, side, side, 3)
        pictures = [numbers.standard_normal(shape).astype(np.float32) for _ in range(batches)]
        statistics = numbers.standard_normal((STATISTICS_SAMPLES, *shape[1:]))
        _normalize(net, statistics.astype(np.float32))
        return ZooCase(net, pictures, partial(net, training=False), f"side {side}")
    raise NotBuiltError("; ".join(reasons))


def _normalize(net: Any, batch: np.ndarray) -> None:
    """Let batch norms keep the statistics of a batch: with those of no data, signals vanish."""
    from keras import layers

    norms = [layer for layer in net.layers if isinstance(layer, layers.BatchNormalization)]
    for norm in norms:
        norm.momentum = 0.0
    if norms:
        net(batch, training=True)
