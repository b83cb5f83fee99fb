"""In-place updates of a captured graph as new values, by the rules of torch's functionalization.

Every update becomes a new value of the updated tensor. If the tensor is a part of another, the
value is written into a copy of the whole, and later readers of any tensor that shares the memory
read the copy, through the same views.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping
from functools import cache
from typing import Any

import torch
from torch._ops import OpOverload
from torch.fx import Graph, Node
from torch.fx.experimental.symbolic_shapes import statically_known_true
from torch.fx.node import map_arg

aten = torch.ops.aten

#: View of a part of a tensor → op that returns the tensor with another part, with the arguments of
#: the view after the part.
_SCATTERS = {
    aten.slice.Tensor: aten.slice_scatter.default,
    aten.select.int: aten.select_scatter.default,
    aten.diagonal.default: aten.diagonal_scatter.default,
}
#: Views of all of a tensor, in the same form.
_WHOLE_VIEWS = (aten.alias.default, aten.detach.default)
#: Tags of in-place ops that do more than write values.
_EXCLUDED = frozenset({torch.Tag.inplace_view, torch.Tag.nondeterministic_seeded})


class NeedsTraceError(Exception):
    """Raised for a graph that only a full trace can functionalize."""


def find_aliased_indices(target: OpOverload) -> list[int]:
    """Return the indices of an op's arguments whose memory its result may share."""
    schema = target._schema.arguments
    return [index for index, argument in enumerate(schema) if argument.alias_info is not None]


@cache
def out_of_place_op(target: OpOverload) -> OpOverload | None:
    """Return the op of torch that computes what an in-place op writes to its first argument.

    Both have the same arguments. None if `target` is no such op, changes the sizes, or is random.
    """
    library, _, name = target._schema.name.partition("::")
    aliases = [argument.alias_info for argument in target._schema.arguments]
    written = [index for index, alias in enumerate(aliases) if alias is not None and alias.is_write]
    # Ops of other libraries may have the same names by chance.
    if library != "aten" or not name.endswith("_") or written != [0]:
        return None
    packet = getattr(aten, name[:-1], None)
    if packet is None or not _EXCLUDED.isdisjoint(target.tags):
        return None
    declared = _list_declared_arguments(target)
    candidates = (getattr(packet, overload) for overload in packet.overloads())
    fitting = (op for op in candidates if _list_declared_arguments(op) == declared)
    return next((op for op in fitting if not find_aliased_indices(op)), None)


def _list_declared_arguments(target: OpOverload) -> list[tuple[str, str, bool, object]]:
    return [
        (argument.name, str(argument.type), argument.kwarg_only, argument.default_value)
        for argument in target._schema.arguments
    ]


#: Activation or arithmetic op → the op that overwrites the first operand with the same result.
IN_PLACE: Mapping[Any, OpOverload] = {
    out_of_place_op(op): op
    for op in (
        aten.relu_.default,
        aten.hardtanh_.default,
        aten.hardswish_.default,
        aten.hardsigmoid_.default,
        aten.silu_.default,
        aten.mish_.default,
        aten.elu_.default,
        aten.leaky_relu_.default,
        aten.sigmoid_.default,
        aten.tanh_.default,
        aten.add_.Tensor,
        aten.sub_.Tensor,
        aten.mul_.Tensor,
        aten.div_.Tensor,
        aten.masked_fill_.Scalar,
    )
}


def separate_value(node: Node, op: OpOverload) -> Node:
    """Split an in-place op into `op`, which is returned, and a copy of the result in place.

    Raises:
        NeedsTraceError: the values of operands are not known to the graph.
    """
    value = _call_op(node, op, node.args, node.kwargs)
    node.target, node.args, node.kwargs = aten.copy_.default, (node.args[0], value), {}
    return value


def _call_op(node: Node, op: OpOverload, args: Any, kwargs: Any) -> Node:
    """Insert a call before `node`, with the value of its result."""
    with node.graph.inserting_before(node):
        call = node.graph.call_function(op, args, kwargs)
    operands = map_arg((call.args, call.kwargs), lambda source: source.meta["val"])
    call.meta = {**node.meta, "val": op(*operands[0], **operands[1])}
    return call


def remove_updates(graph: Graph) -> None:
    """Replace every copy in place by the copied value, which later readers read.

    All in-place ops of the graph must be copies of the result of another op; see `separate_value`.

    Raises:
        NeedsTraceError: an updated tensor is an input, or a part that no single op replaces.
    """
    # Nodes that are added later come before all nodes that are still to be visited.
    order = {node: index for index, node in enumerate(graph.nodes)}
    # Node → all nodes that share its memory, in their order: the first has all of the memory.
    sharing: dict[Node, list[Node]] = {}
    for node in list(graph.nodes):
        if node.target is aten.copy_.default:
            _remove_update(node, sharing, order)
            continue
        source = _find_aliased_source(node, sharing)
        sharing[node] = [] if source is None else sharing[source]
        sharing[node].append(node)


def _find_aliased_source(node: Node, sharing: dict[Node, list[Node]]) -> Node | None:
    target: Any = node.target
    if target is operator.getitem:
        # Results of an op share no memory, except for views of another tensor.
        source = node.all_input_nodes[0]
        return None if sharing[source][0] is source else source
    indices = find_aliased_indices(target) if isinstance(target, OpOverload) else []
    if indices and indices != [0]:
        raise NeedsTraceError(f"{target} with memory of more than one tensor")
    return node.all_input_nodes[0] if indices else None


def _remove_update(node: Node, sharing: dict[Node, list[Node]], order: dict[Node, int]) -> None:
    tensor, value = node.all_input_nodes

    def is_later(user: Node) -> bool:
        return order.get(user, -1) > order[node]

    node.replace_all_uses_with(tensor)
    whole, *parts = sharing[tensor]
    if whole.op != "call_function" or len(sharing[value]) > 1:
        raise NeedsTraceError(f"an update of {whole.op} {whole.target}")
    dtype = tensor.meta["val"].dtype
    if value.meta["val"].dtype != dtype:
        value = _call_op(node, aten._to_copy.default, (value,), {"dtype": dtype})
    while tensor is not whole:
        tensor, value = tensor.all_input_nodes[0], _scatter_into_base(tensor, value, node)
    _require_same_layout(whole, value)
    renewed = {whole: value}
    for part in _read_parts(parts, is_later):
        with node.graph.inserting_before(node):
            renewed[part] = node.graph.node_copy(part, lambda source: renewed.get(source, source))
    for old, new in renewed.items():
        old.replace_all_uses_with(new, is_later)
    node.graph.erase_node(node)
    group = list(renewed.values())
    sharing.update((tensor, group) for tensor in group)


def _scatter_into_base(part: Node, value: Node, node: Node) -> Node:
    """Return the tensor that `part` is a view of, with `value` there; inserted before `node`."""
    target: Any = part.target
    if target in _WHOLE_VIEWS:
        return value
    if target not in _SCATTERS:
        raise NeedsTraceError(f"an update of {target}")
    whole, *arguments = part.args
    return _call_op(node, _SCATTERS[target], (whole, value, *arguments), part.kwargs)


def _require_same_layout(old: Node, new: Node) -> None:
    """Raise an error unless views of the old tensor are views of the new value, too."""
    before, after = old.meta["val"], new.meta["val"]
    if before.dtype != after.dtype or before.ndim != after.ndim:
        raise NeedsTraceError(f"an update of {old.target} that changes its form")
    pairs = zip((*before.shape, *before.stride()), (*after.shape, *after.stride()), strict=True)
    if not all(statically_known_true(size == other) for size, other in pairs):
        raise NeedsTraceError(f"an update of {old.target} that changes its layout")


def _read_parts(parts: list[Node], is_later: Callable[[Node], bool]) -> list[Node]:
    """Return the views that later nodes read, directly or through other views."""
    needed: dict[Node, None] = {}
    for part in reversed(parts):
        if any(is_later(user) or user in needed for user in part.users):
            needed[part] = None
    return list(reversed(needed))
