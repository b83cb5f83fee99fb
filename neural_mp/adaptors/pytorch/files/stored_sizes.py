"""Sizes that the model's code rounds, in the functions that `torch.export.save` can write."""

from __future__ import annotations

import builtins
import math
import operator
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import Graph, GraphModule, Node

from neural_mp.adaptors.pytorch.graph import graph_edit as fx

#: Largest number below 1, and the gap between it and 1.
_BELOW_ONE, _GAP = 1 - 2**-53, 2**-53


def with_storable_sizes(module: GraphModule) -> GraphModule:
    """Return the graph with rounded sizes in functions that files can hold; equal in value."""
    if not any(_form_of(node) for node in module.graph.nodes):
        return module
    rewritten = fx.shallow_copy(module)
    for node in list(rewritten.graph.nodes):
        form = _form_of(node)
        if form is not None:
            with rewritten.graph.inserting_before(node):
                written = form(_Writer(rewritten.graph), node.all_input_nodes[0])
            node.replace_all_uses_with(written)
            rewritten.graph.erase_node(node)
    rewritten.graph.eliminate_dead_code()
    rewritten.graph.lint()
    rewritten.recompile()
    return rewritten


def _form_of(node: Node) -> Callable[[_Writer, Node], Node] | None:
    """Return the function that writes the form of a node for files; None if none is needed."""
    if node.op != "call_function" or any(value is not None for value in node.args[1:]):
        return None
    return _FORMS.get(node.target)


@dataclass(frozen=True)
class _Writer:
    """Writer of arithmetic on sizes into a graph."""

    graph: Graph

    def call(self, function: Callable[..., Any], *args: Node | float) -> Node:
        """Return the node of a function of sizes."""
        return self.graph.call_function(function, args)

    def magnitude(self, value: Node) -> Node:
        return self.call(torch.sym_max, value, self.call(operator.neg, value))

    def floor(self, value: Node) -> Node:
        quotient = _integer_quotient(value)
        if quotient is not None:
            return self.call(operator.floordiv, *quotient)
        return self.call(operator.neg, self.ceil(self.call(operator.neg, value)))

    def ceil(self, value: Node) -> Node:
        quotient = _integer_quotient(value)
        if quotient is not None:
            dividend, divisor = quotient
            down = self.call(operator.floordiv, self.call(operator.neg, dividend), divisor)
            return self.call(operator.neg, down)
        whole = self.call(math.trunc, value)
        rest = self.call(operator.sub, value, whole)
        more = self.call(math.trunc, self.call(operator.add, rest, _BELOW_ONE))
        return self.call(operator.add, whole, more)

    def round(self, value: Node) -> Node:
        """Write Python's rounding: halves to the even neighbour."""
        low = self.floor(value)
        odd = self.call(operator.mod, low, 2)
        rest = self.call(operator.sub, value, low)
        # A half is raised to 1 if the lower neighbour is odd, else to the number below 1.
        even_gap = self.call(operator.mul, self.call(operator.sub, 1, odd), _GAP)
        raised = self.call(operator.sub, self.call(operator.add, rest, 0.5), even_gap)
        return self.call(operator.add, low, self.call(math.trunc, raised))


def _integer_quotient(value: Node) -> tuple[Any, Any] | None:
    """Return dividend and divisor of a quotient of integers; None for any other value."""
    if value.target is not operator.truediv:
        return None
    operands = [arg.meta.get("val") if isinstance(arg, Node) else arg for arg in value.args]
    if not all(isinstance(part, int | torch.SymInt) for part in operands):
        return None
    dividend, divisor = value.args
    return dividend, divisor


_FORMS: Mapping[object, Callable[[_Writer, Node], Node]] = {
    math.ceil: _Writer.ceil,
    math.floor: _Writer.floor,
    builtins.round: _Writer.round,
    operator.abs: _Writer.magnitude,
    builtins.abs: _Writer.magnitude,
}
