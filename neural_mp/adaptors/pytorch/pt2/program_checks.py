"""Arguments of ops in exported programs, derived from the inputs and weights of a program.

Shapes in a file are claims: the shapes of the ops that are checked are derived by running the
program, with its nested graphs, on tensors without values.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch._dispatch.python import enable_python_dispatcher
from torch._ops import OpOverload
from torch.export import ExportedProgram
from torch.fx import GraphModule, Interpreter, Node
from torch.utils import _pytree as pytree

from neural_mp.adaptors.pytorch.graph.recurrent import free_lengths
from neural_mp.adaptors.pytorch.pt2.argument_checks import (
    GATES,
    faults,
    has_shape,
    is_checked,
    packet_of,
)
from neural_mp.adaptors.pytorch.pt2.bag_offsets import Scope, offset_faults, writes_of
from neural_mp.adaptors.pytorch.pt2.nested_graphs import (
    NestedCall,
    Operand,
    Role,
    all_graphs,
    graphs_of,
    nested_calls,
)


def check_arguments(program: ExportedProgram, values: Mapping[str, torch.Tensor]) -> None:
    """Check the arguments of all ops of a program whose kernels do not.

    Args:
        program: the program.
        values: name of a weight, constant or input → its value, for inputs that of the example.

    Raises:
        ValueError: an argument does not fit.
    """
    graphs = all_graphs(program.graph_module)
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
    written = writes_of(program, values)
    checks = _Checks(
        _example_sizes(program.graph_module, values),
        lambda node, scope: offset_faults(node, scope, values, written),
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
    return any(_is_checked(node) for inner in all_graphs(graph) for node in inner.graph.nodes)


def _reshapes_in_place(node: Node) -> bool:
    op = node.target
    if not isinstance(op, OpOverload) or packet_of(op) == "detach_":
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
            node for node in module.graph.nodes if any(map(_has_checked_ops, graphs_of(node)))
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
            fault = next(faults(node.target, *arguments), None)
        if fault is not None and packet_of(node.target) in GATES:
            fault = self._fault_of_example(node.target, *arguments)
        if fault is not None:
            raise ValueError(
                f"the arguments of the op {node.target} ({node.name!r}) are wrong: {fault}"
            )

    def _check_nested_graphs(self, node: Node) -> None:
        values, _ = self.fetch_args_kwargs_from_env(node)
        # The nodes say what the operands are made from, and their values what they are.
        of_nodes = nested_calls(node.target, node.args)
        of_values = nested_calls(node.target, values)
        called = [id(call.graph) for call in of_values]
        if any(_has_checked_ops(graph) and id(graph) not in called for graph in graphs_of(node)):
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
        arguments = [_nested_input(operand) for operand in call.operands]
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
            if not _keeps_form(current, previous):
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
        return next(faults(op, *sized), None)

    def _resize_to_example(self, leaf: Any) -> Any:
        """Return a tensor with the sizes of the example; unchanged if these are unknown."""
        if not isinstance(leaf, torch.Tensor):
            return leaf
        sizes = [self._resolve_size(size) for size in leaf.shape]
        if any(size is None for size in sizes):
            return leaf
        return torch.empty(sizes, dtype=leaf.dtype, device="meta")

    def _resolve_size(self, size: Any) -> int | None:
        if isinstance(size, int):
            return size
        value = size.node.expr.subs(self._checks.sizes)
        return int(value) if value.is_Integer else None


def _nested_input(operand: Operand) -> Any:
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


def _keeps_form(current: Any, previous: Any) -> bool:
    """Whether a carried value keeps its shape and type; whole numbers may be any."""
    if not isinstance(previous, torch.Tensor):
        return isinstance(current, int | torch.SymInt)
    return has_shape(current, tuple(previous.shape)) and current.dtype == previous.dtype


def _example_sizes(module: GraphModule, values: Mapping[str, torch.Tensor]) -> dict[Any, int]:
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
