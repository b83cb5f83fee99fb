"""Graph files, properties of a bare graph (inputs, outputs, validity), and SavedModels."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import tensorflow as tf
from google.protobuf import text_format
from google.protobuf.message import DecodeError, EncodeError, Message
from tensorflow.core.protobuf import meta_graph_pb2, saved_model_pb2
from tensorflow.python.framework import function_def_to_graph

from neural_mp.adaptors.common.named_graphs import (
    CONVERTED,
    LATER,
    collect_model_details,
    read_details,
    restore_example_inputs,
    write_details,
)
from neural_mp.adaptors.common.signatures.boundary import Boundary
from neural_mp.adaptors.common.signatures.signature import Signature, TensorSpec
from neural_mp.adaptors.tensorflow.files.graph_checks import check_graph
from neural_mp.adaptors.tensorflow.graph.control_flow import drop_unreachable
from neural_mp.adaptors.tensorflow.graph.ops import (
    CONTROL_FLOW,
    PLACEHOLDERS,
    Role,
    get_op_role,
    list_types_with,
)
from neural_mp.adaptors.tensorflow.graph.runtime import import_graph, import_runnable
from neural_mp.adaptors.tensorflow.graph.tensor_graph import (
    CONSTANT,
    GraphDef,
    TensorGraph,
    get_node_name,
    indexed_name,
    list_data_inputs,
    make_node,
    without_large,
)
from neural_mp.adaptors.tensorflow.model import ServedSignature, TensorFlowModel
from neural_mp.errors import ConfigurationError, ConversionError, ModelLoadError, did_you_mean
from neural_mp.util.validators import mapping_of, preview_value, record, string

#: Suffixes of graph files.
SUFFIXES = (".pb", ".pbtxt")
#: Errors that damaged files and unexpected contents raise.
UNREADABLE = (DecodeError, text_format.ParseError, UnicodeDecodeError, OSError, RecursionError)
#: Ops with unread results that are not outputs.
_NO_OUTPUTS = {
    CONSTANT,
    *PLACEHOLDERS,
    *list_types_with(Role.NOTHING, Role.CHECK),
    *CONTROL_FLOW.difference(list_types_with(Role.MERGE, Role.EXIT)),
}


def read_graph(path: Path, ports: Iterable[str] = ()) -> tuple[GraphDef, list[str]]:
    """Return the graph in a `.pb` or `.pbtxt` file without unreachable nodes, and warnings.

    `ports` are the names of the outputs and inputs if the user named the outputs.

    Raises:
        ModelLoadError: the file is of another type, damaged or cut off.
    """
    if path.suffix not in SUFFIXES:
        raise ModelLoadError(
            f"a TensorFlow model must be a SavedModel folder or a file that ends in .keras, .h5, "
            f"{' or '.join(SUFFIXES)}, got {str(path)!r}"
        )
    graph = GraphDef()
    try:
        parse_message(path, graph)
    except UNREADABLE as error:
        raise ModelLoadError(
            f"{str(path)!r} is not a graph file, or damaged: {str(error).splitlines()[0]}"
        ) from error
    if not graph.node:
        raise ModelLoadError(f"the graph in {str(path)!r} must have nodes, got none")
    # Only the reachable part is checked: TensorFlow never sees the rest.
    drop_unreachable(graph, ports)
    check_graph(graph, f"the graph in {str(path)!r}")
    if graph.versions.producer or path.suffix != ".pb":
        return graph, []
    # The version follows the nodes, so a file that was cut between two nodes lacks the version.
    return graph, [
        f"{str(path)!r} records no TensorFlow version, as if the file were cut off; check that the "
        f"outputs are the right ones"
    ]


def parse_message(path: Path, message: Message) -> None:
    """Parse a file into a message: binary if its name ends in `.pb`, else text.

    Raises:
        Exception: one of `UNREADABLE`.
    """
    if path.suffix == ".pb":
        message.ParseFromString(path.read_bytes())
    else:
        text_format.Parse(path.read_text(encoding="utf-8"), message)
        # Nesting too deep for the binary format would otherwise fail on the first copy.
        message.ParseFromString(message.SerializeToString())


def write_graph(graph: GraphDef, path: Path) -> None:
    """Write a graph as `.pb` or `.pbtxt`, depending on the file name."""
    if path.suffix == ".pbtxt":
        path.write_text(text_format.MessageToString(graph), encoding="utf-8")
    else:
        path.write_bytes(graph.SerializeToString(deterministic=True))


def import_checked(graph: GraphDef, what: str) -> tf.Graph:
    """Return the graph as imported, and thereby checked, by TensorFlow.

    Raises:
        ModelLoadError: the graph, or a function in its library, has unknown ops or is incomplete.
    """
    try:
        loaded = import_graph(without_large(graph))
        with loaded.as_default():
            # Importing a graph checks only the signatures of the functions in its library.
            for function in graph.library.function:
                if not function.signature.attr:  # otherwise types are set by the caller
                    import_runnable(function_def_to_graph.function_def_to_graph_def(function)[0])
    except (ValueError, KeyError, TypeError, tf.errors.OpError) as error:
        lines = str(error).strip().splitlines()
        raise ModelLoadError(
            f"the installed TensorFlow cannot run {what}: {lines[0] if lines else error}"
        ) from error
    return loaded


def find_tensor_named(graph: tf.Graph, name: str, option: str) -> tf.Tensor:
    """Return a tensor of a graph by its name, with or without `:0`.

    Raises:
        ConfigurationError: the graph has no such tensor.
    """
    try:
        return graph.get_tensor_by_name(indexed_name(name))
    except (KeyError, ValueError):
        names = [o.name for o in graph.get_operations() if o.type != CONSTANT and o.outputs]
        raise ConfigurationError(
            f"{option} names {name!r}, which is not a tensor of the graph"
            f"{did_you_mean(get_node_name(name), names)}"
        ) from None


def find_loose_ends(graph: TensorGraph, checked_graph: tf.Graph) -> tuple[str, ...]:
    """Return the nodes with unread results: the outputs of a graph that names none."""
    read_by_others = {
        get_node_name(t) for node in graph.nodes.values() for t in list_data_inputs(node)
    }
    return tuple(
        name
        for name, node in graph.nodes.items()
        if name not in read_by_others
        and node.op not in _NO_OUTPUTS
        # An Identity of a Switch only marks a branch of control flow.
        and not (
            get_op_role(node) is Role.IDENTITY and get_op_role(graph[node.input[0]]) is Role.SWITCH
        )
        and checked_graph.get_operation_by_name(name).outputs
    )


def reachable_placeholders(graph: TensorGraph, outputs: tuple[str, ...]) -> tuple[str, ...]:
    """Return the placeholders that the outputs depend on, in file order."""
    defined = [name for name in outputs if name in graph]
    needed = graph.prune_unused(defined).nodes if defined else graph.nodes
    return tuple(
        name for name, node in graph.nodes.items() if node.op in PLACEHOLDERS and name in needed
    )


def cut_at(graph: TensorGraph, checked_graph: tf.Graph, inputs: tuple[str, ...]) -> None:
    """Replace every computed tensor named as an input by a placeholder."""
    for name in inputs:
        if name not in graph or graph[name].op in PLACEHOLDERS:
            continue
        tensor = find_tensor_named(checked_graph, name, "inputs")
        if len(tensor.op.outputs) > 1:
            raise ConfigurationError(
                f"inputs must name ops with one result, got {name!r}, one of "
                f"{len(tensor.op.outputs)} results of an op"
            )
        graph.add_node(
            make_node("Placeholder", get_node_name(name), dtype=tensor.dtype, shape=tensor.shape)
        )


MODEL_FILE = "saved_model.pb"
DETAILS_FILE = "details.json"
_PREDICT = "tensorflow/serving/predict"


def save_model(model: TensorFlowModel, folder: Path) -> None:
    """Write a SavedModel with one frozen graph and its signature.

    Raises:
        ConversionError: the graph exceeds the format's limit of 2 GB.
    """
    saved = saved_model_pb2.SavedModel(saved_model_schema_version=1)
    meta = saved.meta_graphs.add()
    meta.meta_info_def.tags.append(tf.saved_model.SERVING)
    meta.meta_info_def.tensorflow_version = tf.__version__
    meta.meta_info_def.tensorflow_git_version = tf.__git_version__
    meta.graph_def.CopyFrom(model.source.to_graph_def())
    for key in model.signature.keys:
        definition = meta.signature_def[key]
        definition.method_name = _PREDICT
        for port in model.signature.inputs:
            definition.inputs[port.name].CopyFrom(_info_from_spec(port))
            if port.default is not None:
                definition.defaults[port.name].CopyFrom(tf.make_tensor_proto(port.default))
        for port in model.signature.outputs:
            definition.outputs[port.name].CopyFrom(_info_from_spec(port))
    try:
        data = saved.SerializeToString(deterministic=True)
    except (EncodeError, ValueError) as error:
        raise ConversionError(f"the model cannot be written as a SavedModel: {error}") from error
    (folder / MODEL_FILE).write_bytes(data)
    (folder / "variables").mkdir()
    details = collect_model_details(
        model.signature, model.example, model.ops, model.results, model.counts
    )
    write_details(folder / DETAILS_FILE, {**details, "written": dict(model.written)})


def transfer_folder(model: TensorFlowModel, folder: Path) -> Path:
    """Write a SavedModel for another runtime; return its folder."""
    fed = set(map(get_node_name, model.signature.input_tensors))
    save_model(replace(model, graph=without_defaults(model.source, fed), given=None), folder)
    return folder


def without_defaults(graph: TensorGraph, fed: Collection[str]) -> TensorGraph:
    """Return the graph with plain placeholders: other runtimes take a default for a constant."""
    plain_inputs = graph.copy_graph()
    for name in fed:
        node = graph.nodes[name]
        if get_op_role(node) is Role.OPTIONAL_PLACEHOLDER:
            attributes = {key: node.attr[key] for key in ("dtype", "shape") if key in node.attr}
            plain_inputs.add_node(make_node("Placeholder", name, **attributes))
    return plain_inputs


def model_boundary(model: TensorFlowModel) -> Boundary:
    """Return the calls of a model."""
    signature = model.signature
    return Boundary("tensorflow", Signature(signature.inputs, signature.outputs, signature.returns))


def save_file(model: TensorFlowModel, path: Path, metadata: Mapping[str, str]) -> None:
    """Write a frozen graph as `.pb` or `.pbtxt`, without the metadata."""
    write_graph(model.source.to_graph_def(), path)


def dump_graph(model: TensorFlowModel, path: Path) -> tuple[Path, ...]:
    """Write a frozen graph in both formats, as text with placeholders for large constants."""
    graph = model.source.to_graph_def()
    files = {path.with_suffix(".pb"): graph, path.with_suffix(".pbtxt"): without_large(graph)}
    for file, content in files.items():
        write_graph(content, file)
    return tuple(files)


def restore_model(folder: Path) -> TensorFlowModel:
    """Load a model written by `save_model`."""
    path = folder / MODEL_FILE
    saved = saved_model_pb2.SavedModel()
    try:
        saved.ParseFromString(path.read_bytes())
        graph = saved.meta_graphs[0].graph_def
        check_graph(graph, f"the graph in {str(path)!r}")
        tf_graph = import_graph(graph)
    except (DecodeError, IndexError, OSError, ValueError, tf.errors.OpError) as error:
        raise ModelLoadError(f"{str(path)!r} is missing or damaged: {error}") from error
    signature, details = read_details(folder / DETAILS_FILE, _parse_details)
    _check_ports(signature, tf_graph, folder / DETAILS_FILE)
    return TensorFlowModel(
        TensorGraph.from_graph_def(graph),
        signature,
        restore_example_inputs(signature, details),
        details["ops"],
        counts=details["counts"],
        # Earlier versions did not write the key; `ops` serves instead.
        written=details.get("written", details["ops"]),
        results=details.get("results", {}),
    )


def _check_ports(signature: ServedSignature, graph: tf.Graph, file: Path) -> None:
    """Raise `ModelLoadError` unless the graph has all tensors of the signature."""
    for port in (*signature.inputs, *signature.outputs):
        try:
            tensor = graph.get_tensor_by_name(indexed_name(port.tensor))
            matches = port.dtype is None or tf.as_dtype(port.dtype) == tensor.dtype
            if port in signature.inputs:
                matches = matches and tensor.shape.is_compatible_with(port.shape)
        except (KeyError, ValueError, TypeError):
            matches = False
        if not matches:
            raise ModelLoadError(
                f"{str(file)!r}: the graph has no tensor {preview_value(str(port))}"
            )


def _parse_details(value: object) -> tuple[ServedSignature, dict[str, Any]]:
    return ServedSignature.from_dict(value), _DETAILS(value)


_DETAILS = record(CONVERTED, {**LATER, "written": mapping_of(string)})


def _info_from_spec(port: TensorSpec) -> meta_graph_pb2.TensorInfo:
    return meta_graph_pb2.TensorInfo(
        name=indexed_name(port.tensor),
        dtype=tf.as_dtype(port.dtype).as_datatype_enum,
        tensor_shape=tf.TensorShape(port.shape).as_proto(),
    )
