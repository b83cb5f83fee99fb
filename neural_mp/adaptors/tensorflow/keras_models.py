"""Keras models: read from their files, and traced to a function with named inputs and outputs."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import tensorflow as tf

from neural_mp.core.nested import leaves
from neural_mp.errors import CaptureError, ModelLoadError, in_one_line

logger = logging.getLogger(__name__)

#: Names of inputs, each with the key of a dict it stands under, where there is one.
InputNames = list[str | tuple[str, str]]


def is_keras(source: Any) -> bool:
    """Whether an object is a model or layer of Keras's, of whichever generation."""
    return any(
        kind.__module__.split(".")[0] in ("keras", "tf_keras")
        and kind.__name__ in ("Layer", "Model")
        for kind in type(source).__mro__
    )


def load(path: Path) -> Any:
    """Read a `.keras` or `.h5` file; code in it (Lambda layers) is never run.

    Raises:
        ModelLoadError: it is damaged, holds weights only, or needs classes it does not hold.
    """
    import keras

    if keras.config.backend() != "tensorflow":
        raise ModelLoadError(
            f"Keras runs on the {keras.config.backend()} backend here; set KERAS_BACKEND=tensorflow"
        )
    try:
        return keras.models.load_model(path, compile=False, safe_mode=True)
    except Exception as error:
        # The loader raises whatever its parsers and the layers' constructors raise.
        logger.debug("reading %s failed", path, exc_info=True)
        raise ModelLoadError(
            f"{str(path)!r} cannot be read as a Keras model: {in_one_line(error)}; give a model "
            f"with layers of your own as an object"
        ) from error


def traced(model: Any, example: Any) -> tuple[Any, InputNames]:
    """A concrete function of a model in inference, and the names of its inputs.

    The names are those `model.export` gives.

    Raises:
        CaptureError: what the model takes is not known, or it cannot be traced.
    """
    structure, specs, keys = _specs(model, example)

    @tf.function(input_signature=specs, autograph=False)
    def run(*values: Any) -> Any:
        return model(tf.nest.pack_sequence_as(structure, values), training=False)

    try:
        function = run.get_concrete_function()
    except Exception as error:
        logger.debug("tracing failed", exc_info=True)
        raise CaptureError(
            f"{type(model).__name__} cannot be traced to a graph: {in_one_line(error)}"
        ) from error
    return function, [
        spec.name if key is None or key == spec.name else (spec.name, key)
        for spec, key in zip(specs, keys, strict=True)
    ]


def _specs(model: Any, example: Any) -> tuple[Any, list[tf.TensorSpec], list[str | None]]:
    """The structure the model takes, what its leaves are, and the keys they stand under."""
    declared = getattr(model, "_inputs_struct", None)
    if declared is None:
        listed = getattr(model, "inputs", None)
        declared = listed[0] if listed and len(listed) == 1 else listed
    if declared is not None:
        flat = tf.nest.flatten(declared)
        specs = [tf.TensorSpec(t.shape, t.dtype, name=t.name) for t in flat]
        structure = tf.nest.map_structure(lambda _: None, declared)
        return structure, specs, _keys(declared, len(flat))
    if example is None:
        raise CaptureError(
            f"{type(model).__name__} does not say what it takes; give data, or set inputs to an "
            f"example array"
        )
    structure = list(example) if isinstance(example, tuple) else example
    flat = leaves(structure)
    keys = sorted(structure) if isinstance(structure, Mapping) else None
    names = keys or [f"input_{i}" for i in range(len(flat))]
    if keys:
        flat = [structure[key] for key in keys]
    specs = [open_spec(value, name) for value, name in zip(flat, names, strict=True)]
    if len(flat) == 1 and not keys:
        structure = flat[0]
    return tf.nest.map_structure(lambda _: None, structure), specs, _keys(structure, len(flat))


def _keys(structure: Any, count: int) -> list[str | None]:
    return sorted(structure) if isinstance(structure, Mapping) else [None] * count


def open_spec(value: Any, name: str | None = None) -> tf.TensorSpec:
    """What an example is, with its first axis open."""
    array = np.asarray(value)
    dtype = tf.float32 if array.dtype == np.float64 else tf.as_dtype(array.dtype)
    shape = [None, *array.shape[1:]] if array.ndim else []
    return tf.TensorSpec(shape, dtype, name=name)
