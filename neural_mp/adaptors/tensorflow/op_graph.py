"""Conversion of a TensorFlow graph to the framework-neutral `OpGraph`."""

from __future__ import annotations

from neural_mp.adaptors.tensorflow.graph.ops import LAYERS
from neural_mp.adaptors.tensorflow.graph.tensor_graph import (
    NodeDef,
    constant_size,
    data_inputs,
    node_of,
    result_dtypes,
)
from neural_mp.adaptors.tensorflow.model import TensorFlowModel
from neural_mp.adaptors.tensorflow.profiler import PRECISIONS
from neural_mp.core.graph import MIN_CONSTANT_ELEMENTS, Op, OpGraph
from neural_mp.core.precision import Precision


def build_graph(model: TensorFlowModel) -> OpGraph:
    """Return the graph of all ops that compute something."""
    fusion_group_of = model.structure.layer_of
    fed = list(map(node_of, model.signature.input_tensors))
    names = {*fed, *(node.name for node in model.op_nodes)}
    ops = []
    for node in model.op_nodes:
        sources = (node_of(tensor) for tensor in data_inputs(node))
        ops.append(
            Op(
                node.name,
                node.op,
                tuple(source for source in sources if source in names),
                fusion_group=fusion_group_of.get(node.name),
                quantize_agnostic=node.name in model.structure.agnostic_ops,
                writes_int8=node.op in LAYERS
                and not LAYERS[node.op].is_dense,  # whose integer kernel cannot write floats
                weights=sum(map(constant_size, model.graph.constants_of(node))),
                constants=tuple(
                    constant.name
                    for constant in model.graph.constants_of(node)
                    if constant_size(constant) >= MIN_CONSTANT_ELEMENTS
                ),
                layers=model.layers.get(node.name, ()),
                shape=next(iter(model.shapes.fixed.get(node.name, ())), None),
                source_precision=_source_precision(model, node),
                widened=model.given is not None,
            )
        )
    return OpGraph(ops, fed, [name for name in model.output_nodes if name in names])


def _source_precision(model: TensorFlowModel, node: NodeDef) -> Precision:
    """Return the precision of an op in the graph as given, or of the op that it is a part of."""
    if model.given is not None:
        scopes = node.name.split("/")
        names = ("/".join(scopes[:end]) for end in range(len(scopes), 0, -1))
        node = next((model.given.nodes[name] for name in names if name in model.given), node)
    return PRECISIONS.get(next(iter(result_dtypes(node)), None), Precision.FP32)
