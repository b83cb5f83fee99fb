"""Constants computed once, identities taken out, batch norms put into convolutions."""

from __future__ import annotations

import logging
from pathlib import Path

import numpy as np
import onnx_ir as ir

from neural_mp.adaptors.onnxrt.naming import constant
from neural_mp.adaptors.onnxrt.sessions import PLAIN, Runner, array_of, bytes_of
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


def used_outputs(node: ir.Node) -> list[ir.Value]:
    """The results that somebody reads, the first included."""
    return [
        value
        for index, value in enumerate(node.outputs)
        if index == 0 or value.uses() or value.is_graph_output()
    ]


def remove_identity(graph: ir.Graph, node: ir.Node) -> None:
    """Let what reads the result of an identity read what that reads."""
    if node.domain or node.op_type not in ("Identity", "Dropout") or node.inputs[0] is None:
        return
    trains = array_of(node.inputs[2]) if len(node.inputs) > 2 and node.inputs[2] else np.array(0)
    same = node.op_type == "Identity" or (
        len(used_outputs(node)) == 1 and trains is not None and not trains.any()
    )
    # Of graphs within the graph, too: such an output must be computed there.
    if same and not node.outputs[0].is_graph_output():
        node.outputs[0].replace_all_uses_with(node.inputs[0])
        graph.remove(node, safe=True)


def fold_constants(program: ir.Model, folder: Path | None) -> None:
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
        values = _computed(program, nodes, results, folder)
    except ConversionError:
        logger.debug("constants are left as they are", exc_info=True)
        return
    room = max(_SMALL, sum(bytes_of(value) for node in nodes for value in node.inputs))
    for value, array in zip(results, values, strict=True):
        if array.nbytes <= room:
            value.replace_all_uses_with(constant(graph, f"{value.name}_folded", array))


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
            and not any(attribute.type in _GRAPHS for attribute in node.attributes.values())
        ):
            found.append(node)
            known.update(node.outputs)
    return found


_GRAPHS = (ir.AttributeType.GRAPH, ir.AttributeType.GRAPHS)


def _is_number(value: ir.Value) -> bool:
    return isinstance(value.type, ir.TensorType) and value.dtype in _NUMBERS


def _computed(
    program: ir.Model, nodes: list[ir.Node], results: list[ir.Value], folder: Path | None
) -> list[np.ndarray]:
    """The values of results, of nodes that read constants only."""
    copies: dict[ir.Value, ir.Value] = {}
    constants = []
    written = []
    for node in nodes:
        for value in node.inputs:
            if value is not None and value.const_value is not None and value not in copies:
                copies[value] = ir.val(str(value.name), const_value=value.const_value)
                constants.append(copies[value])
        outputs = [ir.val(str(value.name)) for value in node.outputs]
        copies.update(zip(node.outputs, outputs, strict=True))
        inputs = [None if value is None else copies[value] for value in node.inputs]
        attributes = list(node.attributes.values())
        written.append(
            ir.Node(node.domain, node.op_type, inputs, attributes, outputs=outputs, name=node.name)
        )
    graph = ir.Graph(
        [],
        [copies[value] for value in results],
        nodes=written,
        initializers=constants,
        opset_imports=dict(program.graph.opset_imports),
        name="constants",
    )
    small = ir.Model(graph, ir_version=program.ir_version)
    names = [str(value.name) for value in results]
    return [np.asarray(value) for value in Runner(small, folder, level=PLAIN)({}, names)]


def fold_batch_norm(graph: ir.Graph, node: ir.Node) -> None:
    """Put a batch norm into the convolution whose result nobody else reads."""
    if node.op_type != "BatchNormalization" or node.domain or len(node.inputs) != 5:
        return
    conv = node.inputs[0].producer() if node.inputs[0] is not None else None
    if conv is None or conv.op_type != "Conv" or len(used_outputs(node)) > 1:
        return
    between = conv.outputs[0]
    if between.is_graph_output() or len(between.uses()) != 1 or _number(node, "training_mode", 0):
        return
    parameters = [array_of(value) for value in node.inputs[1:]]
    weight = array_of(conv.inputs[1])
    given_bias = conv.inputs[2] if len(conv.inputs) > 2 else None
    bias = array_of(given_bias)
    if weight is None or any(p is None for p in parameters) or (given_bias and bias is None):
        return
    if weight.dtype != np.float32:
        return
    scale, shift, mean, variance = (np.asarray(p, np.float64) for p in parameters)
    factor = scale / np.sqrt(variance + _number(node, "epsilon", 1e-5))
    old = np.zeros_like(mean) if bias is None else bias.astype(np.float64)
    shaped = factor.reshape(-1, *[1] * (weight.ndim - 1))
    moved = (old - mean) * factor + shift
    conv.resize_inputs(3)
    folded = constant(graph, f"{conv.name}.weight_folded", (weight * shaped).astype(np.float32))
    conv.replace_input_with(1, folded)
    conv.replace_input_with(
        2, constant(graph, f"{conv.name}.bias_folded", moved.astype(np.float32))
    )
    result = node.outputs[0]
    result.replace_all_uses_with(between, replace_graph_outputs=True)
    name = result.name
    graph.remove(node, safe=True)
    between.name = name


def _number(node: ir.Node, name: str, default: float) -> float:
    found = node.attributes.get(name)
    return default if found is None else float(found.value)
