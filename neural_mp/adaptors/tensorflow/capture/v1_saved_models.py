"""SavedModels of TensorFlow 1, and of TensorFlow 2 if their objects cannot be restored.

A session loads such a folder as a plain graph with variables. Each input of a signature is replaced
by a placeholder, whatever op computes it, with the effect of feeding.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
import tensorflow as tf
from tensorflow.core.protobuf import meta_graph_pb2, saved_model_pb2

from neural_mp.adaptors.common.signatures.signature import TensorSpec
from neural_mp.adaptors.tensorflow.capture.lookup_tables import (
    Export,
    freeze_tables,
    trace_table_handles,
)
from neural_mp.adaptors.tensorflow.files.graph_checks import check_saved_model
from neural_mp.adaptors.tensorflow.files.graph_files import UNREADABLE, parse_message
from neural_mp.adaptors.tensorflow.graph.ops import Role, get_op_role, list_types_with
from neural_mp.adaptors.tensorflow.graph.runtime import run_offline_passes
from neural_mp.adaptors.tensorflow.graph.tensor_graph import (
    Array,
    GraphDef,
    TensorGraph,
    get_node_name,
    get_output_index,
    list_known_sizes,
    make_node,
    plain_name,
)
from neural_mp.adaptors.tensorflow.model import DEFAULT_KEY, ServedSignature
from neural_mp.errors import ModelLoadError, one_line
from neural_mp.util.pytree import Structure

#: Tag of graphs for inference.
SERVE = "serve"
#: Ops that return the value of a resource variable.
_READS = list_types_with(Role.READ)


def read_v1_model(path: Path) -> tuple[TensorGraph, ServedSignature]:
    """Return the frozen graph of a SavedModel, and its signature.

    Raises:
        ModelLoadError: there are several graphs or signatures without a default, or the variables
            cannot be restored.
    """
    meta = _choose_meta_graph(path, parse_checked(path, session=True).meta_graphs)
    key = _choose_graph_signature(path, meta.signature_def)
    signature = meta.signature_def[key]
    with tf.Graph().as_default() as graph, tf.compat.v1.Session(graph=graph) as session:
        try:
            tf.compat.v1.saved_model.loader.load(session, list(meta.meta_info_def.tags), str(path))
            frozen = _freeze_signature(session, graph, signature)
        except ModelLoadError:
            raise
        except Exception as error:
            # Parsers, restore ops and table initializers raise various types.
            raise ModelLoadError(
                f"the SavedModel {str(path)!r} cannot be read: {one_line(error)}; freeze it in the "
                f"environment that created it "
                f"(tf.compat.v1.graph_util.convert_variables_to_constants) and pass the .pb file, "
                f"its inputs and outputs"
            ) from error
        inputs, outputs = (
            tuple(_spec_from_info(graph, name, info) for name, info in sorted(ports.items()))
            for ports in (signature.inputs, signature.outputs)
        )
    returns: Structure = {port.name: i for i, port in enumerate(outputs)}
    return (
        TensorGraph.from_graph_def(frozen),
        ServedSignature(inputs, outputs, 0 if len(outputs) == 1 else returns, (key,)),
    )


def parse_checked(path: Path, *, session: bool) -> saved_model_pb2.SavedModel:
    """Return the parsed file of a SavedModel after `check_saved_model`.

    Raises:
        ModelLoadError: the file cannot be read, or the model does more.
    """
    proto = saved_model_pb2.SavedModel()
    binary = path / "saved_model.pb"
    file = binary if binary.is_file() else binary.with_suffix(".pbtxt")
    try:
        parse_message(file, proto)
    except UNREADABLE as error:
        raise ModelLoadError(
            f"the SavedModel {str(path)!r} cannot be read: {one_line(error)}"
        ) from error
    check_saved_model(proto, file, session=session)
    return proto


def _choose_meta_graph(
    path: Path, graphs: Sequence[meta_graph_pb2.MetaGraphDef]
) -> meta_graph_pb2.MetaGraphDef:
    if not graphs:
        raise ModelLoadError(f"the SavedModel {str(path)!r} cannot be read: it holds no graph")
    by_tags = {tuple(sorted(graph.meta_info_def.tags)): graph for graph in graphs}
    if (SERVE,) in by_tags:
        return by_tags[SERVE,]
    if len(graphs) == 1:
        return graphs[0]
    tags = "; ".join(", ".join(tag_names) or "none" for tag_names in by_tags)
    raise ModelLoadError(
        f"the SavedModel {str(path)!r} must have one graph tagged {SERVE!r} alone, got "
        f"{len(graphs)} graphs, by their tags: {tags}; save the graph to convert alone"
    )


def _choose_graph_signature(
    path: Path, signatures: Mapping[str, meta_graph_pb2.SignatureDef]
) -> str:
    # Names of initialization signatures start with two underscores.
    keys = [key for key in signatures if not key.startswith("__") and signatures[key].outputs]
    if DEFAULT_KEY in keys:
        return DEFAULT_KEY
    if len(keys) == 1:
        return keys[0]
    raise ModelLoadError(
        f"the SavedModel {str(path)!r} must have one signature, or one named {DEFAULT_KEY!r}, got "
        f"{', '.join(keys) or 'none'}"
    )


def _freeze_signature(
    session: tf.compat.v1.Session, graph: tf.Graph, signature: meta_graph_pb2.SignatureDef
) -> GraphDef:
    """Return the subgraph between the ports of a signature, with variables as constants."""
    nodes = TensorGraph.from_graph_def(graph.as_graph_def())
    outputs = [get_node_name(info.name) for info in signature.outputs.values()]
    for _, info in sorted(signature.inputs.items()):
        _replace_with_placeholder(nodes, graph, info, outputs)
    inputs = [get_node_name(info.name) for info in signature.inputs.values()]
    needed = nodes.prune_unused(outputs, inputs)
    if Role.LOOKUP_TABLE in map(get_op_role, needed.nodes.values()):
        needed = _with_frozen_tables(needed, session, graph, inputs, outputs)
    return tf.compat.v1.graph_util.convert_variables_to_constants(
        session, needed.to_graph_def(), sorted({*outputs, *inputs})
    )


def _with_frozen_tables(
    nodes: TensorGraph,
    session: tf.compat.v1.Session,
    graph: tf.Graph,
    inputs: Sequence[str],
    outputs: Sequence[str],
) -> TensorGraph:
    inlined = run_offline_passes(nodes.to_graph_def(), ["function"], inputs, outputs)
    tensor_graph = TensorGraph.from_graph_def(inlined).prune_unused(outputs, inputs)
    tables = [
        name for name, node in tensor_graph.nodes.items() if get_op_role(node) is Role.LOOKUP_TABLE
    ]

    def export_arrays(export: Export) -> list[Array]:
        with graph.as_default():
            tensors = export.export_table(graph.get_tensor_by_name(f"{export.handle}:0"))
        return [np.asarray(array) for array in session.run(tensors)]

    freeze_tables(
        tensor_graph, trace_table_handles(tensor_graph, tables, loops=True), export_arrays
    )
    return tensor_graph.prune_unused(outputs, inputs)


def _replace_with_placeholder(
    nodes: TensorGraph, graph: tf.Graph, info: meta_graph_pb2.TensorInfo, outputs: Sequence[str]
) -> None:
    """Replace a tensor by a placeholder, unless it is one; for a variable, replace its value.

    A resource variable is read separately for each use, so a signature may name a read that no
    output needs. The value of the variable is meant: all reads return the fed value.
    """
    name, tensor = get_node_name(info.name), graph.get_tensor_by_name(info.name)
    if get_output_index(info.name) or len(tensor.op.outputs) > 1:
        raise ModelLoadError(
            f"inputs must be results of ops with one result, got {info.name!r}, one of several"
        )
    if get_op_role(nodes.nodes[name]) is Role.OPTIONAL_PLACEHOLDER:
        return
    dtype = tf.as_dtype(info.dtype).base_dtype
    shape = tf.TensorShape(info.tensor_shape)
    nodes.add_node(make_node("Placeholder", name, dtype=dtype, shape=shape))
    variable = tensor if tensor.dtype is tf.resource else None
    if tensor.op.type in _READS and name not in nodes.prune_unused(outputs):
        (variable,) = tensor.op.inputs
    if variable is not None:
        for reader in variable.consumers():
            if reader.type in _READS and reader.name != name:
                nodes.add_node(make_node("Identity", reader.name, [name], T=dtype))


def _spec_from_info(graph: tf.Graph, name: str, info: meta_graph_pb2.TensorInfo) -> TensorSpec:
    dtype = tf.as_dtype(info.dtype).base_dtype
    shape = tf.TensorShape(info.tensor_shape)
    if not info.HasField("tensor_shape"):
        shape = graph.get_tensor_by_name(info.name).shape
    return TensorSpec(
        name, plain_name(info.name), np.dtype(dtype.as_numpy_dtype), list_known_sizes(shape)
    )
