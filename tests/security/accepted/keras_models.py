"""Keras models of every layer and option, saved as `.keras` and `.h5`."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import keras
import numpy as np
import tensorflow as tf
from accepted import keras_layers, keras_nets
from accepted.cases import Case, Cases, Result, example, outcomes

CASES = Cases()


def _added(
    name: str, build: Callable[[], Any], suffixes: Iterable[str] = (".keras", ".h5")
) -> None:
    for suffix in suffixes:

        def make(path: Path) -> None:
            keras.backend.clear_session()
            keras.utils.set_random_seed(0)
            build().save(path)

        CASES.add(f"{name}{suffix}", make)


for _name, _build in keras_layers.MODELS.items():
    _added(_name, _build)
for _name, _build in keras_nets.MODELS.items():
    _added(_name, _build)
for _name, _build in keras_nets.APPLICATIONS.items():
    _added(_name, _build, [".keras"])


def _expected(path: Path, feeds: Mapping[str, Any] | None) -> tuple[Any, list[Any]]:
    model = keras.models.load_model(path)
    # A Sequential model has a single input.
    inputs = getattr(model, "_inputs_struct", model.inputs[0])
    flat = keras.tree.flatten(inputs)
    arrays = [example(t.dtype, t.shape, seed) for seed, t in enumerate(flat)]
    batch = keras.tree.pack_sequence_as(inputs, arrays)
    tensors = keras.tree.map_structure(tf.convert_to_tensor, batch)
    outputs = keras.tree.flatten(model(tensors, training=False))
    return batch, [np.asarray(output) for output in outputs]


def _given(path: Path, feeds: Any) -> list[Any]:
    from neural_mp.adaptors.registry import adaptor_for

    adaptor = adaptor_for(str(path))
    outputs = adaptor.predict(adaptor.load(str(path)), feeds)
    return [np.asarray(output) for output in keras.tree.flatten(outputs)]


def results(cases: Iterable[Case], folder: Path) -> Iterator[Result]:
    """Yield the outcome of every case."""
    return outcomes(cases, folder, _expected, _given)
