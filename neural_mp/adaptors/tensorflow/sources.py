"""The forms a TensorFlow model comes in, each brought to a frozen graph and its signature."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import tensorflow as tf

from neural_mp.adaptors.common.signature import Port
from neural_mp.adaptors.tensorflow import graph_files, keras_models
from neural_mp.adaptors.tensorflow.freeze import frozen_graph
from neural_mp.adaptors.tensorflow.nodes import GraphDef
from neural_mp.adaptors.tensorflow.served_signature import DEFAULT_KEY, ServedSignature
from neural_mp.core.nested import Structure, described
from neural_mp.errors import CaptureError, ModelLoadError, did_you_mean, in_one_line

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Taken:
    """A model in the one form that everything else works on."""

    graph: GraphDef
    signature: ServedSignature
    original: Any = None
    warnings: tuple[str, ...] = ()


def read(source: Any, inputs: tuple[str, ...], outputs: tuple[str, ...], example: Any) -> Taken:
    """Bring a model to a frozen graph.

    Args:
        source: a path or an object of TensorFlow's or Keras's.
        inputs: names the user gave; none where they are to be found.
        outputs: likewise.
        example: the inputs of one batch, for models that do not say what they take.
    """
    if isinstance(source, str | Path):
        return _read_path(Path(source), inputs, outputs, example)
    if isinstance(source, tf.Graph):
        return _from_graph_def(source.as_graph_def(), inputs, outputs)
    if isinstance(source, GraphDef):
        copied = GraphDef()
        copied.CopyFrom(source)  # its nodes are shared from here on, and the user's may change
        return _from_graph_def(copied, inputs, outputs)
    if keras_models.is_keras(source):
        function, names = keras_models.traced(source, example)
        return _frozen(function, names, inputs, outputs, source)
    if isinstance(source, tf.types.experimental.ConcreteFunction):
        return _from_concrete(source, inputs, outputs)
    if isinstance(source, tf.types.experimental.GenericFunction):
        return _from_concrete(_concrete(source, example), inputs, outputs)
    if hasattr(source, "signatures"):
        return _from_signatures(source, inputs, outputs, "the model")
    raise ModelLoadError(
        f"a {type(source).__name__} has no graph that could be found; give a Keras model, a "
        f"concrete function, a SavedModel, or a GraphDef"
    )


def _read_path(
    path: Path, inputs: tuple[str, ...], outputs: tuple[str, ...], example: Any
) -> Taken:
    if not path.exists():
        raise ModelLoadError(f"there is no model file or folder {str(path)!r}")
    if path.name in ("saved_model.pb", "saved_model.pbtxt"):
        path = path.parent
    if path.is_dir():
        return _read_saved_model(path, inputs, outputs)
    if path.suffix in (".keras", ".h5", ".hdf5"):
        model = keras_models.load(path)
        function, names = keras_models.traced(model, example)
        return _frozen(function, names, inputs, outputs, model)
    graph, warnings = graph_files.read(path)
    taken = _from_graph_def(graph, inputs, outputs, str(path))
    return Taken(taken.graph, taken.signature, None, (*warnings, *taken.warnings))


def _read_saved_model(path: Path, inputs: tuple[str, ...], outputs: tuple[str, ...]) -> Taken:
    if not any((path / name).is_file() for name in ("saved_model.pb", "saved_model.pbtxt")):
        raise ModelLoadError(f"{str(path)!r} is no SavedModel: it holds no saved_model.pb")
    try:
        loaded = tf.saved_model.load(str(path))
    except Exception as error:
        # The loader raises whatever its parsers and restore ops raise.
        logger.debug("reading %s failed", path, exc_info=True)
        raise ModelLoadError(
            f"the SavedModel {str(path)!r} cannot be read: {in_one_line(error)}"
        ) from error
    return _from_signatures(loaded, inputs, outputs, f"the SavedModel {str(path)!r}")


def _from_signatures(
    loaded: Any, inputs: tuple[str, ...], outputs: tuple[str, ...], what: str
) -> Taken:
    signatures = dict(loaded.signatures)
    if not signatures:
        raise ModelLoadError(
            f"{what} has no signature, so what it takes and returns is not known; save it with "
            f"tf.saved_model.save(model, path, signatures=…)"
        )
    key = DEFAULT_KEY if DEFAULT_KEY in signatures else next(iter(signatures))
    same = _same_as(signatures, key)
    warnings: tuple[str, ...] = ()
    if len(signatures) > len(same):
        others = ", ".join(repr(name) for name in signatures if name not in same)
        warnings = (f"of the model's signatures, {key!r} is converted, but not {others}",)
    if DEFAULT_KEY not in signatures and len(signatures) > len(same):
        raise ModelLoadError(
            f"{what} has no signature {DEFAULT_KEY!r} and several others"
            f"{did_you_mean(DEFAULT_KEY, signatures)}; give the one to convert: "
            f"tf.saved_model.load(path).signatures[name]"
        )
    taken = _from_concrete(signatures[key], inputs, outputs)
    signature = replace(taken.signature, keys=same)
    if len(signature.outputs) == 1:  # a signature can return nothing but a dict
        signature = replace(signature, returns=0)
    return Taken(taken.graph, signature, None, warnings)


def _same_as(signatures: Mapping[str, Any], key: str) -> tuple[str, ...]:
    """The names under which a model has the same signature, as Keras exports it under two."""

    def described(name: str) -> Any:
        function = signatures[name]
        nodes = []
        for node in function.graph.as_graph_def().node:
            for attribute in [key for key in node.attr if key.startswith("_")]:
                del node.attr[attribute]
            nodes.append(node.SerializeToString(deterministic=True))
        captured = [id(tensor) for tensor in function.captured_inputs]
        return (
            nodes,
            captured,
            function.structured_input_signature,
            function.structured_outputs,
        )

    return (key, *(n for n in signatures if n != key and described(n) == described(key)))


def _concrete(function: Any, example: Any) -> Any:
    """The one function of a `tf.function`, traced for the example if it says nothing itself."""
    try:
        return function.get_concrete_function()
    except (TypeError, ValueError):
        if example is None:
            raise CaptureError(
                "the tf.function does not say what it takes; give it an input_signature, give "
                "data, or set inputs to an example array"
            ) from None
    values = list(example) if isinstance(example, tuple | list) else [example]
    specs = [tf.nest.map_structure(keras_models.open_spec, value) for value in values]
    try:
        return function.get_concrete_function(*specs)
    except Exception as error:
        # The user's own code is run with symbols for its inputs, and may raise anything.
        logger.debug("tracing failed", exc_info=True)
        raise CaptureError(
            f"the tf.function cannot be traced with inputs like the data: {in_one_line(error)}"
        ) from error


def _from_concrete(function: Any, inputs: tuple[str, ...], outputs: tuple[str, ...]) -> Taken:
    names: list[str | tuple[str, str]] = []

    def visit(value: Any, key: str | None) -> None:
        if isinstance(value, tf.TensorSpec):
            name = value.name or key or f"input_{len(names)}"
            names.append(name if key in (None, name) else (name, key or name))
        elif isinstance(value, Mapping):
            for under in sorted(value):
                visit(value[under], str(under))
        elif isinstance(value, tuple | list):
            for item in value:
                visit(item, key)

    visit(function.structured_input_signature, None)
    return _frozen(function, names, inputs, outputs, None)


def _frozen(
    function: Any,
    names: Sequence[str | tuple[str, str]],
    inputs: tuple[str, ...],
    outputs: tuple[str, ...],
    original: Any,
) -> Taken:
    """Turn the variables of a function into constants.

    Args:
        function: a concrete function.
        names: of its inputs, with an alias or without, in their order.
        inputs: names the user gave.
        outputs: likewise.
        original: what it was made from.
    """
    graph, fed, results = frozen_graph(function)
    returns, output_names = described(function.structured_outputs)
    if len(names) != len(fed) or len(output_names) != len(results):
        raise CaptureError(
            "the model takes or returns ragged or sparse tensors, which are several tensors each; "
            "give one that takes and returns them one by one"
        )
    signature = ServedSignature(
        tuple(_port(name, t) for name, t in zip(names, fed, strict=True)),
        tuple(_port(name, t) for name, t in zip(output_names, results, strict=True)),
        returns,
    )
    return Taken(graph, signature.choosing(inputs, outputs), original)


def _port(name: str | tuple[str, str], tensor: Any) -> Port:
    called, alias = name if isinstance(name, tuple) else (name, None)
    shape = None if tensor.shape.rank is None else tuple(tensor.shape.as_list())
    return Port(
        called, tensor.name.removesuffix(":0"), np.dtype(tensor.dtype.as_numpy_dtype), shape, alias
    )


def _from_graph_def(
    graph: GraphDef, inputs: tuple[str, ...], outputs: tuple[str, ...], what: str = "the graph"
) -> Taken:
    checked = graph_files.checked(graph, what)
    warnings: list[str] = []
    found = outputs or graph_files.loose_ends(graph, checked)
    if not found:
        raise ModelLoadError(f"{what} has no outputs that could be found; set outputs")
    if not outputs and len(found) > 1:
        warnings.append(
            f"outputs were not named; taken are all {len(found)} that nothing reads: "
            f"{', '.join(found[:6])}{', …' if len(found) > 6 else ''}"
        )
    fed = inputs or graph_files.placeholders(graph, found)
    graph = graph_files.cut_at(graph, checked, inputs)
    ports = []
    for option, names in (("inputs", fed), ("outputs", found)):
        tensors = [graph_files.tensor_named(checked, name, option) for name in names]
        ports.append(tuple(_port(name, t) for name, t in zip(names, tensors, strict=True)))
    returns: Structure = 0 if len(found) == 1 else list(range(len(found)))
    return Taken(graph, ServedSignature(ports[0], ports[1], returns), None, tuple(warnings))
