"""Nodes and constants of an OpenVINO graph, and names that are equal on every load."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping

import numpy as np

from neural_mp.adaptors.common.naming import UniqueNames, unique_name
from neural_mp.adaptors.openvino.ops import Role, get_op_row, has_role
from neural_mp.adaptors.openvino.runtime import get_numpy_dtype, in_own_type, ov
from neural_mp.core.precision import Precision
from neural_mp.util.pytree import Array

#: The floating-point element types that plans decide on.
FLOAT = ov.Type.f32
SIXTEEN_BITS = {ov.Type.bf16: Precision.BF16, ov.Type.f16: Precision.FP16}
#: Names that OpenVINO makes up from the type and a counter of the process.
_COUNTED_RE = re.compile(r"^(?P<type>[A-Za-z]\w*?)_\d+$")

#: Longest name of a reader that becomes part of a name.
_MAX_NAME = 400


def name_of(node: ov.Node) -> str:
    """Return the name of a node."""
    return str(node.get_friendly_name())


def get_op_type(node: ov.Node) -> str:
    """Return the op type of a node, such as `Convolution`."""
    return str(node.get_type_name())


def list_result_readers(output: ov.Output) -> list[ov.Node]:
    """Return the nodes that read a result."""
    return [port.get_node() for port in output.get_target_inputs()]


def find_only_reader(output: ov.Output) -> ov.Node | None:
    """Return the node that reads a result; None unless it is a single one."""
    readers = list_result_readers(output)
    return readers[0] if len(readers) == 1 else None


def redirect_inputs(ports: Iterable[ov.Input], node: ov.Node) -> None:
    """Connect inputs of nodes to the first result of another node."""
    for port in ports:
        port.replace_source_output(node.output(0))


def give_name(name: str, node: ov.Node) -> ov.Node:
    """Set the name of a new node, and return the node."""
    node.set_friendly_name(name)
    return node


def get_weight_output(node: ov.Node) -> ov.Output:
    """Return the output that a layer reads as its weight, or a table as its rows."""
    return node.input_value(get_op_row(node).weight)


def get_tensor_name(output: ov.Output) -> str:
    """Return the name of a result: that of its op, with an index for further results."""
    index = output.get_index()
    return name_of(output.get_node()) + (f":{index}" if index else "")


def list_read_outputs(node: ov.Node) -> list[ov.Output]:
    """Return the first result of a node and all further results that are read."""
    first, *rest = node.outputs()
    return [first, *(output for output in rest if output.get_target_inputs())]


def is_float(output: ov.Output) -> bool:
    """Whether a result is float32."""
    return bool(output.get_element_type() == FLOAT)


def rank_of(output: ov.Output) -> int | None:
    """Return the number of axes of a result; None if unknown."""
    rank = output.get_partial_shape().rank
    return int(rank.get_length()) if rank.is_static else None


def get_known_sizes(output: ov.Output) -> tuple[int | None, ...] | None:
    """Return the shape of a result, None for a free size; None if the rank is unknown."""
    shape = output.get_partial_shape()
    if shape.rank.is_dynamic:
        return None
    return tuple(size.get_length() if size.is_static else None for size in shape)


def is_constant(output: ov.Output, depth: int = 4) -> bool:
    """Whether a result is a constant, seen through at most `depth` ops on constants."""
    node = output.get_node()
    if has_role(node, Role.CONSTANT):
        return True
    if not depth or get_op_type(node) not in _FOLDED:
        return False
    return all(is_constant(value, depth - 1) for value in node.input_values())


def _fold_reshape(node: ov.Node, array: Array, *_: Array) -> Array:
    return array.reshape(list(node.output(0).get_shape()))


#: Op between a constant and its reader in the graphs of the frontends → its value in numpy.
_FOLDED: Mapping[str, Callable[..., Array]] = {
    "Broadcast": lambda node, x, *_: np.broadcast_to(x, list(node.output(0).get_shape())),
    "Convert": lambda node, x: x.astype(get_numpy_dtype(node.output(0).get_element_type())),
    "Multiply": lambda _, x, y: x * y,
    "Reshape": _fold_reshape,
    "Squeeze": _fold_reshape,
    "Subtract": lambda _, x, y: x - y,
    "Transpose": lambda _, x, order: x.transpose([int(axis) for axis in order] or None),
    "Unsqueeze": _fold_reshape,
}


def iterate_nodes_before(node: ov.Node, ends: Role) -> Iterator[ov.Node]:
    """Yield the nodes that a node is computed from, but none before those of a role."""
    waiting, visited = [value.get_node() for value in node.input_values()], set[str]()
    while waiting:
        source = waiting.pop()
        if name_of(source) not in visited:
            visited.add(name_of(source))
            yield source
            if not has_role(source, ends):
                waiting += [value.get_node() for value in source.input_values()]


def get_constant_array(output: ov.Output) -> Array | None:
    """Return the value of a constant result in numpy; None for a computed one."""
    node = output.get_node()
    if has_role(node, Role.CONSTANT):
        return in_own_type(node.get_data(), node.get_element_type())
    if not is_constant(output):
        return None
    arrays = [get_constant_array(value) for value in node.input_values()]
    return None if any(a is None for a in arrays) else _FOLDED[get_op_type(node)](node, *arrays)


def iterate_nested_graphs(model: ov.Model) -> Iterator[ov.Model]:
    """Yield a graph and the bodies of its loops and branches."""
    yield model
    for node in model.get_ops():
        if get_op_type(node) in ("TensorIterator", "Loop"):
            yield from iterate_nested_graphs(node.get_function())
        elif get_op_type(node) == "If":
            for branch in range(2):
                yield from iterate_nested_graphs(node.get_function(branch))


def iterate_read_constants(node: ov.Node) -> Iterator[ov.Node]:
    """Yield the Constant nodes that a node reads, also behind ops on constants."""
    for value in node.input_values():
        yield from _iterate_constants_behind(value)


def _iterate_constants_behind(output: ov.Output) -> Iterator[ov.Node]:
    if not is_constant(output):
        return
    node = output.get_node()
    if has_role(node, Role.CONSTANT):
        yield node
    yield from iterate_read_constants(node)


def iterate_op_nodes(model: ov.Model) -> Iterator[ov.Node]:
    """Yield the nodes of a graph in execution order, except boundaries and ops on constants."""
    for node in model.get_ordered_ops():
        computed = bool(node.outputs()) and not is_constant(node.output(0))
        if not has_role(node, Role.BOUNDARY) and computed:
            yield node


def give_stable_names(model: ov.Model, types: Collection[str]) -> None:
    """Rename nodes so that names are unique and do not depend on counters of the process.

    `types` are those before the transformations: a fused op keeps the name of a fused one. A node
    with a counted name takes that of its first named reader, e.g. `conv1/bias/Multiply`, or else
    its type.
    """
    type_names = {*types, *map(get_op_type, model.get_ops()), "Multiply", "Result"}
    names = {name_of(n) for n in model.get_ops() if not _COUNTED_RE.match(name_of(n))}
    assigned, unique = set[str](), UniqueNames(names)
    for node in reversed(model.get_ordered_ops()):
        name, counted = name_of(node), _COUNTED_RE.match(name_of(node))
        made_up = counted is not None and counted["type"] in type_names
        if made_up or name in assigned:
            name = unique.reserve(_make_stem(node) if made_up else name)
            node.set_friendly_name(name)
        elif name not in names:
            unique.reserve(name)
        assigned.add(name)


def _make_stem(node: ov.Node) -> str:
    """Return the name of the first reader of a node, if that is short, with the type of the node.

    The names of a row of nodes without names would otherwise grow with each.
    """
    kind = get_op_type(node)
    # The set of readers has no order.
    readers = [reader for output in node.outputs() for reader in list_result_readers(output)]
    named = [name_of(reader) for reader in readers if not has_role(reader, Role.RESULT)]
    return f"{min(named)}/{kind}" if named and len(min(named)) <= _MAX_NAME else kind


def rename_graph_ops(model: ov.Model, names: Mapping[str, str]) -> dict[str, str]:
    """Rename ops, and the nodes that `give_stable_names` named after these; return all names."""
    reserved = {*map(name_of, model.get_ops())} - names.keys()
    new_names = dict(names)
    for node in reversed(model.get_ordered_ops()):
        name = name_of(node)
        reader, _, kind = name.rpartition("/")
        if name not in names:
            # Signatures refer to inputs and outputs by the names of their nodes.
            if reader not in new_names or has_role(node, Role.INPUT | Role.RESULT):
                continue
            new_names[name] = unique_name(f"{new_names[reader]}/{kind}", reserved)
        reserved.add(new_names[name])
        node.set_friendly_name(new_names[name])
    return new_names
