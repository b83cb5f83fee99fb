"""Keras models: read from their files, and traced to a function with named inputs and outputs."""

from __future__ import annotations

import logging
import math
import threading
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import tensorflow as tf

from neural_mp.adaptors.tensorflow.checks.keras_files import check_keras_file
from neural_mp.adaptors.tensorflow.layer_folding import LAYERS
from neural_mp.adaptors.tensorflow.tensor_graph import TensorGraph, data_inputs, node_of
from neural_mp.core.graph import Layer
from neural_mp.errors import (
    CaptureError,
    ConfigurationError,
    ModelLoadError,
    did_you_mean,
    one_line,
)
from neural_mp.io.limits import KERAS_EXTRA_WEIGHT_BYTES, MAX_KERAS_WEIGHT_RATIO
from neural_mp.util.labels import without_labels
from neural_mp.util.open_axes import Shape, Shapes

#: Bytes of an element of a type that numpy does not know.
_OF_UNKNOWN = 16


class TooManyWeightsError(Exception):
    """A configuration declares more weights than are in the file."""


@contextmanager
def bounded_weights(nbytes: int) -> Iterator[None]:
    """Let Keras make no more weights in this thread than belong to a file.

    Args:
        nbytes: what the weights in the file take.

    Raises:
        TooManyWeightsError: from inside Keras, before the first weight too many is made.
    """
    import keras

    original, thread = keras.Variable.__init__, threading.get_ident()
    left = MAX_KERAS_WEIGHT_RATIO * nbytes + KERAS_EXTRA_WEIGHT_BYTES

    def make(
        variable: object, initializer: object, shape: object = None, *args: object, **named: object
    ) -> None:
        nonlocal left
        if threading.get_ident() == thread and shape is not None:
            left -= _nbytes(shape, args[0] if args else named.get("dtype"))
            if left < 0:
                raise TooManyWeightsError(
                    f"its configuration declares more weights than the {nbytes} bytes of them "
                    f"that are in the file"
                )
        original(variable, initializer, shape, *args, **named)

    keras.Variable.__init__ = make
    try:
        yield
    finally:
        keras.Variable.__init__ = original


def _nbytes(shape: Any, dtype: object) -> int:
    """What a weight takes; nothing where Keras itself will refuse its shape."""
    from keras import backend

    try:
        count = math.prod(int(length) for length in shape)
    except (TypeError, ValueError):
        return 0
    try:
        return count * np.dtype(backend.standardize_dtype(dtype)).itemsize
    except (TypeError, ValueError):  # such as that of texts, which numpy calls otherwise
        return count * _OF_UNKNOWN


logger = logging.getLogger(__name__)

#: Names of inputs, each with another name it goes by: the key of a dict it stands under.
InputNames = list[tuple[str, str | None]]


def is_keras(source: object) -> bool:
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
            f"{str(path)!r} cannot be read as a Keras model: {one_line(error)}; give a model "
            f"with layers of your own as an object"
        ) from error


def traced(
    model: tf.keras.Layer, example: object, shapes: Shapes | None = None
) -> tuple[Any, InputNames]:
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
        structure = open_trainable(structure, shapes)
    names = input_names(structure)
    specs = [
        tf.TensorSpec(spec.shape, spec.dtype, name=name)
        for spec, (name, _) in zip(tf.nest.flatten(structure), names, strict=True)
    ]

    @tf.function(input_signature=specs, autograph=False)
    def run(*values: tf.Tensor) -> Any:
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
            f"{type(model).__name__} cannot be traced to a graph{free}: {one_line(error)}"
        ) from error


def _taken(model: tf.keras.Layer, example: object) -> Any:
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


def shown(example: object) -> Any:
    """What a model that does not say what it takes is traced with: a batch without its labels."""
    return without_labels(example, ()) if isinstance(example, Mapping) else example


def input_names(structure: object) -> InputNames:
    """The names of the tensors in a structure of specifications, in the order they are flattened.

    Those without a name of their own are called by their key, or else by their position.
    """
    names: InputNames = []

    def visit(value: object, key: str | None) -> None:
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


def open_spec(value: object) -> tf.TensorSpec:
    """What an example is, with its first axis open."""
    array = np.asarray(value)
    dtype = tf.float32 if array.dtype == np.float64 else tf.as_dtype(array.dtype)
    return tf.TensorSpec([None, *array.shape[1:]] if array.ndim else [], dtype)


def open_trainable(structure: object, shapes: Shapes) -> Any:
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


#: How far back from an op with another's name the op itself may have been: bias, scaling, norm.
_FURTHEST = 8

#: Prefix of the names of a layer's ops → the layer. TensorFlow puts numbers behind the names of
#: layers, which may look like those of other layers.
Scopes = Mapping[str, Layer]


@contextmanager
def watched(model: tf.keras.Layer) -> Iterator[Scopes]:
    """For a `with` block that calls a model: fills in the scopes that its layers run in."""
    scopes: dict[str, Layer] = {}
    layers = [layer for layer in _layers_in(model) if layer is not model]
    before = [(layer, vars(layer).get("call")) for layer in layers]
    try:
        for layer in layers:
            # Past Keras's own setting of attributes, which refuses some in a model that is built.
            vars(layer)["call"] = _noting(layer, scopes)
        yield scopes
    finally:
        for layer, own in before:
            vars(layer).pop("call", None)
            if own is not None:
                vars(layer)["call"] = own


def _layers_in(model: tf.keras.Layer) -> list[Any]:
    """All layers of a model, also those inside of others; of Keras 3 alone."""
    if not hasattr(model, "_flatten_layers") or type(model).__module__.startswith("tf_keras"):
        return []
    return list(model._flatten_layers())


def _noting(layer: tf.keras.Layer, scopes: dict[str, Layer]) -> Any:
    run = layer.call

    def call(*args: object, **kwargs: object) -> Any:
        scope = tf.compat.v1.get_default_graph().get_name_scope()
        # A layer that opens no scope of its own would get the ops of the one around it.
        if scope.rpartition("/")[2].startswith(layer.name):
            scopes.setdefault(scope, Layer(layer.name, type(layer).__name__))
        return run(*args, **kwargs)

    return call


@dataclass(frozen=True)
class Origins:
    """Where the nodes of a graph come from, kept from before it was simplified."""

    scopes: Scopes
    types: Mapping[str, str]
    read: Mapping[str, tuple[str, ...]]

    @classmethod
    def of(cls, graph: TensorGraph, scopes: Scopes) -> Origins:
        """What a graph says before anything is folded in it."""
        nodes = graph.nodes if scopes else {}
        return cls(
            scopes,
            {name: node.op for name, node in nodes.items()},
            {name: tuple(map(node_of, data_inputs(node))) for name, node in nodes.items()},
        )

    def layers(self, graph: TensorGraph) -> dict[str, tuple[Layer, ...]]:
        """Node of the simplified graph → the layers it comes from, outer ones first."""
        if not self.scopes:
            return {}
        found = {}
        for name, node in graph.nodes.items():
            # TensorFlow folds what is behind a layer into it, and the layer gets the name of that.
            taken_in = self._layer_before(name, node.op) if node.op in LAYERS else None
            names = [name] if taken_in is None else [taken_in, name]
            layers = dict.fromkeys(layer for each in names for layer in self._around(each))
            if layers:
                found[name] = tuple(layers)
        return found

    def _around(self, name: str) -> Iterator[Layer]:
        parts = name.split("/")
        for end in range(1, len(parts)):
            layer = self.scopes.get("/".join(parts[:end]))
            if layer is not None:
                yield layer

    def _layer_before(self, name: str, kind: str) -> str | None:
        """The layer of a kind nearest before an op that had the name; None if it was that layer."""
        near: tuple[str, ...] = (name,)
        if self.types.get(name) in (None, kind):
            return None
        for _ in range(_FURTHEST):
            near = tuple(dict.fromkeys(source for n in near for source in self.read.get(n, ())))
            layers = [n for n in near if self.types.get(n) == kind]
            if layers:
                return layers[0]
        return None
