"""Graphs within a program: branches, bodies of loops and wrapped parts, and the values they get."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any

from torch._ops import HigherOrderOperator
from torch.fx import GraphModule, Node


class Role(Enum):
    """Relation of an input of a nested graph to an argument of the op that calls the graph."""

    #: The argument itself, at every call.
    SAME = "same"
    #: The argument at the first call, then a result of the call before.
    CARRIED = "carried"
    #: A row of the argument.
    ROW = "row"


@dataclass(frozen=True)
class Operand:
    """Input of a nested graph.

    Attributes:
        value: the argument: a node, or its value, as given to `list_nested_calls`.
        role: see `Role`.
    """

    value: Any
    role: Role


@dataclass(frozen=True)
class NestedCall:
    """Call of a nested graph by an op.

    Attributes:
        graph: the graph, as given to `list_nested_calls`.
        operands: its inputs.
        carries: whether its first outputs are the carried inputs of the next call.
    """

    graph: Any
    operands: tuple[Operand, ...]
    carries: bool = False


def list_nested_calls(op: HigherOrderOperator, args: Sequence[Any]) -> list[NestedCall]:
    """Return the calls of graphs that an op makes.

    Args:
        op: the op.
        args: its arguments: nodes, or their values.

    Raises:
        ValueError: the calls of this op are not known.
    """
    calls = _CALLS.get(op.name())
    if calls is None:
        raise ValueError(f"the graphs of the op {op} are called with unknown sizes")
    try:
        return calls(*args)
    except TypeError as error:
        raise ValueError(f"the op {op} has other arguments, got {len(args)}") from error


def list_argument_graphs(node: Node) -> list[GraphModule]:
    """Return the graphs among the arguments of a node."""
    parent = node.graph.owning_module
    candidates = [
        getattr(parent, str(n.target), None) for n in node.all_input_nodes if n.op == "get_attr"
    ]
    return [graph for graph in candidates if isinstance(graph, GraphModule)]


def _build_operands(
    *, carried: Sequence[Any] = (), rows: Sequence[Any] = (), same: Sequence[Any] = ()
) -> tuple[Operand, ...]:
    roles = ((Role.CARRIED, carried), (Role.ROW, rows), (Role.SAME, same))
    return tuple(Operand(value, role) for role, values in roles for value in values)


def _list_wrapper_calls(settings: int) -> Callable[..., list[NestedCall]]:
    """Return the call of an op with so many arguments before its graph."""
    return lambda *args: [NestedCall(args[settings], _build_operands(same=args[settings + 1 :]))]


#: Ops → the calls of their graphs. `associative_scan` is none of them: it calls its graph with
#: several rows at once.
_CALLS: dict[str, Callable[..., list[NestedCall]]] = {
    "cond": lambda _, first, second, values: [
        NestedCall(branch, _build_operands(same=values)) for branch in (first, second)
    ],
    "map_impl": lambda body, rows, more: [NestedCall(body, _build_operands(rows=rows, same=more))],
    "scan": lambda body, first, rows, more: [
        NestedCall(body, _build_operands(carried=first, rows=rows, same=more), carries=True)
    ],
    "while_loop": lambda test, body, carried, more: [
        NestedCall(test, _build_operands(carried=carried, same=more)),
        NestedCall(body, _build_operands(carried=carried, same=more), carries=True),
    ],
    "wrap_with_autocast": _list_wrapper_calls(4),
    "wrap_with_set_grad_enabled": _list_wrapper_calls(1),
}


def list_all_graphs(graph: GraphModule) -> list[GraphModule]:
    """Return a graph and all graphs within."""
    return [module for module in graph.modules() if isinstance(module, GraphModule)]
