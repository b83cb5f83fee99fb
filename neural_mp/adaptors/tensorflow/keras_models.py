"""Keras models: read from their files, and traced to a function with named inputs and outputs."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import tensorflow as tf

from neural_mp.adaptors.tensorflow.keras_files import check_keras_file
from neural_mp.adaptors.tensorflow.keras_weights import bounded_weights
from neural_mp.core.labels import without_labels
from neural_mp.errors import CaptureError, ModelLoadError, in_one_line

logger = logging.getLogger(__name__)

#: Names of inputs, each with another name it goes by: the key of a dict it stands under.
InputNames = list[tuple[str, str | None]]


def is_keras(source: Any) -> bool:
    """Whether an object is a model or layer of Keras's, of whichever generation."""
    return any(
        kind.__module__.split(".")[0] in ("keras", "tf_keras")
        and kind.__name__ in ("Layer", "Model")
        for kind in type(source).__mro__
    )


def load(path: Path, *, compiled: bool = False) -> Any:
    """Read a `.keras` or `.h5` file; code in it (Lambda layers) is never run.

    Args:
        path: the file.
        compiled: whether loss and optimizer are read, too, where it holds them.

    Raises:
        ModelLoadError: it is damaged, holds weights only, needs classes it does not hold, names
            what is no part of a model, or declares weights that are not in it.
    """
    import keras

    if keras.config.backend() != "tensorflow":
        raise ModelLoadError(
            f"Keras runs on the {keras.config.backend()} backend here; set KERAS_BACKEND=tensorflow"
        )
    nbytes = check_keras_file(path)
    try:
        with warnings.catch_warnings(), bounded_weights(nbytes):
            # Of an optimizer whose state does not fit. Nobody goes on with it here.
            warnings.filterwarnings("ignore", "Skipping variable loading for optimizer")
            return keras.models.load_model(path, compile=compiled, safe_mode=True)
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
    structure = _taken(model, example)
    names = input_names(structure)
    specs = [
        tf.TensorSpec(spec.shape, spec.dtype, name=name)
        for spec, (name, _) in zip(tf.nest.flatten(structure), names, strict=True)
    ]

    @tf.function(input_signature=specs, autograph=False)
    def run(*values: Any) -> Any:
        return model(tf.nest.pack_sequence_as(structure, values), training=False)

    try:
        return run.get_concrete_function(), names
    except Exception as error:
        logger.debug("tracing failed", exc_info=True)
        raise CaptureError(
            f"{type(model).__name__} cannot be traced to a graph: {in_one_line(error)}"
        ) from error


def _taken(model: Any, example: Any) -> Any:
    """What a model takes: specifications of tensors, in the structure it takes them in."""
    declared = getattr(model, "_inputs_struct", None)
    if declared is None:
        listed = getattr(model, "inputs", None)
        declared = listed[0] if listed and len(listed) == 1 else listed
    if declared is not None:
        return tf.nest.map_structure(
            lambda t: tf.TensorSpec(t.shape, t.dtype, name=t.name), declared
        )
    if example is None:
        raise CaptureError(
            f"{type(model).__name__} does not say what it takes; give data, or set inputs to an "
            f"example array"
        )
    example = shown(example)
    found = tf.nest.map_structure(
        open_spec, list(example) if isinstance(example, tuple) else example
    )
    return found[0] if isinstance(found, list) and len(found) == 1 else found


def shown(example: Any) -> Any:
    """What a model that does not say what it takes is traced with: a batch without its labels."""
    return without_labels(example, ()) if isinstance(example, Mapping) else example


def input_names(structure: Any) -> InputNames:
    """The names of the tensors in a structure of specifications, in the order they are flattened.

    Those without a name of their own are called by their key, or else by their position.
    """
    names: InputNames = []

    def visit(value: Any, key: str | None) -> None:
        if isinstance(value, tf.TensorSpec):
            name = value.name or key or f"input_{len(names)}"
            names.append((name, None if key == name else key))
        elif isinstance(value, Mapping):
            for under in sorted(value):
                visit(value[under], str(under))
        elif isinstance(value, tuple | list):
            for item in value:
                visit(item, key)

    visit(structure, None)
    return names


def open_spec(value: Any) -> tf.TensorSpec:
    """What an example is, with its first axis open."""
    array = np.asarray(value)
    dtype = tf.float32 if array.dtype == np.float64 else tf.as_dtype(array.dtype)
    return tf.TensorSpec([None, *array.shape[1:]] if array.ndim else [], dtype)
