"""Bringing a graph into the form that everything else works on, numerically equal."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import onnx_ir as ir
from onnx_ir.passes import common

from neural_mp.adaptors.onnxrt.sessions import PLAIN, Runner, array_of
from neural_mp.errors import in_one_line

logger = logging.getLogger(__name__)

#: The first opset with quantization per channel and with bfloat16.
LEAST_OPSET = 13
#: The first version of the file format that holds opset 13.
_LEAST_IR_VERSION = 8
#: Bytes of a computed constant that are no matter.
_SMALL = 1 << 16
#: What gives another result every time it runs.
_RANDOM = ("RandomNormal", "RandomUniform", "RandomNormalLike", "RandomUniformLike", "Multinomial")
_RANDOM_TOO = ("Bernoulli", "Dropout")


def opset_of(program: ir.Model) -> int:
    """The version of the operators of ai.onnx; 0 if the graph uses none."""
    return program.graph.opset_imports.get("", 0)


def prepare(program: ir.Model, folder: Path | None) -> tuple[list[str], str | None]:
    """Prepare a graph, in place.

    Functions are inlined, constants collected, names made unique, the opset raised where it lacks
    what conversions need, shapes inferred, identities removed, batch norms folded.

    Args:
        program: the graph.
        folder: where its external data lies.

    Returns:
        What the user should know, and why nothing can be converted, if so.
    """
    notes: list[str] = []
    if program.functions:
        common.InlinePass()(program)
    common.RemoveInitializersFromInputsPass()(program)
    common.LiftConstantsToInitializersPass(lift_all_constants=True, size_limit=0)(program)
    name_nodes(program)
    obstacle = None
    before = opset_of(program)
    if 0 < before < LEAST_OPSET:
        obstacle = _raise_opset(program)
        if obstacle is None:
            notes.append(
                f"the model's opset {before} was raised to {LEAST_OPSET}, the first that holds "
                f"quantization per channel and bfloat16"
            )
    if obstacle is None:
        program.ir_version = max(program.ir_version, _LEAST_IR_VERSION)
    for node in list(program.graph):
        _remove_identity(program.graph, node)
    infer_shapes(program)
    fold_constants(program, folder)
    for node in list(program.graph):
        fold_batch_norm(program.graph, node)
    common.RemoveUnusedNodesPass()(program)
    return notes, obstacle


def name_nodes(program: ir.Model) -> None:
    """Give every node and tensor a name of its own.

    No node gets that of an input: plans and ranges speak of both in one breath.
    """
    common.NameFixPass()(program)
    taken = {value.name for value in program.graph.inputs}
    names = {node.name for node in program.graph} | taken
    for node in program.graph:
        if node.name in taken:
            node.name = unused(f"{node.name}_{node.op_type}", names)
            names.add(node.name)


def unused(name: str, names: Iterable[str | None]) -> str:
    """The name, or the first of its numbered forms that is not taken."""
    taken = names if isinstance(names, set) else set(names)
    number, found = 0, name
    while found in taken:
        number += 1
        found = f"{name}_{number}"
    return found


@contextmanager
def _quiet(name: str) -> Iterator[None]:
    """Keep a library's words on how it works from the user."""
    log = logging.getLogger(name)
    before = log.level
    log.setLevel(logging.ERROR)
    try:
        yield
    finally:
        log.setLevel(before)


def _raise_opset(program: ir.Model) -> str | None:
    """Write the graph in a later opset; returns why it could not be done."""
    from onnxscript import version_converter

    before = opset_of(program)
    try:
        with _quiet("onnxscript.version_converter"):
            version_converter.convert_version(program, LEAST_OPSET, fallback=True)
    except Exception as error:
        # The converter asserts, and raises whatever its C++ half throws.
        logger.debug("the opset cannot be raised", exc_info=True)
        return f"opset {before} cannot be raised to {LEAST_OPSET}: {in_one_line(error)}"
    if opset_of(program) != LEAST_OPSET:
        return f"opset {before} cannot be raised to {LEAST_OPSET}: the model uses what changed"
    return None


def _remove_identity(graph: ir.Graph, node: ir.Node) -> None:
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


def infer_shapes(program: ir.Model) -> None:
    """Note element types and shapes, as far as ONNX can infer them."""
    try:
        common.ShapeInferencePass(check_type=False, strict_mode=False)(program)
    except Exception:
        # The checker behind it raises its own types; a graph without shapes is still a graph.
        logger.debug("no shapes", exc_info=True)


def fold_constants(program: ir.Model, folder: Path | None) -> None:
    """Compute, in ONNX Runtime, what depends on constants only, where that takes no more room."""
    graph = program.graph
    foldable: list[ir.Node] = []
    known: set[ir.Value] = {v for v in graph.initializers.values() if v.const_value is not None}
    for node in graph:
        inputs = [value for value in node.inputs if value is not None]
        fixed = all(value in known for value in inputs)
        if not fixed or not inputs or node.op_type in (*_RANDOM, *_RANDOM_TOO):
            continue
        if any(a.type in (ir.AttributeType.GRAPH, ir.AttributeType.GRAPHS) for a in _own(node)):
            continue
        if node.op_type in ("QuantizeLinear", "DequantizeLinear"):
            continue  # of a model that holds integer weights already
        foldable.append(node)
        known.update(node.outputs)
    inside = set(foldable)
    results = [
        value
        for node in foldable
        for value in node.outputs
        if value.is_graph_output() or any(use.node not in inside for use in value.uses())
    ]
    if not results or any(value.is_graph_output() for value in results):
        return
    values = _computed(program, foldable, results, folder)
    room = sum(v.const_value.nbytes for n in foldable for v in n.inputs if v and v.const_value)
    for value, array in zip(results, values, strict=True):
        if array.nbytes <= max(room, _SMALL):
            value.replace_all_uses_with(constant(graph, f"{value.name}_folded", array))


def _own(node: ir.Node) -> list[ir.Attr]:
    return list(node.attributes.values())


def _computed(
    program: ir.Model, nodes: list[ir.Node], results: list[ir.Value], folder: Path | None
) -> list[np.ndarray]:
    """The values of results, of nodes that read constants only."""
    copies: dict[ir.Value, ir.Value] = {}
    constants = []
    for node in nodes:
        for value in node.inputs:
            if value is not None and value.const_value is not None and value not in copies:
                held = ir.val(str(value.name), const_value=value.const_value)
                copies[value] = held
                constants.append(held)
    written = []
    for node in nodes:
        outputs = [ir.val(str(value.name)) for value in node.outputs]
        copies.update(zip(node.outputs, outputs, strict=True))
        inputs = [None if value is None else copies[value] for value in node.inputs]
        written.append(
            ir.Node(node.domain, node.op_type, inputs, _own(node), outputs=outputs, name=node.name)
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
    if between.is_graph_output() or len(between.uses()) != 1 or _attribute(node, "training_mode"):
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
    factor = scale / np.sqrt(variance + _attribute(node, "epsilon", 1e-5))
    old = np.zeros_like(mean) if bias is None else bias.astype(np.float64)
    shaped = factor.reshape(-1, *[1] * (weight.ndim - 1))
    stem = conv.name or str(between.name)
    folded = constant(graph, f"{stem}.weight_folded", (weight * shaped).astype(np.float32))
    moved = constant(
        graph, f"{stem}.bias_folded", ((old - mean) * factor + shift).astype(np.float32)
    )
    conv.resize_inputs(3)
    conv.replace_input_with(1, folded)
    conv.replace_input_with(2, moved)
    result = node.outputs[0]
    result.replace_all_uses_with(between, replace_graph_outputs=True)
    name = result.name
    graph.remove(node, safe=True)
    between.name = name


def used_outputs(node: ir.Node) -> list[ir.Value]:
    """The results that somebody reads, the first included."""
    return [
        value
        for index, value in enumerate(node.outputs)
        if index == 0 or value.uses() or value.is_graph_output()
    ]


def _attribute(node: ir.Node, name: str, default: float = 0) -> float:
    found = node.attributes.get(name)
    return default if found is None else float(found.value)


def constant(
    graph: ir.Graph, name: str, array: np.ndarray, dtype: ir.DataType | None = None
) -> ir.Value:
    """A new constant of a graph."""
    name = unused(name, graph.initializers)
    tensor = ir.tensor(array, dtype=dtype, name=name)
    value = ir.val(name, tensor.dtype, ir.Shape(array.shape), const_value=tensor)
    graph.register_initializer(value)
    return value
