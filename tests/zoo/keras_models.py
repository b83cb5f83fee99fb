"""Small Keras models around single layers, as cases of the zoo."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import keras
import numpy as np
from keras import layers
from zoo.harness import Built, Case, flat

SAMPLES = 4
SEQUENCE = (6, 8)
IMAGE = (8, 8, 4)
VOLUME = (6, 6, 6, 4)

Maker = Callable[[], Any]


def normal(*shape: int) -> np.ndarray:
    """Return the numbers of a batch."""
    return np.random.default_rng(0).normal(size=(SAMPLES, *shape)).astype("f4")


def built(model: Any, *batches: Any, **options: Any) -> Built:
    """Return a model with batches and what Keras itself computes for them."""
    outputs = [
        flat(keras.tree.map_structure(np.asarray, model(batch, training=False)))
        for batch in batches
    ]
    return Built(model, batches, outputs, options or None)


def around(layer: Maker, shape: Sequence[int]) -> Built:
    """Return a net of a weighted layer, a layer, and a dense layer."""
    inputs = keras.Input(shape)
    if len(shape) == len(IMAGE):
        first = layers.Conv2D(shape[-1], 3, padding="same")
    else:
        first = layers.Dense(shape[-1])
    return built(keras.Model(inputs, _ended(layer()(first(inputs)))), normal(*shape))


def _ended(outputs: Any) -> Any:
    """Put a dense layer behind each output."""
    return keras.tree.map_structure(lambda out: layers.Dense(4)(layers.Flatten()(out)), outputs)


def merging(layer: Maker, shape: Sequence[int], count: int = 2) -> Built:
    """Return a net in which a layer merges the results of dense layers."""
    inputs = keras.Input(shape)
    branches = [layers.Dense(shape[-1])(inputs) for _ in range(count)]
    return built(keras.Model(inputs, _ended(layer()(branches))), normal(*shape))


def alone(layer: Maker, *batches: Any) -> Built:
    """Return a net of one layer, for inputs such as some batches."""
    inputs = keras.tree.map_structure(
        lambda array: keras.Input(
            array.shape[1:], dtype="string" if array.dtype == object else str(array.dtype)
        ),
        batches[0],
    )
    return built(keras.Model(inputs, layer()(inputs)), *batches)


def made(name: str, build: Callable[..., Built], *arguments: Any, **options: Any) -> Case:
    """Return the case of the model that a function builds, with the same weights on every run.

    Args:
        name: name of the case.
        build: function of `arguments`.
        arguments: what is given to `build`.
        options: further arguments of `Case`.
    """

    def seeded() -> Built:
        keras.utils.set_random_seed(0)
        return build(*arguments)

    return Case(name, seeded, **options)


def case(
    name: str,
    build: Callable[..., Built],
    *arguments: Any,
    options: Mapping[str, Any] = MappingProxyType({}),
    **settings: Any,
) -> Case:
    """Return the case of the layer class that a name starts with.

    Args:
        name: name of the case.
        build: `around`, `merging` or `alone`.
        arguments: further arguments of `build`.
        options: further arguments of `Case`.
        settings: arguments of the class.
    """
    return made(
        name, build, lambda: getattr(layers, name.split()[0])(**settings), *arguments, **options
    )
