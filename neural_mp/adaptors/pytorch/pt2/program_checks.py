"""Arguments of ops in exported programs, derived from the inputs and weights of a program.

Shapes in a file are claims: the shapes of the ops that are checked are derived by running the
program, with its nested graphs, on tensors without values.

First indices of bags of embeddings must be in ascending order, or the kernel reads beyond the
indices. The op itself checks the first and the last of them, and the indices.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch._dispatch.python import enable_python_dispatcher
from torch._ops import OpOverload
from torch._subclasses.fake_tensor import unset_fake_temporarily
from torch.export import ExportedProgram
from torch.fx import Graph, GraphModule, Interpreter, Node
from torch.utils import _pytree as pytree

from neural_mp.adaptors.pytorch.graph.recurrent import free_lengths
from neural_mp.adaptors.pytorch.pt2.argument_checks import (
    BAGS,
    GATES,
    find_faults,
    get_packet_name,
    has_shape,
    is_checked,
)
from neural_mp.adaptors.pytorch.pt2.nested_graphs import (
    NestedCall,
    Operand,
    Role,
    list_all_graphs,
    list_argument_graphs,
    list_nested_calls,
)


def check_arguments(program: ExportedProgram, values: Mapping[str, torch.Tensor]) -> None:
    """Check the arguments of all ops of a program whose kernels do not.

    Args:
        program: the program.
        values: name of a weight, constant or input → its value, for inputs that of the example.

    Raises:
        ValueError: an argument does not fit.
    """
    graphs = list_all_graphs(program.graph_module)
    nodes = [node for graph in graphs for node in graph.graph.nodes]
    for node in nodes:
        for op in filter(is_checked, node.args):
            raise ValueError(f"the op {op} must be called by itself, not by {node.target}")
    if not any(map(_is_checked, nodes)):
        return
    for node in nodes:
        if _reshapes_in_place(node) and node.graph is not program.graph:
            raise ValueError(
                f"the op {node.target} ({node.name!r}) must not change the shape of a tensor in "
                f"place in a nested graph; export the model without it"
            )
    written = make_write_test(program, values)
    checks = _Checks(
        _map_example_sizes(program.graph_module, values),
        lambda node, scope: find_offset_faults(node, scope, values, written),
    )
    inputs = [n.meta.get("val") for n in program.graph.nodes if n.op == "placeholder"]
    fake = torch._guards.detect_fake_mode(inputs)
    if fake is None:
        raise ValueError("the inputs of a program must be tensors")
    # Ops composed of others, such as resizing, take symbolic sizes in Python only.
    with fake, enable_python_dispatcher(), torch.no_grad(), free_lengths():
        _Propagation(program.graph_module, checks).run(*inputs, enable_io_processing=False)


def _is_checked(node: Node) -> bool:
    return is_checked(node.target)


def _has_checked_ops(graph: GraphModule) -> bool:
    return any(_is_checked(node) for inner in list_all_graphs(graph) for node in inner.graph.nodes)


def _reshapes_in_place(node: Node) -> bool:
    op = node.target
    if not isinstance(op, OpOverload) or get_packet_name(op) == "detach_":
        return False
    return torch.Tag.inplace_view in op.tags


@dataclass(frozen=True)
class _Checks:
    """Checks that need to know the program.

    Attributes:
        sizes: free size, a symbol, → size in the example inputs.
        of_offsets: (node, scope of its graph) → faults of the first indices of bags.
    """

    sizes: Mapping[Any, int]
    of_offsets: Callable[[Node, Scope | None], Iterator[str]]


class _Propagation(Interpreter):
    """Derives the tensors of nodes without their values, and checks the arguments of some.

    Args:
        module: the graph of a program, of which only what checked ops depend on is run, or a nested
            one, which is run as a whole.
        checks: see `_Checks`.
        scope: of a nested graph.
    """

    def __init__(self, module: GraphModule, checks: _Checks, scope: Scope | None = None) -> None:
        super().__init__(module)
        self._checks, self._scope = checks, scope
        self.extra_traceback = False  # the faults name their nodes
        self._nested = {
            node
            for node in module.graph.nodes
            if any(map(_has_checked_ops, list_argument_graphs(node)))
        }
        self._needed: set[Node] = set()
        for node in reversed(module.graph.nodes):
            if scope is not None or _reshapes_in_place(node):
                self._needed.add(node)
            if node in self._needed or node in self._nested or _is_checked(node):
                self._needed.update(node.all_input_nodes)

    def run_node(self, n: Node) -> Any:
        """Return the tensor of a node; None for nodes that no checked one depends on.

        Raises:
            ValueError: an argument does not fit.
        """
        if _is_checked(n):
            self._check_node(n)
        elif n in self._nested:
            self._check_nested_graphs(n)
        return super().run_node(n) if n.op == "placeholder" or n in self._needed else None

    def _check_node(self, node: Node) -> None:
        arguments = self.fetch_args_kwargs_from_env(node)
        fault = next(self._checks.of_offsets(node, self._scope), None)
        if fault is None:
            fault = next(find_faults(node.target, *arguments), None)
        if fault is not None and get_packet_name(node.target) in GATES:
            fault = self._fault_of_example(node.target, *arguments)
        if fault is not None:
            raise ValueError(
                f"the arguments of the op {node.target} ({node.name!r}) are wrong: {fault}"
            )

    def _check_nested_graphs(self, node: Node) -> None:
        values, _ = self.fetch_args_kwargs_from_env(node)
        # The nodes say what the operands are made from, and their values what they are.
        of_nodes = list_nested_calls(node.target, node.args)
        of_values = list_nested_calls(node.target, values)
        called = [id(call.graph) for call in of_values]
        if any(
            _has_checked_ops(graph) and id(graph) not in called
            for graph in list_argument_graphs(node)
        ):
            raise ValueError(f"a graph must not be an input of another one ({node.name!r})")
        for nodes, call in zip(of_nodes, of_values, strict=True):
            self._check_call(node, nodes.operands, call)

    def _check_call(self, node: Node, nodes: tuple[Operand, ...], call: NestedCall) -> None:
        graph = call.graph
        if not isinstance(graph, GraphModule):
            raise ValueError(f"{node.name!r} must call a graph, got {graph}")
        inputs = [n for n in graph.graph.nodes if n.op == "placeholder"]
        if len(inputs) != len(nodes):
            raise ValueError(f"the graph of {node.name!r} must have {len(nodes)} inputs")
        scope = Scope(dict(zip(inputs, nodes, strict=True)), self._scope)
        arguments = [_find_nested_input(operand) for operand in call.operands]
        results = _Propagation(graph, self._checks, scope).run(
            *arguments, enable_io_processing=False
        )
        if not call.carries:
            return
        carried = [
            x for x, o in zip(arguments, call.operands, strict=True) if o.role is Role.CARRIED
        ]
        if len(results) < len(carried):
            raise ValueError(
                f"the loop {node.name!r} carries {len(carried)} tensors, but its body returns "
                f"{len(results)}"
            )
        for previous, current in zip(carried, results, strict=False):
            if isinstance(previous, torch.Tensor):
                has_size = has_shape(current, tuple(previous.shape))
                keeps_form = has_size and current.dtype == previous.dtype
            else:  # whole numbers may be any
                keeps_form = isinstance(current, int | torch.SymInt)
            if not keeps_form:
                raise ValueError(
                    f"the tensors that the loop {node.name!r} carries must keep their shape and "
                    f"type, got {current} after {previous}"
                )

    def _fault_of_example(
        self, op: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> str | None:
        """Return the fault of a recurrent op with the sizes of the example; None without any.

        Free sizes of an input, e.g. its features, need not be equal to those of weights or of other
        inputs, as far as the program says.
        """
        x, states = args[0], args[1] if isinstance(args[1], list | tuple) else [args[1]]
        if isinstance(x.shape[0], torch.SymInt) or isinstance(x.shape[1], torch.SymInt):
            fixed = [t for t in states if not isinstance(t.shape[1], torch.SymInt)]
            if any(t.shape[1] not in x.shape[:2] for t in fixed):
                return "states must have the batch size of every input"
        sized = pytree.tree_map(self._resize_to_example, (args, kwargs))
        return next(find_faults(op, *sized), None)

    def _resize_to_example(self, leaf: object) -> object:
        """Return a tensor with the sizes of the example; unchanged if these are unknown."""
        if not isinstance(leaf, torch.Tensor):
            return leaf
        sizes = [self._resolve_size(size) for size in leaf.shape]
        if any(size is None for size in sizes):
            return leaf
        return torch.empty(sizes, dtype=leaf.dtype, device="meta")

    def _resolve_size(self, size: int | torch.SymInt) -> int | None:
        if isinstance(size, int):
            return size
        value = size.node.expr.subs(self._checks.sizes)
        return int(value) if value.is_Integer else None


def _find_nested_input(operand: Operand) -> Any:
    """Return what a nested graph gets for an operand, at any of its calls."""
    value = operand.value
    if operand.role is Role.SAME:
        return value
    if isinstance(value, torch.Tensor):
        # New tensors, since the values of constants do not stay.
        if operand.role is Role.CARRIED:
            return torch.empty_like(value)
        if not value.dim():
            raise ValueError("the rows of a loop must be of a tensor with axes")
        return value.new_empty(value.shape[1:])
    if isinstance(value, int | torch.SymInt) and not isinstance(value, bool):
        mode = torch._guards.detect_fake_mode()
        shapes = mode.shape_env if mode is not None else None
        if shapes is None:
            raise ValueError("loops over whole numbers must have open sizes")
        return shapes.create_unbacked_symint()
    raise ValueError(f"loops must carry tensors and whole numbers, got {value}")


def _map_example_sizes(module: GraphModule, values: Mapping[str, torch.Tensor]) -> dict[Any, int]:
    """Return free size, a symbol, → size in the example inputs."""
    sizes = {}
    for node in module.graph.nodes:
        tensor, value = node.meta.get("val"), values.get(node.name)
        if node.op != "placeholder" or not isinstance(tensor, torch.Tensor) or value is None:
            continue
        for free, size in zip(tensor.shape, value.shape, strict=False):
            if isinstance(free, torch.SymInt) and free.node.expr.is_Symbol:
                sizes[free.node.expr] = size
    return sizes


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


def find_offset_faults(
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
    if get_packet_name(node.target) not in BAGS:
        return
    source = node.args[2] if len(node.args) > 2 else node.kwargs.get("offsets")
    passed, is_cast = [], False
    while isinstance(source, Node):
        passed.append(source)
        if get_packet_name(source.target) in _COPIES:
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
    if get_packet_name(node.target) not in ("_to_copy", "to", "view"):
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


def make_write_test(
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
        return frozenset(_iterate_written_nodes(graph))

    top = find_written(program.graph)
    changed = {n.name for n in top} | {
        n.name
        for n in program.graph.nodes
        if n.op == "placeholder" and mutated & {n.name, names.get(n.name)}
    }
    memory = {_get_storage_pointer(values[name]) for name in changed if name in values}

    def is_written(node: Node) -> bool:
        if node.graph is not program.graph:
            return node in find_written(node.graph)
        value = values.get(node.name) if node.op == "placeholder" else None
        return node.name in changed or (value is not None and _get_storage_pointer(value) in memory)

    return is_written


def _get_storage_pointer(tensor: torch.Tensor) -> int:
    return int(tensor.untyped_storage().data_ptr())


def _iterate_written_nodes(graph: Graph) -> Iterator[Node]:
    """Yield the nodes that an op of a graph writes to, and all of which these may be views."""
    pending = [argument for node in graph.nodes for argument in _list_written_arguments(node)]
    visited: set[Node] = set()
    while pending:
        node = pending.pop()
        if node not in visited:
            visited.add(node)
            yield node
            pending += _list_viewed_arguments(node)


def _list_written_arguments(node: Node) -> list[Node]:
    if isinstance(node.target, OpOverload):
        return _list_annotated_arguments(node, writes=True)
    graphs = [
        inner.graph for graph in list_argument_graphs(node) for inner in list_all_graphs(graph)
    ]
    ops = [n.target for graph in graphs for n in graph.nodes]
    ops += [argument for argument in node.args if isinstance(argument, OpOverload)]
    writes = any(isinstance(op, OpOverload) and op._schema.is_mutable for op in ops)
    return node.all_input_nodes if writes else []


def _list_viewed_arguments(node: Node) -> list[Node]:
    op = node.target
    if not isinstance(op, OpOverload):
        return node.all_input_nodes
    if is_checked(op):
        return []
    composite = torch._C.DispatchKey.CompositeImplicitAutograd
    if op.has_kernel_for_dispatch_key(composite):  # such as dropout, which may return its input
        return node.all_input_nodes
    return _list_annotated_arguments(node, writes=False)


def _list_annotated_arguments(node: Node, *, writes: bool) -> list[Node]:
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
    if get_packet_name(node.target) == "mul" and isinstance(node.args[0], Node):
        factor = node.args[1]
        is_scaled = factors > 0 and _is_positive_count(factor)
        return is_scaled and _counts_upwards(node.args[0], exact=exact, factors=0)
    if get_packet_name(node.target) != "arange":
        return False
    numbers = list(node.args)
    start, end = (numbers[0], numbers[1]) if len(numbers) > 1 else (0, numbers[0])
    step = numbers[2] if len(numbers) > 2 else 1
    dtype = node.kwargs.get("dtype")
    is_count = _is_positive_count(end)
    is_valid = isinstance(end, Node) or is_count
    is_integer = is_count or dtype is torch.int64 or not exact
    is_known_step = _is_positive_count(step) and dtype in (None, torch.int64)
    return start == 0 and is_valid and is_integer and is_known_step


def _is_positive_count(value: object) -> bool:
    """Whether an argument is a positive number of 31 bits or the size of a tensor."""
    if isinstance(value, Node):
        return value.target is torch.ops.aten.sym_size.int
    return isinstance(value, int) and 0 < value < _LIMIT
