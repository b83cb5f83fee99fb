"""Faults of single nodes that TensorFlow itself does not report.

TensorFlow checks most nodes while it reads a graph. A node with one of the faults below ends the
process instead, waits forever, or raises errors of other types.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping

import tensorflow as tf
from tensorflow.core.framework import types_pb2
from tensorflow.core.framework.attr_value_pb2 import AttrValue
from tensorflow.core.framework.op_def_pb2 import OpDef
from tensorflow.core.framework.tensor_pb2 import TensorProto
from tensorflow.python.framework import op_def_registry

from neural_mp.adaptors.tensorflow.graph.ops import INTEGER_KERNELS, PLACEHOLDERS, Role, role_of
from neural_mp.adaptors.tensorflow.graph.tensor_graph import (
    CONSTANT,
    NodeDef,
    constant_shape,
    is_control,
    node_of,
)
from neural_mp.core.int8_accumulation import KernelKind
from neural_mp.io.limits import (
    MAX_NODE_NAME_CHARS,
    MAX_NODE_TENSORS,
    MAX_REPEATED_BYTES,
    MAX_TENSOR_RANK,
)

#: Element types of tensors, references included.
_TYPES = frozenset(types_pb2.DataType.values()) - {types_pb2.DT_INVALID}
#: Types without values in a file.
_HANDLES = frozenset({types_pb2.DT_RESOURCE, types_pb2.DT_VARIANT})
#: Kind of an attribute → field of the value.
_KINDS = {
    **{"string": "s", "int": "i", "float": "f", "bool": "b"},
    **{kind: kind for kind in ("type", "shape", "tensor", "func")},
}
#: Ops that read variables by name.
_RESTORING = ("RestoreV2", "Restore", "RestoreSlice")
#: Ops that add a tensor to the inputs of an integer kernel.
_SUMS = (b"Sum", b"Add")
#: Tensors with the limits of input and weight.
_LIMITS = 4
#: Axes of an image.
_AXES = 4


def faults(nodes: Iterable[NodeDef]) -> Iterator[tuple[NodeDef, str]]:
    """Yield the faulty nodes of a graph or function, each with its fault as text."""
    by_name = {node.name: node for node in nodes}
    for node in by_name.values():
        definition = op_def_registry.get(node.op)
        yield from ((node, fault) for fault in _faults_of_names(by_name, node))
        for key, attribute in node.attr.items():
            for fault in _faults_of_attribute(attribute):
                yield node, f"its attribute {key!r} {fault}"
        if definition is not None:
            yield from ((node, fault) for fault in _faults_of_attribute_kinds(node, definition))
            yield from ((node, fault) for fault in _faults_of_tensor_counts(node, definition))
        if node.op == CONSTANT and node.attr["dtype"].type != node.attr["value"].tensor.dtype:
            yield node, "its value must be of its type"
        if (
            node.op in INTEGER_KERNELS
        ):  # the ops fused into the kernel determine the numbers of tensors
            yield from ((node, fault) for fault in _faults_of_kernel(node))
        if node.op == "SplitV":
            sizes = _resolve_constant(by_name, node, 1)
            if sizes is not None and len(constant_shape(sizes)) != 1:
                yield node, "its sizes must be a vector"
        if role_of(node) is Role.GATHER and "batch_dims" in node.attr and node.attr["batch_dims"].i:
            yield from ((node, fault) for fault in _faults_of_batch_axes(by_name, node))


def _faults_of_names(nodes: Mapping[str, NodeDef], node: NodeDef) -> Iterator[str]:
    """Yield faults of a node's names, and of the names of the variables that a node restores."""
    names: list[str | bytes] = [node.name, node.op, *node.input]
    if node.op in _RESTORING:
        constants = (
            _resolve_constant(nodes, node, position) for position in range(1, len(node.input))
        )
        tensors = (constant.attr["value"].tensor for constant in constants if constant is not None)
        names += [text for tensor in tensors for text in tensor.string_val]
    longest = max(map(len, names))
    if longest > MAX_NODE_NAME_CHARS:
        yield f"names must have at most {MAX_NODE_NAME_CHARS} characters, got {longest}"


def _faults_of_batch_axes(nodes: Mapping[str, NodeDef], node: NodeDef) -> Iterator[str]:
    axes = abs(node.attr["batch_dims"].i)
    if _resolve_constant(nodes, node, 2) is None:
        yield "its axis must be constant, since it has batch axes"
    for position, least in ((0, axes + 1), (1, axes)):
        rank = _known_rank(nodes, node, position)
        if rank is not None and rank < least:
            yield f"its input {position} must have at least {least} axes, got {rank}"


def _known_rank(nodes: Mapping[str, NodeDef], node: NodeDef, position: int) -> int | None:
    """Return the number of axes of an input that is a constant or a placeholder; None if unknown.

    The axes of computed inputs are only known after reading the graph.
    """
    constant = _resolve_constant(nodes, node, position)
    if constant is not None:
        return len(constant_shape(constant))
    source = nodes.get(node_of(node.input[position])) if position < len(node.input) else None
    if source is None or source.op not in PLACEHOLDERS or "shape" not in source.attr:
        return None
    shape = source.attr["shape"].shape
    return None if shape.unknown_rank else len(shape.dim)


def _faults_of_attribute(attribute: AttrValue) -> Iterator[str]:
    kind = attribute.WhichOneof("value")
    tensors = [attribute.tensor] if kind == "tensor" else attribute.list.tensor
    types = [attribute.type] if kind == "type" else attribute.list.type
    for dtype in (*types, *(tensor.dtype for tensor in tensors)):
        if dtype not in _TYPES:
            yield f"must be a type of TensorFlow, got number {dtype}"
    for tensor in tensors:
        yield from _faults_of_tensor(tensor)


def _faults_of_tensor(tensor: TensorProto) -> Iterator[str]:
    sizes = [dimension.size for dimension in tensor.tensor_shape.dim]
    if len(sizes) > MAX_TENSOR_RANK or any(size < 0 for size in sizes):
        yield f"must have a shape of at most {MAX_TENSOR_RANK} known sizes"
        return
    if tensor.dtype in _HANDLES:
        yield "must consist of numbers or strings"
    width = tf.as_dtype(tensor.dtype).size if tensor.dtype in _TYPES - _HANDLES else 0
    nbytes, actual = math.prod(sizes) * width, len(tensor.tensor_content)
    if actual and tensor.dtype == types_pb2.DT_STRING:
        yield "must list its strings"
    elif actual and width and actual != nbytes:
        yield f"must have {nbytes} bytes for its shape, got {actual}"
    if not actual and nbytes > MAX_REPEATED_BYTES:
        yield f"must have at most {MAX_REPEATED_BYTES} bytes, got a shape of {nbytes} bytes"


def _faults_of_attribute_kinds(node: NodeDef, definition: OpDef) -> Iterator[str]:
    """Yield attributes that are missing, or values of another kind than the op declares."""
    for declared in definition.attr:
        kind = "list" if declared.type.startswith("list(") else _KINDS[declared.type]
        if declared.name in node.attr:
            actual = node.attr[declared.name].WhichOneof("value")
            # An empty list may lack a value; in functions, an attribute may be a parameter.
            matches = actual in (kind, "placeholder") or (actual is None and kind == "list")
            if not matches:
                yield f"its attribute {declared.name!r} must be of the kind {declared.type!r}"
        elif not declared.HasField("default_value"):
            yield f"its attribute {declared.name!r} is missing"


def _faults_of_tensor_counts(node: NodeDef, definition: OpDef) -> Iterator[str]:
    for argument in (*definition.input_arg, *definition.output_arg):
        count = node.attr[argument.number_attr].i if argument.number_attr in node.attr else 0
        if not 0 <= count <= MAX_NODE_TENSORS:
            yield (
                f"its attribute {argument.number_attr!r} must be from 0 to {MAX_NODE_TENSORS}, got "
                f"{count}"
            )


def _faults_of_kernel(node: NodeDef) -> Iterator[str]:
    """Yield wrong numbers of inputs and results of an integer kernel."""
    lists = {key: attribute.list for key, attribute in node.attr.items()}
    steps = list(lists["fused_ops"].s) if "fused_ops" in lists else []
    sums = sum(step in _SUMS for step in steps)
    requantizes, dequantizes = b"Requantize" in steps, b"Dequantize" in steps
    convolves = INTEGER_KERNELS[node.op] is not KernelKind.DENSE
    needed = {
        "Tdevice_inputs": 2 + (b"BiasAdd" in steps) + sums,
        "Thost_inputs": _LIMITS + 2 * requantizes + 2 * (sums and requantizes and convolves),
        "Tdevice_outputs": 1,
        "Thost_outputs": 0 if dequantizes else 2,
    }
    actual = {key: len(lists[key].type) if key in lists else 0 for key in needed}
    for key, count in needed.items():
        if actual[key] < count:
            fused = ", ".join(step.decode(errors="replace") for step in steps) or "none"
            yield (
                f"its attribute {key!r} must list {count} types, got {actual[key]} (fused ops: "
                f"{fused})"
            )
    total = actual["Tdevice_inputs"] + actual["Thost_inputs"]
    inputs = sum(not is_control(tensor) for tensor in node.input)
    if inputs != total:
        yield f"it must have {total} inputs, got {inputs}"
    if convolves and len(lists["strides"].i) != _AXES:
        yield f"its strides must be {_AXES} numbers, got {len(lists['strides'].i)}"


def _resolve_constant(nodes: Mapping[str, NodeDef], node: NodeDef, position: int) -> NodeDef | None:
    """Return the constant that is an input of a node, directly or by Identities; None if none."""
    visited = set()
    while position < len(node.input):
        source = nodes.get(node_of(node.input[position]))
        if (
            source is None
            or source.name in visited
            or (source.op != CONSTANT and role_of(source) is not Role.IDENTITY)
        ):
            return None
        if source.op == CONSTANT:
            return source
        visited.add(source.name)
        node, position = source, 0
    return None
