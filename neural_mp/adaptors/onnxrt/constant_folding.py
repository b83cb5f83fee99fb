"""Folding of constants, batch norms and branches, and removal of identities."""

from __future__ import annotations

import logging
import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from pathlib import Path

import numpy as np
import onnx_ir as ir

from neural_mp.adaptors.common.kernels.fusion import Affine
from neural_mp.adaptors.onnxrt.graph import edit
from neural_mp.adaptors.onnxrt.graph.opset import get_onnx_opset, infer_tensor_types
from neural_mp.adaptors.onnxrt.graph.sessions import CPU, PLAIN, Runner, count_constant_bytes
from neural_mp.adaptors.onnxrt.graph.subgraphs import in_order, iterate_node_bodies
from neural_mp.adaptors.onnxrt.kernels.ops import RANDOM, is_convolution, is_dequantize, is_quantize
from neural_mp.adaptors.onnxrt.kernels.registry import runs_natively
from neural_mp.errors import ConversionError

logger = logging.getLogger(__name__)

#: Constants up to this many bytes are folded in any case.
_SMALL = 1 << 16
#: Largest size of a result over the size of all constants; larger ones are not computed, unless
#: they have at most this many bytes.
_MOST_GROWTH = 4
_MAX_RESULT_BYTES = 1 << 24
#: Longer chains of nodes are not followed back from each value.
_MAX_CHAIN_NODES = 64
#: Mark of a node that computes a known value, in its `meta`.
_CONSTANT = "neural_mp.constant"
#: Repetitions of constant folding.
_MOST_ROUNDS = 3
#: The types of folded constants.
_NUMBERS = (
    ir.DataType.FLOAT,
    ir.DataType.DOUBLE,
    ir.DataType.FLOAT16,
    ir.DataType.BFLOAT16,
    ir.DataType.INT8,
    ir.DataType.INT16,
    ir.DataType.INT32,
    ir.DataType.INT64,
    ir.DataType.BOOL,
    ir.DataType.UINT8,
    ir.DataType.UINT16,
    ir.DataType.UINT32,
    ir.DataType.UINT64,
)


def remove_identity(node: ir.Node) -> None:
    """Bypass and remove an Identity, or a Dropout outside training."""
    data, mode = node.inputs[0], edit.get_node_input(node, 2)
    if data is None:
        return
    trains = np.array(0) if mode is None else edit.get_constant_array(mode)
    same = len(edit.list_used_outputs(node)) == 1 and trains is not None and not trains.any()
    # Includes outputs of bodies: they must be computed within their body.
    if same and not node.outputs[0].is_graph_output() and node.graph is not None:
        node.outputs[0].replace_all_uses_with(data)
        node.graph.remove(node, safe=True)


def fold_constants(program: ir.Model, names: edit.GraphNames, folder: Path | None) -> None:
    """Compute nodes with constant inputs in ONNX Runtime, as far as the file does not grow.

    A larger result, e.g. of the Cast of a weight in FP16, is still computed by its nodes in the
    graph, but known: its value is computed on demand (see `is_constant`). Nodes whose results have
    a size that is unknown before they run stay.
    """
    # Values that are computed first make more sizes known.
    for _ in range(_MOST_ROUNDS):
        if not _fold_sized_nodes(program, names, folder):
            return


def is_constant(node: ir.Node) -> bool:
    """Whether a node computes a known value, and is thus no op of the model."""
    return _CONSTANT in node.meta


def find_stored_constants(value: ir.Value) -> list[ir.Value]:
    """Return the constants in the graph that a known value is, or is computed from."""
    stored: list[ir.Value] = []
    # A chain may read each result several times: followed once, it is linear.
    waiting, reached = [value], {value}
    while waiting:
        source = waiting.pop()
        producer = source.producer()
        if source.is_initializer():
            stored.append(source)
        elif producer is not None and is_constant(producer):
            inputs = dict.fromkeys(producer.inputs)
            operands = [value for value in inputs if value is not None and value not in reached]
            waiting += operands
            reached.update(operands)
    return stored


def _fold_sized_nodes(program: ir.Model, names: edit.GraphNames, folder: Path | None) -> bool:
    """Fold what has a known size; return whether a repetition may fold more."""
    nodes = _find_foldable_nodes(program)
    room = max(_SMALL, sum(count_constant_bytes(value) for node in nodes for value in node.inputs))
    inferred = _infer_results(program, nodes)
    sizes = {
        value: math.prod(copy.shape.numpy()) * math.ceil(copy.dtype.itemsize)
        for value, copy in inferred.items()
        if copy.shape is not None and copy.dtype is not None and copy.shape.is_static()
    }
    most = max(_MOST_GROWTH * room, _MAX_RESULT_BYTES)
    unsafe = {
        node for node in nodes if sum(sizes.get(v, math.inf) for v in node.outputs if v.name) > most
    }
    if unsafe:
        nodes = _find_foldable_nodes(program, unsafe)
    inside = set(nodes)
    results = [
        value
        for node in nodes
        for value in node.outputs
        if not value.is_graph_output() and any(use.node not in inside for use in value.uses())
    ]
    chains = _Chains(nodes)
    storable = [value for value in results if not chains.is_quantized(value)]
    folded = [value for value in storable if sizes[value] <= _SMALL]
    large = [value for value in storable if sizes[value] > _SMALL]
    folded += _select_without_growth(large, sizes, chains)
    if folded and not _fold_values(program, names, folder, chains.find_chain(folded), folded):
        return False
    for value in results:
        if value.uses():
            _attach_lazy_value(program, value, inferred[value], chains, folder)
    return len(sizes) < len(inferred)


def _fold_values(
    program: ir.Model,
    names: edit.GraphNames,
    folder: Path | None,
    nodes: Sequence[ir.Node],
    results: Sequence[ir.Value],
) -> bool:
    """Replace computed values by constants; return whether ONNX Runtime computes them."""
    try:
        small = _isolate_nodes(program, nodes, results)
        values = Runner(small, folder, level=PLAIN)({}, [str(value.name) for value in results])
    except ConversionError:
        logger.debug("constant folding failed; constants are kept", exc_info=True)
        return False
    for value, array in zip(results, values, strict=True):
        value.replace_all_uses_with(names.add_constant(f"{value.name}_folded", array))
    return True


class _Chains:
    """The nodes that compute constants, and those that each value takes."""

    def __init__(self, nodes: Sequence[ir.Node]) -> None:
        self._order = {node: index for index, node in enumerate(nodes)}
        self._quantizes = any(is_quantize(node) or is_dequantize(node) for node in nodes)

    def __contains__(self, node: ir.Node) -> bool:
        return node in self._order

    def is_quantized(self, value: ir.Value) -> bool:
        """Whether a value is computed from a quantized one."""
        return self._quantizes and any(
            is_quantize(node) or is_dequantize(node)
            for node in self.find_chain([value], _MAX_CHAIN_NODES)
        )

    def find_chain(self, results: Iterable[ir.Value], most: int | None = None) -> list[ir.Node]:
        """Return the nodes that compute some values, in order; none if more than `most`."""
        nodes: set[ir.Node] = set()
        waiting = [value.producer() for value in results]
        while waiting:
            node = waiting.pop()
            if node is None or node in nodes:
                continue
            nodes.add(node)
            if most is not None and len(nodes) > most:
                return []
            waiting += [value.producer() for value in node.inputs if value is not None]
        return sorted(nodes, key=self._order.__getitem__)


def _select_without_growth(
    results: Iterable[ir.Value], sizes: Mapping[ir.Value, int], chains: _Chains
) -> list[ir.Value]:
    """Return the results that are not larger than the constants that they replace."""
    replaced: set[ir.Value] = set()
    foldable = []
    for result in results:
        nodes = chains.find_chain([result], _MAX_CHAIN_NODES)
        operands = {value for node in nodes for value in node.inputs if value is not None}
        freed = {
            value
            for value in operands - replaced
            if value.is_initializer() and all(use.node in chains for use in value.uses())
        }
        if sizes[result] <= sum(map(count_constant_bytes, freed)):
            foldable.append(result)
            replaced |= freed
    return foldable


def _attach_lazy_value(
    program: ir.Model, value: ir.Value, inferred: ir.Value, chains: _Chains, folder: Path | None
) -> None:
    """Make the value of a computed constant known, to be computed on demand."""
    nodes = chains.find_chain([value], _MAX_CHAIN_NODES)
    shape, dtype = inferred.shape, inferred.dtype
    if not nodes or shape is None or dtype is None or value.const_value is not None:
        return
    isolated = _isolate_nodes(program, nodes, [value])

    value.dtype, value.shape = dtype, shape
    result = str(isolated.graph.outputs[0].name)
    value.const_value = ir.LazyTensor(
        lambda: ir.tensor(Runner(isolated, folder, level=PLAIN)({}, [result])[0], dtype=dtype),
        dtype=dtype,
        shape=shape,
        name=value.name,
    )
    for node in nodes:
        if not any(result.is_graph_output() for result in node.outputs):
            node.meta[_CONSTANT] = True


def _infer_results(program: ir.Model, nodes: Sequence[ir.Node]) -> dict[ir.Value, ir.Value]:
    """Return result → a copy with the type and shape by ONNX's shape inference.

    Sizes declared in the model may be false. A few bytes can describe a chain of ops whose results
    exceed any memory.
    """
    results = [value for node in nodes for value in node.outputs if value.name]
    if not results:
        return {}
    isolated = _isolate_nodes(program, nodes, results)
    try:
        infer_tensor_types(isolated)
    except Exception:
        # The exceptions of the checker vary.
        logger.debug("the sizes of constants are unknown", exc_info=True)
    return dict(zip(results, isolated.graph.outputs, strict=True))


def fold_branch(node: ir.Node, names: edit.GraphNames) -> None:
    """Replace an If with a constant condition by the chosen branch."""
    condition, graph = edit.get_constant_array(edit.get_node_input(node, 0)), node.graph
    if condition is None or graph is None:
        return
    branch = node.attributes["then_branch" if condition.any() else "else_branch"].as_graph()
    results = list(branch.outputs)
    branch.outputs.clear()
    for inner in list(branch):
        branch.remove(inner)
        graph.insert_before(node, inner)
    for result, value in zip(node.outputs, results, strict=True):
        if result.is_graph_output():  # keep its name
            copy = ir.node("Identity", [value], name=names.reserve_name(f"{node.name}/result"))
            graph.insert_before(node, copy)
            value, name = copy.outputs[0], result.name
            value.type, value.shape = result.type, result.shape
            result.name = names.reserve_name(f"{name}/branch")
            value.name = name
        result.replace_all_uses_with(value, replace_graph_outputs=True)
    _clear_bodies(node)
    graph.remove(node, safe=True)


def _clear_bodies(node: ir.Node) -> None:
    """Remove the nodes from all bodies of a node, so that they have no inputs."""
    for body in iterate_node_bodies(node):
        body.outputs.clear()
        for inner in reversed(list(body)):
            _clear_bodies(inner)
            body.remove(inner, safe=True)


def _find_foldable_nodes(program: ir.Model, without: Collection[ir.Node] = ()) -> list[ir.Node]:
    """Return the nodes that read constants only, including nodes of bodies.

    The nodes of `without`, and those that read their results, are left out.
    """
    nodes: list[ir.Node] = []
    graph, opset = program.graph, get_onnx_opset(program)
    constants = {value for value in graph.initializers.values() if value.const_value is not None}
    for node in in_order(graph):
        inputs = [value for value in node.inputs if value is not None]
        if (
            inputs
            and node not in without
            and constants.issuperset(inputs)
            and not node.op_type.startswith(RANDOM)
            and all(
                isinstance(value.type, ir.TensorType) and value.dtype in _NUMBERS
                for value in (*inputs, *node.outputs)
            )
            and _has_cpu_kernel(node, opset)
            and not list(iterate_node_bodies(node))
        ):
            nodes.append(node)
            constants.update(node.outputs)
    return nodes


def _isolate_nodes(
    program: ir.Model, nodes: Sequence[ir.Node], results: Sequence[ir.Value]
) -> ir.Model:
    """Return a model of copies of nodes from any graph, with constant inputs only."""
    copies: dict[ir.Value, ir.Value] = {}
    copied = []
    for node in nodes:
        for value in node.inputs:
            if value is not None and value not in copies:
                copies[value] = ir.val(
                    value.name, value.dtype, value.shape, const_value=value.const_value
                )
        values = [ir.val(value.name) for value in node.outputs]  # inferred sequence types are wrong
        copies.update(zip(node.outputs, values, strict=True))
        inputs = [None if value is None else copies[value] for value in node.inputs]
        attributes = list(node.attributes.values())
        copied.append(ir.Node(node.domain, node.op_type, inputs, attributes, outputs=values))
    constants = [value for value in copies.values() if value.const_value is not None]
    graph = ir.Graph(
        [],
        [copies[value] for value in results],
        nodes=copied,
        initializers=constants,
        opset_imports=dict(program.graph.opset_imports),
        name="constants",
    )
    return ir.Model(graph, ir_version=program.ir_version)


def _has_cpu_kernel(node: ir.Node, opset: int) -> bool:
    """Whether the CPU computes a node: few ops have kernels for bfloat16."""
    values = (value for value in (*node.inputs, *node.outputs) if value is not None)
    if all(value.dtype is not ir.DataType.BFLOAT16 for value in values):
        return True
    return node.op_type == "Cast" or runs_natively(CPU, node, opset, "bfloat16")


def fold_batch_norm(node: ir.Node, names: edit.GraphNames) -> None:
    """Fold a batch norm into a convolution with no other consumer."""
    if len(node.inputs) != 5:
        return
    conv = node.inputs[0].producer() if node.inputs[0] is not None else None
    if conv is None or not is_convolution(conv) or len(edit.list_used_outputs(node)) > 1:
        return
    between, shift = conv.outputs[0], edit.get_node_input(conv, 2)
    training = node.attributes.get_int("training_mode", 0)
    if between.is_graph_output() or len(between.uses()) != 1 or training:
        return
    if conv.graph is not node.graph:
        return
    parameters = [edit.get_constant_array(value) for value in node.inputs[1:]]
    weight, bias = edit.get_constant_array(conv.inputs[1]), edit.get_constant_array(shift)
    if any(p is None for p in parameters) or (shift is not None and bias is None):
        return
    if weight is None or weight.dtype != np.float32:
        return
    affine = Affine.identity(len(weight))
    if bias is not None:
        affine.then_add(bias)
    affine.then_normalize(parameters, node.attributes.get_float("epsilon", 1e-5))
    scaled = weight * affine.scale.reshape(-1, *[1] * (weight.ndim - 1))
    for position, stem, folded in ((1, "weight", scaled), (2, "bias", affine.shift)):
        value = names.add_constant(f"{conv.name}.{stem}_folded", folded.astype(np.float32))
        edit.put_input(conv, position, value)
    result = node.outputs[0]
    result.replace_all_uses_with(between, replace_graph_outputs=True)
    name = result.name
    if node.graph is not None:
        node.graph.remove(node, safe=True)
    between.name = name
