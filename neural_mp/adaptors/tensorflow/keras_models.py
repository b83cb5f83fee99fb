"""Keras models: read from their files, and traced to a function with named inputs and outputs."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Mapping
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import tensorflow as tf

from neural_mp.adaptors.tensorflow.keras_files import check_keras_file
from neural_mp.adaptors.tensorflow.keras_weights import bounded_weights
from neural_mp.errors import (
    CaptureError,
    ConfigurationError,
    ModelLoadError,
    did_you_mean,
    in_one_line,
)
from neural_mp.util.labels import without_labels
from neural_mp.util.open_axes import Shape, Shapes

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


def traced(model: Any, example: Any, shapes: Shapes | None = None) -> tuple[Any, InputNames]:
    """A concrete function of a model in inference, and the names of its inputs.

    The names are those `model.export` gives.

    Args:
        model: the model.
        example: the inputs of a batch, for models that do not say what they take.
        shapes: shapes that the inputs are to have; None for those of the model or the example.

    Raises:
        CaptureError: what the model takes is not known, or it cannot be traced.
        ConfigurationError: the shapes are not those of its inputs.
    """
    structure = _taken(model, example)
    if shapes is not None:
        structure = opened(structure, shapes)
    names = input_names(structure)
    specs = [
        tf.TensorSpec(spec.shape, spec.dtype, name=name)
        for spec, (name, _) in zip(tf.nest.flatten(structure), names, strict=True)
    ]

    @tf.function(input_signature=specs, autograph=False)
    def run(*values: Any) -> Any:
        # A graph takes no outermost scope whose name begins with an underscore, as that of a model
        # of a private class does.
        with nullcontext() if model.name[:1].isalnum() else tf.name_scope("model"):
            return model(tf.nest.pack_sequence_as(structure, values), training=False)

    try:
        return run.get_concrete_function(), names
    except Exception as error:
        logger.debug("tracing failed", exc_info=True)
        free = "" if shapes is None else f" with inputs of the shapes {shapes}"
        raise CaptureError(
            f"{type(model).__name__} cannot be traced to a graph{free}: {in_one_line(error)}"
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


def opened(structure: Any, shapes: Shapes) -> Any:
    """Return specifications of inputs with other shapes, by position or by name.

    Raises:
        ConfigurationError: there are not as many, not so named, or of other sizes.
    """
    specs = tf.nest.flatten(structure)
    names = input_names(structure)
    if isinstance(shapes, dict):
        known = {name for pair in names for name in pair if name}
        unknown = next((name for name in shapes if name not in known), None)
        if unknown is not None:
            raise ConfigurationError(
                f"inputs names {unknown!r}, which is no input of the model"
                f"{did_you_mean(unknown, known)}"
            )
        listed = [shapes.get(name, shapes.get(alias or name)) for name, alias in names]
    else:
        listed = [*shapes]
        if len(listed) != len(specs):
            raise ConfigurationError(
                f"inputs must give a shape for each of {len(specs)} inputs, got {len(listed)}"
            )
    found = [
        spec if shape is None else _with_shape(spec, shape, name)
        for spec, shape, (name, _) in zip(specs, listed, names, strict=True)
    ]
    return tf.nest.pack_sequence_as(structure, found)


def _with_shape(spec: tf.TensorSpec, shape: Shape, name: str) -> tf.TensorSpec:
    """A specification with another shape, in which free axes may be None and no others differ."""
    if not spec.shape.is_compatible_with(shape):
        raise ConfigurationError(
            f"inputs must give {name!r} a shape like {tuple(spec.shape)}, got {shape}; put None "
            f"where an axis is to be free"
        )
    return tf.TensorSpec(shape, spec.dtype, spec.name)
