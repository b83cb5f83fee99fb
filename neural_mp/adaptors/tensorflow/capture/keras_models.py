"""Keras models: files, functions with named inputs and outputs, and recording of calls."""

from __future__ import annotations

import logging
import math
import re
import threading
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import tensorflow as tf

from neural_mp.adaptors.tensorflow.files.keras_checks import check_keras_file
from neural_mp.adaptors.tensorflow.graph.ops import LAYERS
from neural_mp.adaptors.tensorflow.graph.tensor_graph import (
    TensorGraph,
    get_node_name,
    list_data_inputs,
)
from neural_mp.core.graph import Layer
from neural_mp.errors import (
    CaptureError,
    ConfigurationError,
    ConversionError,
    ModelLoadError,
    did_you_mean,
    message_of,
    one_line,
)
from neural_mp.io.limits import KERAS_EXTRA_WEIGHT_BYTES, MAX_KERAS_WEIGHT_RATIO
from neural_mp.util.labels import without_labels
from neural_mp.util.open_axes import Shape, Shapes

#: Assumed element size in bytes of types that numpy lacks.
_OF_UNKNOWN = 16


class TooManyWeightsError(Exception):
    """A configuration declares more weights than its file contains."""


@contextmanager
def limit_created_weights(nbytes: int) -> Iterator[None]:
    """Limit the weights that Keras creates in this thread to the size of a file's weights.

    Raises:
        TooManyWeightsError: from within Keras, before the limit is exceeded.
    """
    import keras

    original, thread = keras.Variable.__init__, threading.get_ident()
    left = MAX_KERAS_WEIGHT_RATIO * nbytes + KERAS_EXTRA_WEIGHT_BYTES

    def make_bounded(
        variable: object, initializer: object, shape: object = None, *args: object, **named: object
    ) -> None:
        nonlocal left
        if threading.get_ident() == thread and shape is not None:
            left -= _count_weight_bytes(shape, args[0] if args else named.get("dtype"))
            if left < 0:
                raise TooManyWeightsError(
                    f"its configuration declares more weights than the file contains "
                    f"({nbytes} bytes)"
                )
        original(variable, initializer, shape, *args, **named)

    keras.Variable.__init__ = make_bounded
    try:
        yield
    finally:
        keras.Variable.__init__ = original


def _count_weight_bytes(shape: Any, dtype: object) -> int:
    """Return the size of a weight; 0 for a shape that Keras itself refuses."""
    from keras import backend

    try:
        count = math.prod(int(length) for length in shape)
    except (TypeError, ValueError):
        return 0
    try:
        return count * np.dtype(backend.standardize_dtype(dtype)).itemsize
    except (TypeError, ValueError):  # e.g. strings, whose type numpy names differently
        return count * _OF_UNKNOWN


logger = logging.getLogger(__name__)

#: Names of inputs, each with its alias: the key of the dict that contains the input.
InputNames = list[tuple[str, str | None]]


def is_keras(source: object) -> bool:
    """Whether an object is a Keras model or layer of any generation."""
    return any(
        kind.__module__.split(".")[0] in ("keras", "tf_keras")
        and kind.__name__ in ("Layer", "Model")
        for kind in type(source).__mro__
    )


def load_keras_file(path: Path, *, compiled: bool = False) -> Any:
    """Load a `.keras` or `.h5` file without running code in it (Lambda layers).

    If `compiled`, loss and optimizer are loaded too.

    Raises:
        ModelLoadError: the file is damaged, contains weights only, needs classes that are missing,
            names something that is no part of a model, or declares weights it does not contain.
    """
    import keras

    if keras.config.backend() != "tensorflow":
        raise ModelLoadError(
            f"the Keras backend must be tensorflow, got {keras.config.backend()}; set "
            f"KERAS_BACKEND=tensorflow"
        )
    nbytes = check_keras_file(path)
    try:
        with warnings.catch_warnings(), limit_created_weights(nbytes):
            # The optimizer's state may not fit, but training does not continue here.
            warnings.filterwarnings("ignore", "Skipping variable loading for optimizer")
            return keras.models.load_model(path, compile=compiled, safe_mode=True)
    except Exception as error:
        # The loader passes on any error of its parsers and of the layers' constructors.
        logger.debug("reading %s failed", path, exc_info=True)
        raise ModelLoadError(
            f"{str(path)!r} cannot be read as a Keras model: {_describe_error(error)}; pass a "
            f"model with custom layers as an object"
        ) from error


def trace_function(
    model: tf.keras.Layer, example: object, shapes: Shapes | None = None
) -> tuple[Any, InputNames]:
    """Return a concrete function of a model in inference, and the names of its inputs.

    The names are those that `model.export` uses. The shapes are given, or else declared by the
    model, or those of the example.

    Raises:
        CaptureError: the inputs are unknown, or tracing fails.
        ConfigurationError: the shapes do not fit the inputs.
    """
    structure = _list_input_specs(model, example)
    if shapes is not None:
        structure = reshape_input_specs(structure, shapes)
    names = list_input_names(structure)
    specs = [
        tf.TensorSpec(spec.shape, spec.dtype, name=name)
        for spec, (name, _) in zip(tf.nest.flatten(structure), names, strict=True)
    ]

    @tf.function(input_signature=specs, autograph=False)
    def call_model(*values: tf.Tensor) -> Any:
        # An outermost scope in a graph cannot start with an underscore, as the names of models of
        # private classes do.
        with nullcontext() if model.name[:1].isalnum() else tf.name_scope("model"):
            return model(tf.nest.pack_sequence_as(structure, values), training=False)

    try:
        return call_model.get_concrete_function(), names
    except Exception as error:
        logger.debug("tracing failed", exc_info=True)
        free = "" if shapes is None else f" with inputs of the shapes {shapes}"
        raise CaptureError(
            f"{type(model).__name__} cannot be traced to a graph{free}: {_describe_error(error)}"
        ) from error


#: First line of messages in which Keras wraps the exceptions of a layer.
_WRAPPED = re.compile(r"Exception encountered when calling (?P<layer>.+?)(\.call\(\))?\.?")
#: Colours, which Keras puts around the wrapped message.
_COLOUR = re.compile(r"\x1b\[[0-9;]*m")


def _describe_error(error: BaseException) -> str:
    """Return one line on an exception: in a layer, the layer and its own message."""
    lines = [line for line in _COLOUR.sub("", message_of(error)).splitlines() if line.strip()]
    wrapped = _WRAPPED.fullmatch(lines[0].strip()) if len(lines) > 1 else None
    if wrapped is None:
        return one_line(error)
    return f"{type(error).__name__} in {wrapped['layer']}: {lines[1].strip()}"


def _list_input_specs(model: tf.keras.Layer, example: object) -> Any:
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
            f"{type(model).__name__} declares no inputs; pass data, or set inputs to an example "
            f"array"
        )
    example = without_targets(example)
    specs = tf.nest.map_structure(
        open_spec, list(example) if isinstance(example, tuple) else example
    )
    return specs[0] if isinstance(specs, list) and len(specs) == 1 else specs


def without_targets(example: object) -> Any:
    """Return the batch without labels, for tracing a model without declared inputs."""
    return without_labels(example, ()) if isinstance(example, Mapping) else example


def list_input_names(structure: object) -> InputNames:
    """Return the names of the specifications in a structure, in flattening order.

    Tensors without a name are named by their key, or else by their position.
    """
    names: InputNames = []

    def collect_names(value: object, key: str | None) -> None:
        if isinstance(value, tf.TensorSpec):
            name = value.name or key or f"input_{len(names)}"
            names.append((name, None if key == name else key))
        elif isinstance(value, Mapping):
            for under in sorted(value):
                collect_names(value[under], str(under))
        elif isinstance(value, tuple | list):
            for item in value:
                collect_names(item, key)

    collect_names(structure, None)
    return names


def open_spec(value: object) -> tf.TensorSpec:
    """Return the specification of an example, with an open first axis."""
    array = np.asarray(value)
    dtype = tf.float32 if array.dtype == np.float64 else tf.as_dtype(array.dtype)
    return tf.TensorSpec([None, *array.shape[1:]] if array.ndim else [], dtype)


def reshape_input_specs(structure: object, shapes: Shapes) -> Any:
    """Return specifications of inputs with other shapes, by position or by name.

    Raises:
        ConfigurationError: the number, names or sizes do not match.
    """
    specs = tf.nest.flatten(structure)
    names = list_input_names(structure)
    if isinstance(shapes, dict):
        defined = {name for pair in names for name in pair if name}
        unknown = next((name for name in shapes if name not in defined), None)
        if unknown is not None:
            raise ConfigurationError(
                f"inputs names {unknown!r}, which is not an input of the model"
                f"{did_you_mean(unknown, defined)}"
            )
        listed = [shapes.get(name, shapes.get(alias or name)) for name, alias in names]
    else:
        listed = [*shapes]
        if len(listed) != len(specs):
            raise ConfigurationError(
                f"inputs must contain a shape for each of {len(specs)} inputs, got {len(listed)}"
            )
    reshaped = [
        spec if shape is None else _override_shape(spec, shape, name)
        for spec, shape, (name, _) in zip(specs, listed, names, strict=True)
    ]
    return tf.nest.pack_sequence_as(structure, reshaped)


def _override_shape(spec: tf.TensorSpec, shape: Shape, name: str) -> tf.TensorSpec:
    """Return a specification with another shape, which may differ only in open axes."""
    if not spec.shape.is_compatible_with(shape):
        raise ConfigurationError(
            f"the shape of input {name!r} must fit {tuple(spec.shape)}, got {shape}; use None for "
            f"dynamic axes"
        )
    return tf.TensorSpec(shape, spec.dtype, spec.name)


#: Maximum distance from an op with a layer's name to the layer itself: bias, scaling, norm.
_FURTHEST = 8

#: Prefix of the names of a layer's ops → the layer. TensorFlow appends numbers to layer names,
#: which may then equal names of other layers.
Scopes = Mapping[str, Layer]

#: Arguments of a layer's call by name.
Kwargs = Mapping[str, Any]
#: Wrapper of a layer's call: gets the layer, its own `call`, and the arguments.
Around = Callable[[Any, Callable[..., Any], tuple[Any, ...], Kwargs], Any]


@contextmanager
def record_layer_scopes(model: tf.keras.Layer) -> Iterator[Scopes]:
    """Collect the scopes of a model's layers while the context calls the model."""
    scopes: dict[str, Layer] = {}

    def record_scope(
        layer: tf.keras.Layer, call: Callable[..., Any], args: tuple[Any, ...], kwargs: Kwargs
    ) -> Any:
        scope = tf.compat.v1.get_default_graph().get_name_scope()
        # Without a scope of its own, a layer would get the ops of the enclosing layer.
        if scope.rpartition("/")[2].startswith(layer.name):
            scopes.setdefault(scope, Layer(layer.name, type(layer).__name__))
        return call(*args, **kwargs)

    with wrap_layer_calls(
        [layer for layer in list_nested_layers(model) if layer is not model], record_scope
    ):
        yield scopes


@contextmanager
def wrap_layer_calls(layers: Iterable[Any], around: Around) -> Iterator[None]:
    """Wrap every call of the layers within the context."""
    with ExitStack() as undo:
        for layer in layers:
            _wrap_call(layer, around, undo)
        yield


def _wrap_call(layer: tf.keras.Layer, around: Around, undo: ExitStack) -> None:
    # Keras's own `__setattr__` refuses on a built layer.
    if "call" in vars(layer):
        undo.callback(object.__setattr__, layer, "call", layer.call)
    else:
        undo.callback(object.__delattr__, layer, "call")
    plain = layer.call
    object.__setattr__(layer, "call", lambda *args, **kwargs: around(layer, plain, args, kwargs))


def list_nested_layers(model: tf.keras.Layer) -> list[Any]:
    """Return all layers of a Keras 3 model, nested ones included."""
    if not hasattr(model, "_flatten_layers") or type(model).__module__.startswith("tf_keras"):
        return []
    return list(model._flatten_layers())


@dataclass(frozen=True)
class Origins:
    """Origins of the nodes of a graph, recorded before simplification."""

    scopes: Scopes
    types: Mapping[str, str]
    read: Mapping[str, tuple[str, ...]]

    @classmethod
    def from_graph(cls, graph: TensorGraph, scopes: Scopes) -> Origins:
        """Record a graph before constant folding."""
        nodes = graph.nodes if scopes else {}
        return cls(
            scopes,
            {name: node.op for name, node in nodes.items()},
            {
                name: tuple(map(get_node_name, list_data_inputs(node)))
                for name, node in nodes.items()
            },
        )

    def layers_by_node(self, graph: TensorGraph) -> dict[str, tuple[Layer, ...]]:
        """Return node of the simplified graph → its Keras layers, outer ones first."""
        if not self.scopes:
            return {}
        result = {}
        for name, node in graph.nodes.items():
            # TensorFlow folds the ops after a layer into the layer, and keeps the last name.
            folded = self._find_preceding_layer(name, node.op) if node.op in LAYERS else None
            names = [name] if folded is None else [folded, name]
            layers = dict.fromkeys(
                layer for origin in names for layer in self._find_enclosing_layers(origin)
            )
            if layers:
                result[name] = tuple(layers)
        return result

    def _find_enclosing_layers(self, name: str) -> Iterator[Layer]:
        parts = name.split("/")
        for end in range(1, len(parts)):
            layer = self.scopes.get("/".join(parts[:end]))
            if layer is not None:
                yield layer

    def _find_preceding_layer(self, name: str, kind: str) -> str | None:
        """Return the nearest layer of a kind before an op; None if the op is such a layer."""
        nodes: tuple[str, ...] = (name,)
        if self.types.get(name) in (None, kind):
            return None
        for _ in range(_FURTHEST):
            nodes = tuple(dict.fromkeys(source for n in nodes for source in self.read.get(n, ())))
            layers = [n for n in nodes if self.types.get(n) == kind]
            if layers:
                return layers[0]
        return None


#: Functions that Keras compiles from `call` on their first use.
_COMPILED = ("predict_function", "test_function", "train_function")


@contextmanager
def record_calls(model: tf.keras.Model, record: Callable[[Any], None]) -> Iterator[None]:
    """Pass the inputs of every call of a model within this context to `record`, as arrays.

    `predict`, `evaluate` and `fit` run without compiled functions meanwhile, which hide inputs. A
    call inside of a `tf.function` of the user has no arrays, and is not recorded.

    Raises:
        ConversionError: the object is no Keras model.
    """
    if not isinstance(model, tf.keras.Model):
        raise ConversionError(
            f"only calls of Keras models can be recorded, got {type(model).__name__}; pass the "
            f"calibration data as calib_dataloader"
        )

    def record_inputs(
        _: object, call: Callable[..., Any], args: tuple[Any, ...], kwargs: Kwargs
    ) -> Any:
        inputs = _batch_from_call(args, kwargs)
        if inputs is not None:
            record(inputs)
        return call(*args, **kwargs)

    with _without_compilation(model), wrap_layer_calls([model], record_inputs):
        yield


@contextmanager
def _without_compilation(model: tf.keras.Model) -> Iterator[None]:
    original = {name: getattr(model, name, None) for name in _COMPILED}
    eager = model.run_eagerly
    model.run_eagerly = True
    for name in original:
        setattr(model, name, None)
    try:
        yield
    finally:
        model.run_eagerly = eager
        for name, function in original.items():
            setattr(model, name, function)


def _batch_from_call(args: tuple[Any, ...], kwargs: Kwargs) -> Any:
    """Return the inputs of a call as a batch; None if they are not arrays, but symbols."""
    named = {name: value for name, value in kwargs.items() if name not in ("training", "mask")}
    data = [value for value in (*args, *named.values()) if _is_data(value)]
    if not data or any(map(tf.is_symbolic_tensor, tf.nest.flatten(data))):
        return None
    arrays = tf.nest.map_structure(np.array, data)
    only = arrays[0] if len(arrays) == 1 else arrays
    return tuple(only) if isinstance(only, list) else only


def _is_data(value: object) -> bool:
    leaves = tf.nest.flatten(value)
    return bool(leaves) and all(isinstance(leaf, tf.Tensor | np.ndarray) for leaf in leaves)
