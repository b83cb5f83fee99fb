"""Constants computed once, identities taken out, batch norms put into convolutions."""

from __future__ import annotations

import logging
from pathlib import Path

import numpy as np
import onnx_ir as ir

from neural_mp.adaptors.common.affine import Affine
from neural_mp.adaptors.onnxrt.nodes import (
    GraphNames,
    array_of,
    forget_types,
    graphs_in,
    input_of,
    put_input,
    used_outputs,
)
from neural_mp.adaptors.onnxrt.sessions import PLAIN, Runner, bytes_of
from neural_mp.errors import ConversionError

logger = logging.getLogger(__name__)

#: Bytes of a computed constant that are no matter.
_SMALL = 1 << 16
#: What gives another result every time it runs, and what a model that is quantized already holds.
_LEFT = (
    *("RandomNormal", "RandomUniform", "RandomNormalLike", "RandomUniformLike", "Multinomial"),
    *("Bernoulli", "Dropout", "QuantizeLinear", "DequantizeLinear"),
)
#: The types of constants that are computed.
_NUMBERS = (
    *(ir.DataType.FLOAT, ir.DataType.DOUBLE, ir.DataType.FLOAT16, ir.DataType.BOOL),
    *(ir.DataType.INT8, ir.DataType.INT16, ir.DataType.INT32, ir.DataType.INT64),
    *(ir.DataType.UINT8, ir.DataType.UINT16, ir.DataType.UINT32, ir.DataType.UINT64),
)


def remove_identity(graph: ir.Graph, node: ir.Node) -> None:
    """Let what reads the result of an identity read what that reads."""
    if node.domain or node.op_type not in ("Identity", "Dropout") or node.inputs[0] is None:
        return
    told = input_of(node, 2)
    trains = np.array(0) if told is None else array_of(told)
    same = node.op_type == "Identity" or (
        len(used_outputs(node)) == 1 and trains is not None and not trains.any()
    )
    # Of graphs within the graph, too: such an output must be computed there.
    if same and not node.outputs[0].is_graph_output():
        node.outputs[0].replace_all_uses_with(node.inputs[0])
        graph.remove(node, safe=True)


def fold_constants(program: ir.Model, names: GraphNames, folder: Path | None) -> None:
    """Compute, in ONNX Runtime, what depends on constants only, where that takes no more room."""
    graph = program.graph
    nodes = _computable(graph)
    inside = set(nodes)
    results = [
        value
        for node in nodes
        for value in node.outputs
        if not value.is_graph_output() and any(use.node not in inside for use in value.uses())
    ]
    if not results:
        return
    try:
        part = ir.convenience.extract(graph, [], results)
        forget_types(part)  # those of sequences are wrong
        small = ir.Model(part, ir_version=program.ir_version)
        values = Runner(small, folder, level=PLAIN)({}, [str(value.name) for value in results])
    except ConversionError:
        logger.debug("constants are left as they are", exc_info=True)
        return
    room = max(_SMALL, sum(bytes_of(value) for node in nodes for value in node.inputs))
    for value, array in zip(results, values, strict=True):
        if array.nbytes <= room:
            value.replace_all_uses_with(names.constant(f"{value.name}_folded", array))


def _computable(graph: ir.Graph) -> list[ir.Node]:
    """The nodes that read constants only."""
    found: list[ir.Node] = []
    known = {value for value in graph.initializers.values() if value.const_value is not None}
    for node in graph:
        inputs = [value for value in node.inputs if value is not None]
        if (
            inputs
            and known.issuperset(inputs)
            and node.op_type not in _LEFT
            and all(_is_number(value) for value in (*inputs, *node.outputs))
            and not list(graphs_in(node))
        ):
            found.append(node)
            known.update(node.outputs)
    return found


def _is_number(value: ir.Value) -> bool:
    return isinstance(value.type, ir.TensorType) and value.dtype in _NUMBERS


def fold_batch_norm(graph: ir.Graph, node: ir.Node, names: GraphNames) -> None:
    """Put a batch norm into the convolution whose result nobody else reads."""
    if node.op_type != "BatchNormalization" or node.domain or len(node.inputs) != 5:
        return
    conv = node.inputs[0].producer() if node.inputs[0] is not None else None
    if conv is None or conv.op_type != "Conv" or len(used_outputs(node)) > 1:
        return
    between, given = conv.outputs[0], input_of(conv, 2)
    training = node.attributes.get_int("training_mode", 0)
    if between.is_graph_output() or len(between.uses()) != 1 or training:
        return
    parameters = [array_of(value) for value in node.inputs[1:]]
    weight, bias = array_of(conv.inputs[1]), array_of(given)
    if weight is None or any(p is None for p in parameters) or (given is not None and bias is None):
        return
    if weight.dtype != np.float32:
        return
    affine = Affine.identity(len(weight))
    if bias is not None:
        affine.then_add(bias)
    affine.then_normalize(parameters, node.attributes.get_float("epsilon", 1e-5))
    scaled = weight * affine.scale.reshape(-1, *[1] * (weight.ndim - 1))
    for position, stem, folded in ((1, "weight", scaled), (2, "bias", affine.shift)):
        value = names.constant(f"{conv.name}.{stem}_folded", folded.astype(np.float32))
        put_input(conv, position, value)
    result = node.outputs[0]
    result.replace_all_uses_with(between, replace_graph_outputs=True)
    name = result.name
    graph.remove(node, safe=True)
    between.name = name
