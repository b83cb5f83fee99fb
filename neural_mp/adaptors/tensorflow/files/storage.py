"""Storage of models as SavedModels that TensorFlow and TensorFlow Serving can run."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import tensorflow as tf
from google.protobuf.message import DecodeError, EncodeError
from tensorflow.core.protobuf import meta_graph_pb2, saved_model_pb2

from neural_mp.adaptors.common.named_graphs.model_metadata import (
    CONVERTED,
    LATER,
    details_of,
    read_details,
    restored_example,
    write_details,
)
from neural_mp.adaptors.common.signatures.boundary import Boundary
from neural_mp.adaptors.common.signatures.signature import Signature, TensorSpec
from neural_mp.adaptors.tensorflow.files import graph_files
from neural_mp.adaptors.tensorflow.files.graph_checks import check_graph
from neural_mp.adaptors.tensorflow.graph.ops import Role, role_of
from neural_mp.adaptors.tensorflow.graph.runtime import imported
from neural_mp.adaptors.tensorflow.graph.tensor_graph import (
    TensorGraph,
    indexed,
    make_node,
    node_of,
    without_large,
)
from neural_mp.adaptors.tensorflow.model import ServedSignature, TensorFlowModel
from neural_mp.errors import ConversionError, ModelLoadError
from neural_mp.util.validators import mapping_of, preview, record, string

MODEL_FILE = "saved_model.pb"
DETAILS_FILE = "details.json"
_PREDICT = "tensorflow/serving/predict"


def save(model: TensorFlowModel, folder: Path) -> None:
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
    details = details_of(model.signature, model.example, model.ops, model.results, model.counts)
    write_details(folder / DETAILS_FILE, {**details, "written": dict(model.written)})


def transfer_folder(model: TensorFlowModel, folder: Path) -> Path:
    """Write a SavedModel for another runtime; return its folder."""
    fed = set(map(node_of, model.signature.input_tensors))
    save(replace(model, graph=without_defaults(model.source, fed), given=None), folder)
    return folder


def without_defaults(graph: TensorGraph, fed: Collection[str]) -> TensorGraph:
    """Return the graph with plain placeholders: other runtimes take a default for a constant."""
    plain_inputs = graph.copy()
    for name in fed:
        node = graph.nodes[name]
        if role_of(node) is Role.OPTIONAL_PLACEHOLDER:
            attributes = {key: node.attr[key] for key in ("dtype", "shape") if key in node.attr}
            plain_inputs.add(make_node("Placeholder", name, **attributes))
    return plain_inputs


def boundary(model: TensorFlowModel) -> Boundary:
    """Return the calls of a model."""
    signature = model.signature
    return Boundary("tensorflow", Signature(signature.inputs, signature.outputs, signature.returns))


def save_file(model: TensorFlowModel, path: Path, metadata: Mapping[str, str]) -> None:
    """Write a frozen graph as `.pb` or `.pbtxt`, without the metadata."""
    graph_files.write(model.source.to_graph_def(), path)


def dump_graph(model: TensorFlowModel, path: Path) -> tuple[Path, ...]:
    """Write a frozen graph in both formats, as text with placeholders for large constants."""
    graph = model.source.to_graph_def()
    files = {path.with_suffix(".pb"): graph, path.with_suffix(".pbtxt"): without_large(graph)}
    for file, content in files.items():
        graph_files.write(content, file)
    return tuple(files)


def restore(folder: Path) -> TensorFlowModel:
    """Load a model written by `save`."""
    path = folder / MODEL_FILE
    saved = saved_model_pb2.SavedModel()
    try:
        saved.ParseFromString(path.read_bytes())
        graph = saved.meta_graphs[0].graph_def
        check_graph(graph, f"the graph in {str(path)!r}")
        tf_graph = imported(graph)
    except (DecodeError, IndexError, OSError, ValueError, tf.errors.OpError) as error:
        raise ModelLoadError(f"{str(path)!r} is missing or damaged: {error}") from error
    signature, details = read_details(folder / DETAILS_FILE, _parse_details)
    _check_ports(signature, tf_graph, folder / DETAILS_FILE)
    return TensorFlowModel(
        TensorGraph.from_graph_def(graph),
        signature,
        restored_example(signature, details),
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
            tensor = graph.get_tensor_by_name(indexed(port.tensor))
            matches = port.dtype is None or tf.as_dtype(port.dtype) == tensor.dtype
            if port in signature.inputs:
                matches = matches and tensor.shape.is_compatible_with(port.shape)
        except (KeyError, ValueError, TypeError):
            matches = False
        if not matches:
            raise ModelLoadError(f"{str(file)!r}: the graph has no tensor {preview(str(port))}")


def _parse_details(value: object) -> tuple[ServedSignature, dict[str, Any]]:
    return ServedSignature.from_dict(value), _DETAILS(value)


_DETAILS = record(CONVERTED, {**LATER, "written": mapping_of(string)})


def _info_from_spec(port: TensorSpec) -> meta_graph_pb2.TensorInfo:
    return meta_graph_pb2.TensorInfo(
        name=indexed(port.tensor),
        dtype=tf.as_dtype(port.dtype).as_datatype_enum,
        tensor_shape=tf.TensorShape(port.shape).as_proto(),
    )
