"""Loading of models from all supported sources into a canonical graph with a signature.

A batch may leave out an input with a default (`tf.compat.v1.placeholder_with_default`).
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import tensorflow as tf
from tensorflow.core.protobuf import saved_model_pb2

from neural_mp.adaptors.common.capabilities import stays_in_fp32
from neural_mp.adaptors.common.signatures.input_spec import InputSpec
from neural_mp.adaptors.common.signatures.signature import Shape, TensorSpec
from neural_mp.adaptors.tensorflow.capture import keras_models, v1_saved_models
from neural_mp.adaptors.tensorflow.capture.canonicalize import canonicalize_graph
from neural_mp.adaptors.tensorflow.capture.freeze import (
    ConcreteFunction,
    freeze_concrete_function,
    unfreezable_resource_error,
)
from neural_mp.adaptors.tensorflow.capture.keras_models import Origins
from neural_mp.adaptors.tensorflow.capture.source_precision import (
    in_float32,
    without_fake_quantization,
)
from neural_mp.adaptors.tensorflow.files import graph_files
from neural_mp.adaptors.tensorflow.graph.constants import is_pure
from neural_mp.adaptors.tensorflow.graph.ops import (
    PLACEHOLDERS,
    TYPES,
    Role,
    get_op_properties,
    get_op_role,
    list_types_with,
)
from neural_mp.adaptors.tensorflow.graph.runtime import Runner, import_runnable, keep_forever
from neural_mp.adaptors.tensorflow.graph.shape_rules import of_first
from neural_mp.adaptors.tensorflow.graph.tensor_graph import (
    CONSTANT,
    Array,
    GraphDef,
    NodeDef,
    TensorGraph,
    channels_first,
    get_node_name,
    list_data_inputs,
    list_known_sizes,
    make_node,
    plain_name,
    read_constant_shape,
    without_large,
)
from neural_mp.adaptors.tensorflow.model import DEFAULT_KEY, ServedSignature, TensorFlowModel
from neural_mp.errors import (
    CaptureError,
    ConversionError,
    DataError,
    ModelLoadError,
    did_you_mean,
    one_line,
)
from neural_mp.util.pytree import Structure, build_output_structure
from neural_mp.util.text import with_article

logger = logging.getLogger(__name__)

#: Possible model files of a SavedModel folder.
_SAVED_MODEL = ("saved_model.pb", "saved_model.pbtxt")


@dataclass(frozen=True)
class FrozenModel:
    """A loaded model as a frozen graph with a signature."""

    graph: TensorGraph
    signature: ServedSignature
    original: Any = None
    warnings: tuple[str, ...] = ()
    scopes: keras_models.Scopes = field(default_factory=dict)


def read_frozen(source: object, spec: InputSpec) -> FrozenModel:
    """Convert a model, given as a path or an object, to a frozen graph.

    Names of inputs and outputs are used for graphs without them, the example for models without
    declared inputs.
    """
    if isinstance(source, str | Path):
        return _read_path(Path(source), spec)
    if keras_models.is_keras(source):
        return _from_keras(source, spec)
    if isinstance(source, tf.types.experimental.GenericFunction) and not isinstance(
        source, tf.types.experimental.ConcreteFunction
    ):
        return _from_concrete(_get_concrete_function(source, spec))
    spec = spec.without_shapes(with_article(type(source).__name__))
    if isinstance(source, tf.Graph):
        return _from_graph_def(source.as_graph_def(), spec)
    if isinstance(source, GraphDef):
        copied = GraphDef()
        copied.CopyFrom(source)  # nodes are shared below, and the user's graph may change
        return _from_graph_def(copied, spec)
    if isinstance(source, tf.types.experimental.ConcreteFunction):
        return _from_concrete(source)
    if hasattr(source, "signatures"):
        return _from_signatures(source, "the model")
    raise ModelLoadError(
        f"model must be a Keras model, a concrete function, a SavedModel or a GraphDef, got "
        f"{with_article(type(source).__name__)}"
    )


def _read_path(path: Path, spec: InputSpec) -> FrozenModel:
    if not path.exists():
        raise ModelLoadError(f"there is no model file or folder {str(path)!r}")
    if path.name in _SAVED_MODEL:
        path = path.parent
    if path.suffix in (".keras", ".h5", ".hdf5") and not path.is_dir():
        return _from_keras(keras_models.load_keras_file(path), spec)
    spec = spec.without_shapes(repr(str(path)))
    if path.is_dir():
        return _read_saved_model(path)
    ports = (*spec.outputs, *spec.names) if spec.outputs else ()
    graph, warnings = graph_files.read_graph(path, ports)
    frozen = _from_graph_def(graph, spec, str(path))
    return replace(frozen, warnings=(*warnings, *frozen.warnings))


def _read_saved_model(path: Path) -> FrozenModel:
    if not any((path / name).is_file() for name in _SAVED_MODEL):
        raise ModelLoadError(f"{str(path)!r} is not a SavedModel: it holds no saved_model.pb")
    stored = v1_saved_models.parse_checked(path, session=False)
    try:
        loaded = tf.saved_model.load(str(path))
    except Exception as error:
        # The loader passes on any error of its parsers and restore ops.
        keep_forever(error)
        logger.debug("reading the objects of %s failed", path, exc_info=True)
        return FrozenModel(*v1_saved_models.read_v1_model(path))
    try:
        frozen = _from_signatures(loaded, f"the SavedModel {str(path)!r}")
    except CaptureError:
        # The loader made no functions of the signatures, or functions with other inputs.
        return FrozenModel(*v1_saved_models.read_v1_model(path))
    if hasattr(loaded, "prune") and (_is_incomplete(frozen) or feeds_defaults(stored)):
        return FrozenModel(*v1_saved_models.read_v1_model(path))
    defaults = read_declared_defaults(stored, frozen.signature.keys[0])
    return replace(frozen, signature=frozen.signature.with_defaults(defaults))


def _is_incomplete(frozen: FrozenModel) -> bool:
    """Whether the TensorFlow 2 loader lost parts of a TensorFlow 1 SavedModel.

    Non-resource variables and lookup tables stay nodes without values. An unread input may be the
    value of a variable that the graph reads separately.
    """
    readers = frozen.graph.find_consumers()
    lost = list_types_with(Role.REFERENCE_VARIABLE, Role.LOOKUP_TABLE)
    return any(node.op in lost for node in frozen.graph.nodes.values()) or not all(
        readers.get(port.tensor) for port in frozen.signature.inputs
    )


def _from_keras(model: tf.keras.Layer, spec: InputSpec) -> FrozenModel:
    with keras_models.record_layer_scopes(model) as scopes:
        function, names = keras_models.trace_function(model, spec.example, spec.shapes)
    return replace(_freeze_function(function, names), original=model, scopes=scopes)


def _from_signatures(loaded: Any, what: str) -> FrozenModel:
    if not isinstance(loaded.signatures, Mapping):
        raise CaptureError(
            f"signatures of {what} must be functions by name, got "
            f"{with_article(type(loaded.signatures).__name__)}; save the model again"
        )
    signatures = dict(loaded.signatures)
    if not signatures:
        raise ModelLoadError(
            f"{what} must have a signature, got none; save it with tf.saved_model.save(model, "
            f"path, signatures=…)"
        )
    key = DEFAULT_KEY if DEFAULT_KEY in signatures else next(iter(signatures))
    same = _find_identical_signatures(signatures, key)
    excluded = [repr(name) for name in signatures if name not in same]
    if DEFAULT_KEY not in signatures and excluded:
        raise ModelLoadError(
            f"{what} has several signatures, but none named {DEFAULT_KEY!r}"
            f"{did_you_mean(DEFAULT_KEY, signatures)}; pass the signature to convert: "
            f"tf.saved_model.load(path).signatures[name]"
        )
    warning = f"only the signature {key!r} is converted; leaving out: {', '.join(excluded)}"
    frozen = _from_concrete(signatures[key])
    signature = replace(frozen.signature, keys=same)
    if len(signature.outputs) == 1:  # a signature can return nothing but a dict
        signature = replace(signature, returns=0)
    return FrozenModel(frozen.graph, signature, warnings=(warning,) if excluded else ())


def _find_identical_signatures(signatures: Mapping[str, Any], key: str) -> tuple[str, ...]:
    """Return the names of identical signatures; Keras exports every signature under two names."""

    def describe_signature(name: str) -> Any:
        function = signatures[name]
        nodes = []
        for node in function.graph.as_graph_def().node:
            for attribute in [key for key in node.attr if key.startswith("_")]:
                del node.attr[attribute]
            nodes.append(node.SerializeToString(deterministic=True))
        captured = [id(tensor) for tensor in function.captured_inputs]
        return nodes, captured, function.structured_input_signature, function.structured_outputs

    return (
        key,
        *(n for n in signatures if n != key and describe_signature(n) == describe_signature(key)),
    )


def _get_concrete_function(function: tf.types.experimental.GenericFunction, spec: InputSpec) -> Any:
    """Return the only function of a `tf.function`, traced with the example if necessary."""
    example = spec.example
    try:
        return function.get_concrete_function()
    except (TypeError, ValueError):
        if example is None:
            raise CaptureError(
                "the tf.function declares no inputs; set its input_signature, pass data, or set "
                "inputs to an example array"
            ) from None
    inputs = keras_models.without_targets(example)
    values = list(inputs) if isinstance(inputs, tuple | list) else [inputs]
    specs = tf.nest.map_structure(keras_models.open_spec, values)
    if spec.shapes is not None:
        specs = keras_models.reshape_input_specs(specs, spec.shapes)
    try:
        return function.get_concrete_function(*specs)
    except Exception as error:
        # Tracing runs the user's code with symbolic inputs, which may raise any error.
        logger.debug("tracing failed", exc_info=True)
        raise CaptureError(
            f"the tf.function cannot be traced with inputs like the data: {one_line(error)}"
        ) from error


def _from_concrete(function: ConcreteFunction) -> FrozenModel:
    return _freeze_function(
        function, keras_models.list_input_names(function.structured_input_signature)
    )


def _freeze_function(function: ConcreteFunction, names: keras_models.InputNames) -> FrozenModel:
    graph, fed, results = freeze_concrete_function(function)
    returns, output_names = build_output_structure(function.structured_outputs)
    if len(names) != len(fed) or len(output_names) != len(results):
        raise CaptureError(
            "inputs and outputs must be dense tensors, got ragged or sparse tensors, which consist "
            "of several tensors each; export a model with these as separate inputs and outputs"
        )
    inputs = (_spec_from_tensor(tensor, *name) for name, tensor in zip(names, fed, strict=True))
    outputs = (
        _spec_from_tensor(tensor, name) for name, tensor in zip(output_names, results, strict=True)
    )
    return FrozenModel(graph, ServedSignature(tuple(inputs), tuple(outputs), returns))


def _spec_from_tensor(tensor: tf.Tensor, name: str, alias: str | None = None) -> TensorSpec:
    dtype = np.dtype(tensor.dtype.as_numpy_dtype)
    return TensorSpec(name, plain_name(tensor.name), dtype, list_known_sizes(tensor.shape), alias)


def _from_graph_def(graph: GraphDef, spec: InputSpec, what: str = "the graph") -> FrozenModel:
    checked, nodes = graph_files.import_checked(graph, what), TensorGraph.from_graph_def(graph)
    outputs = spec.outputs or graph_files.find_loose_ends(nodes, checked)
    if not outputs:
        raise ModelLoadError(f"no outputs of {what} were found; set outputs")
    warnings: tuple[str, ...] = ()
    if not spec.outputs and len(outputs) > 1:
        warnings = (
            f"outputs are not set; using all {len(outputs)} tensors that no node reads: "
            f"{', '.join(outputs[:6])}{', …' if len(outputs) > 6 else ''}",
        )
    inputs = spec.names or graph_files.reachable_placeholders(nodes, outputs)
    graph_files.cut_at(nodes, checked, spec.names)
    fed, results = (
        tuple(
            _spec_from_tensor(graph_files.find_tensor_named(checked, name, option), name)
            for name in names
        )
        for option, names in (("inputs", inputs), ("outputs", outputs))
    )
    returns: Structure = 0 if len(outputs) == 1 else list(range(len(outputs)))
    return FrozenModel(nodes, ServedSignature(fed, results, returns), warnings=warnings)


def warn_of_inner_layers(graph: TensorGraph) -> tuple[str, ...]:
    """Return a warning about layers in functions that are not inlined, if there are any."""
    inside = (node.op for function in graph.library.function for node in function.node_def)
    layers = {*TYPES["conv"], *TYPES["matmul"]}
    return stays_in_fp32(
        (op for op in inside if op in layers),
        "in functions",
        "only layers in the graph itself, in its loops and in its branches are converted",
    )


def load_model(source: object, spec: InputSpec) -> TensorFlowModel:
    """Load a model from a path, or from a TensorFlow or Keras object.

    Raises:
        ModelLoadError: the model cannot be read, is incomplete, or cannot be frozen.
        ConfigurationError: the model has no input or output of a given name.
        DataError: the example does not fit, or is missing for a model without declared inputs.
    """
    frozen = read_frozen(source, spec)
    signature, default_warnings = with_defaults(frozen.graph, frozen.signature, spec.used_names)
    signature = signature.select_ports(spec.names, spec.outputs)
    bind_defaults(frozen.graph, set(map(get_node_name, signature.input_tensors)))
    _refuse_state(frozen.graph, signature)
    inferred = with_inferred_shapes(frozen.graph, signature)
    signature = with_inferred_ranks(signature, inferred)
    origins = Origins.from_graph(frozen.graph, frozen.scopes)
    widened, precision_warnings = in_float32(frozen.graph, signature)
    prepared, warnings = canonicalize_graph(frozen.graph if widened is None else widened, signature)
    original = None if widened is None else canonicalize_graph(frozen.graph, signature)[0]
    feeds, input_warnings = spec.make_feeds(inferred if spec.example is None else signature)
    if spec.example is None:
        check_generated(prepared, signature, feeds)
    warnings = [*precision_warnings, *warnings, *warn_of_inner_layers(prepared), *input_warnings]
    return without_fake_quantization(
        TensorFlowModel(
            prepared,
            signature,
            feeds,
            {},
            frozen.original,
            (*frozen.warnings, *default_warnings, *warnings),
            layers=origins.layers_by_node(prepared),
            given=original,
        )
    )


#: Ops that keep values outside of the graph.
_STATE = list_types_with(
    Role.VARIABLE,
    Role.READ,
    Role.REFERENCE_VARIABLE,
    Role.LOOKUP_TABLE,
    Role.LOOKUP,
    Role.LOOKUP_SIZE,
)


def _refuse_state(graph: TensorGraph, signature: ServedSignature) -> None:
    needed = graph.prune_unused(signature.output_tensors, signature.input_tensors)
    fed = set(map(get_node_name, signature.input_tensors))
    for node in needed.nodes.values():
        if node.op in _STATE:
            raise ModelLoadError(
                f"a graph must contain its values, but node {node.name!r} ({node.op}) keeps them "
                f"outside of the graph; pass the SavedModel folder, the Keras model, or a frozen "
                f"graph"
            )
        if node.op in PLACEHOLDERS and node.name not in fed:
            kind = tf.as_dtype(node.attr["dtype"].type)
            if kind in (tf.resource, tf.variant):
                raise unfreezable_resource_error(node.name)
            raise ModelLoadError(
                f"inputs must include {node.name!r}, which the outputs need, got "
                f"{', '.join(sorted(fed)) or 'none'}"
            )


def with_inferred_shapes(graph: TensorGraph, signature: ServedSignature) -> ServedSignature:
    """Return the signature with shapes of inputs of unknown rank, inferred from their readers.

    A convolution determines the rank and channels (as many as its weight has, or a multiple), a
    matrix product the columns.
    """
    if all(port.shape is not None for port in signature.inputs):
        return signature
    readers = graph.find_consumers()
    inputs = (
        replace(port, shape=_find_required_shape(graph, readers, port.tensor))
        if port.shape is None
        else port
        for port in signature.inputs
    )
    return replace(signature, inputs=tuple(inputs))


def with_inferred_ranks(signature: ServedSignature, inferred: ServedSignature) -> ServedSignature:
    """Return the signature with only the ranks of the inferred shapes."""
    pairs = zip(signature.inputs, inferred.inputs, strict=True)
    inputs = (
        replace(port, shape=None if guess.shape is None else (None,) * len(guess.shape))
        if port.shape is None
        else port
        for port, guess in pairs
    )
    return replace(signature, inputs=tuple(inputs))


def check_generated(
    graph: TensorGraph, signature: ServedSignature, feeds: dict[str, Array]
) -> None:
    """Check that a graph with inputs of unknown shape accepts generated inputs.

    The check uses shape inference, as running such a graph may end the process.

    Raises:
        DataError: the graph does not accept the inputs.
    """
    unknown = [port for port in signature.inputs if port.shape is None]
    if not unknown:
        return
    sized = graph.copy_graph()
    for tensor, array in feeds.items():
        node = graph.nodes.get(get_node_name(tensor))
        if node is not None and node.op in PLACEHOLDERS:
            shape = sized.edit_node(node.name).attr["shape"].shape
            shape.CopyFrom(tf.TensorShape(array.shape).as_proto())
    try:
        import_runnable(without_large(sized))
    except (ValueError, tf.errors.OpError) as error:
        raise DataError(
            f"the shape of input {unknown[0].name!r} must be known, but neither the graph nor data "
            f"define it; pass data (a dataloader), set inputs to example arrays, or on the command "
            f"line pass --input-shape, e.g. --input-shape 1,224,224,3"
        ) from error


def _find_required_shape(
    graph: TensorGraph, readers: dict[str, list[tuple[str, int]]], tensor: str
) -> Shape:
    """Return the shape required by the first layer that reads a tensor; None if unknown."""
    for name, position in readers.get(tensor, ()):
        node = graph.nodes[name]
        if position == 0:
            shape = _derive_input_shape(graph, node)
            keeps_shape = get_op_properties(node).shape is of_first
            if shape is None and (keeps_shape or get_op_role(node) is Role.OPTIONAL_PLACEHOLDER):
                shape = _find_required_shape(graph, readers, name)
            if shape is not None:
                return shape
    return None


def _derive_input_shape(graph: TensorGraph, node: NodeDef) -> Shape:
    if get_op_role(node) not in (Role.CONVOLUTION, Role.MATRIX_PRODUCT):
        return None
    weight = _resolve_constant(graph, list_data_inputs(node)[1])
    if weight is None:
        return None
    sizes = read_constant_shape(weight)
    if get_op_role(node) is Role.MATRIX_PRODUCT:
        columns = sizes[1 if node.attr["transpose_b"].b else 0]
        return (columns, None) if node.attr["transpose_a"].b else (None, columns)
    open_axes: list[int | None] = [None] * len(sizes)
    open_axes[1 if channels_first(node) else -1] = sizes[-2]
    return tuple(open_axes)


def _resolve_constant(graph: TensorGraph, tensor: str) -> NodeDef | None:
    node = graph.nodes.get(get_node_name(tensor))
    while node is not None and get_op_role(node) is Role.IDENTITY:
        node = graph.nodes.get(get_node_name(node.input[0]))
    return node if node is not None and node.op == CONSTANT else None


#: Larger defaults, e.g. whole images, would fill the description of a saved model.
_MAX_DEFAULT_ELEMENTS = 4096


def with_defaults(
    graph: TensorGraph, signature: ServedSignature, named: Collection[str]
) -> tuple[ServedSignature, list[str]]:
    """Return the signature with the defaults of its inputs, and warnings.

    An input whose default is computed in a run is left out, unless its name is in `named`, the
    inputs that the options or the data name. Defaults of the signature are added to the graph.
    """
    inputs, left_out = list[TensorSpec](), list[str]()
    for port in signature.inputs:
        node = graph[port.tensor]
        if port.default is not None and get_op_role(node) is Role.PLACEHOLDER:
            constant = graph.put_constant(f"{node.name}/default", port.default)
            attributes = {key: node.attr[key] for key in ("dtype", "shape") if key in node.attr}
            graph.add_node(make_node("PlaceholderWithDefault", node.name, [constant], **attributes))
        elif get_op_role(node) is Role.OPTIONAL_PLACEHOLDER and port.default is None:
            value = _compute_default(graph, node)
            if value is None and not any(map(port.answers_to, named)):
                left_out.append(port.name)
                continue
            port = replace(port, default=value)
        inputs.append(port)
    if not inputs:
        return signature, []
    warnings = [
        f"the input {name!r} is left out, because the graph computes its default; to keep the "
        f"input, name all inputs with inputs="
        for name in left_out
    ]
    return replace(signature, inputs=tuple(inputs)), warnings


def bind_defaults(graph: TensorGraph, fed: Collection[str]) -> None:
    """Replace inputs with defaults that are no inputs of the signature by their defaults."""
    for name, node in list(graph.nodes.items()):
        if get_op_role(node) is Role.OPTIONAL_PLACEHOLDER and name not in fed:
            dtype = tf.as_dtype(node.attr["dtype"].type)
            graph.add_node(make_node("Identity", name, node.input, T=dtype))


def _compute_default(graph: TensorGraph, node: NodeDef) -> Array | None:
    """Return a default of numbers that are the same in every run; None for any other."""
    part = graph.prune_unused([node.input[0]])
    computed = [inner for inner in part.nodes.values() if inner.op != CONSTANT]
    if not all(inner.op not in PLACEHOLDERS and is_pure(inner) for inner in computed):
        return None
    try:
        (value,) = Runner(import_runnable(part.to_graph_def()))({}, [node.input[0]])
    except (ConversionError, ValueError):
        return None
    value = np.asarray(value)
    return value if value.dtype.kind in "biuf" and value.size <= _MAX_DEFAULT_ELEMENTS else None


def read_declared_defaults(saved: saved_model_pb2.SavedModel, key: str) -> Mapping[str, Array]:
    """Return input → default that a signature of a SavedModel declares."""
    definitions = (
        meta.signature_def[key] for meta in saved.meta_graphs if key in meta.signature_def
    )
    values = {
        name: tf.make_ndarray(proto)
        for definition in definitions
        for name, proto in definition.defaults.items()
    }
    return {name: value for name, value in values.items() if value.dtype.kind in "biuf"}


def feeds_defaults(saved: saved_model_pb2.SavedModel) -> bool:
    """Whether an input of a signature is a placeholder with a default."""
    for meta in saved.meta_graphs:
        definitions = meta.signature_def.values()
        fed = {get_node_name(info.name) for d in definitions for info in d.inputs.values()}
        names = (n.name for n in meta.graph_def.node if get_op_role(n) is Role.OPTIONAL_PLACEHOLDER)
        if not fed.isdisjoint(names):
            return True
    return False
