"""First indices of bags of embeddings: in ascending order, or the kernel reads beyond the indices.

The op itself checks the first and the last of them, and the indices.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache

import torch
from torch._ops import OpOverload
from torch._subclasses.fake_tensor import unset_fake_temporarily
from torch.export import ExportedProgram
from torch.fx import Graph, Node

from neural_mp.adaptors.pytorch.pt2.argument_checks import BAGS, is_checked, packet_of
from neural_mp.adaptors.pytorch.pt2.nested_graphs import Operand, Role, all_graphs, graphs_of

#: Ops that keep the order of numbers.
_COPIES = ("_to_copy", "alias", "clone", "detach", "lift_fresh_copy", "reshape", "to", "view")
#: Types of the first indices.
_INTEGERS = (torch.int32, torch.int64)
#: Bound of numbers that keep their order in 32 bits, and multiplied with one another in 64 bits.
_LIMIT = 2**31


@dataclass(frozen=True)
class Scope:
    """Inputs of a nested graph.

    Attributes:
        operands: placeholder of the graph → the argument that it stands for, a node.
        outer: scope of that argument; None in the graph of the program.
    """

    operands: Mapping[Node, Operand]
    outer: Scope | None


def offset_faults(
    node: Node,
    scope: Scope | None,
    values: Mapping[str, torch.Tensor],
    is_written: Callable[[Node], bool],
) -> Iterator[str]:
    """Yield the faults of the first indices of bags.

    Args:
        node: an op.
        scope: of the graph of the op; None in the graph of the program.
        values: name of a weight, constant or input → its value.
        is_written: whether a node, or what shares its memory, is changed by an op.
    """
    if packet_of(node.target) not in BAGS:
        return
    source = node.args[2] if len(node.args) > 2 else node.kwargs.get("offsets")
    passed, is_cast = [], False
    while isinstance(source, Node):
        passed.append(source)
        if packet_of(source.target) in _COPIES:
            cast = _cast_target(source)
            if cast not in (None, *_INTEGERS):
                yield f"offsets must be integers of 32 or 64 bits, got {cast}"
            is_cast = is_cast or cast is not None
            source = source.args[0]
        elif source.op == "placeholder" and scope is not None:
            operand = scope.operands[source]
            if operand.role is not Role.SAME:
                yield "offsets must not change from one iteration of a loop to the next"
                return
            source, scope = operand.value, scope.outer
        else:
            break
    if not isinstance(source, Node):
        yield "offsets must be a tensor"
        return
    if source.op == "placeholder":
        value = values.get(source.name)
        if value is not None and not _is_ascending(value):
            yield "offsets must be numbers in ascending order"
    elif not _counts_upwards(source, exact=is_cast):
        yield "offsets must be an input, a constant, or of the op arange"
    if any(map(is_written, [*passed, *source.all_input_nodes])):
        yield "offsets must not be changed by an op"


def _cast_target(node: Node) -> object:
    """Return the type that a copy may change numbers to; None if their type stays."""
    if packet_of(node.target) not in ("_to_copy", "to", "view"):
        return None
    if node.target in (torch.ops.aten.to.other, torch.ops.aten.view.dtype):
        return "another type"
    values = [*node.args[1:], *node.kwargs.values()]
    return next((value for value in values if isinstance(value, torch.dtype)), None)


def _is_ascending(value: torch.Tensor) -> bool:
    """Whether a tensor holds integers of 32 bits in ascending order."""
    if value.dtype not in _INTEGERS or not value.numel():
        return False
    with unset_fake_temporarily():
        numbers = value.flatten().to(torch.int64)
        is_small = bool((numbers.abs() < _LIMIT).all())
        return is_small and bool((numbers[1:] >= numbers[:-1]).all())


def writes_of(
    program: ExportedProgram, values: Mapping[str, torch.Tensor]
) -> Callable[[Node], bool]:
    """Return a function: whether a node of a program, or what shares its memory, is changed.

    Args:
        program: the program.
        values: name of a weight, constant or input → its value; some may share their memory.
    """
    signature = program.graph_signature
    names = {**signature.inputs_to_buffers, **signature.inputs_to_parameters}
    mutated = {*signature.buffers_to_mutate.values(), *signature.user_inputs_to_mutate.values()}

    @cache
    def find_written(graph: Graph) -> frozenset[Node]:
        return frozenset(_written_nodes(graph))

    top = find_written(program.graph)
    changed = {n.name for n in top} | {
        n.name
        for n in program.graph.nodes
        if n.op == "placeholder" and mutated & {n.name, names.get(n.name)}
    }
    memory = {_storage_pointer(values[name]) for name in changed if name in values}

    def is_written(node: Node) -> bool:
        if node.graph is not program.graph:
            return node in find_written(node.graph)
        value = values.get(node.name) if node.op == "placeholder" else None
        return node.name in changed or (value is not None and _storage_pointer(value) in memory)

    return is_written


def _storage_pointer(tensor: torch.Tensor) -> int:
    return int(tensor.untyped_storage().data_ptr())


def _written_nodes(graph: Graph) -> Iterator[Node]:
    """Yield the nodes that an op of a graph writes to, and all of which these may be views."""
    pending = [argument for node in graph.nodes for argument in _written_arguments(node)]
    visited: set[Node] = set()
    while pending:
        node = pending.pop()
        if node not in visited:
            visited.add(node)
            yield node
            pending += _viewed_arguments(node)


def _written_arguments(node: Node) -> list[Node]:
    if isinstance(node.target, OpOverload):
        return _annotated_arguments(node, writes=True)
    graphs = [inner.graph for graph in graphs_of(node) for inner in all_graphs(graph)]
    ops = [n.target for graph in graphs for n in graph.nodes]
    ops += [argument for argument in node.args if isinstance(argument, OpOverload)]
    writes = any(isinstance(op, OpOverload) and op._schema.is_mutable for op in ops)
    return node.all_input_nodes if writes else []


def _viewed_arguments(node: Node) -> list[Node]:
    op = node.target
    if not isinstance(op, OpOverload):
        return node.all_input_nodes
    if is_checked(op):
        return []
    composite = torch._C.DispatchKey.CompositeImplicitAutograd
    if op.has_kernel_for_dispatch_key(composite):  # such as dropout, which may return its input
        return node.all_input_nodes
    return _annotated_arguments(node, writes=False)


def _annotated_arguments(node: Node, *, writes: bool) -> list[Node]:
    """Return the arguments that the schema of an op calls views or, at `writes`, written."""
    nodes: list[Node] = []
    for index, argument in enumerate(node.target._schema.arguments):
        alias = argument.alias_info
        if alias is None or (writes and not alias.is_write):
            continue
        value = node.args[index] if index < len(node.args) else node.kwargs.get(argument.name)
        items = value if isinstance(value, list | tuple) else [value]
        nodes += [item for item in items if isinstance(item, Node)]
    return nodes


def _counts_upwards(node: Node, *, exact: bool, factors: int = 1) -> bool:
    """Whether a node counts upwards: `arange`, also in steps of a size.

    Args:
        node: a node.
        exact: whether its numbers are cast, so that they must be integers.
        factors: how often the numbers may be multiplied.
    """
    if packet_of(node.target) == "mul" and isinstance(node.args[0], Node):
        factor = node.args[1]
        return (
            factors > 0
            and _is_positive_count(factor)
            and _counts_upwards(node.args[0], exact=exact, factors=0)
        )
    if packet_of(node.target) != "arange":
        return False
    numbers = list(node.args)
    start, end = (numbers[0], numbers[1]) if len(numbers) > 1 else (0, numbers[0])
    step = numbers[2] if len(numbers) > 2 else 1
    dtype = node.kwargs.get("dtype")
    is_integer = _is_positive_count(end) or dtype is torch.int64 or not exact
    is_valid = isinstance(end, Node) or _is_positive_count(end)
    return (
        start == 0
        and is_valid
        and is_integer
        and _is_positive_count(step)
        and dtype in (None, torch.int64)
    )


def _is_positive_count(value: object) -> bool:
    """Whether an argument is a positive number of 31 bits or the size of a tensor."""
    if isinstance(value, Node):
        return value.target is torch.ops.aten.sym_size.int
    return isinstance(value, int) and 0 < value < _LIMIT
