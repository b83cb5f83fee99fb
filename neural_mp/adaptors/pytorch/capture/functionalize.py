"""Functionalization of a captured graph: op by op if safe, else by a second trace.

torch functionalizes a program by tracing again, which costs as much as the capture. In most graphs,
few ops change. Such graphs are rewritten here with torch's result; all others are left to torch.
"""

from __future__ import annotations

import logging
import operator
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from typing import Any

import torch
from torch._guards import detect_fake_mode
from torch._ops import OpOverload
from torch.fx import Graph, GraphModule, Node, Proxy
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.proxy import GraphAppendingTracer
from torch.utils import _pytree as pytree
from torch.utils._sympy.interp import sympy_interp
from torch.utils._sympy.reference import PythonReferenceAnalysis

from neural_mp.adaptors.pytorch.capture.in_place_updates import (
    NeedsTraceError,
    find_aliased_indices,
    out_of_place_op,
    remove_updates,
    separate_value,
)
from neural_mp.adaptors.pytorch.pt2.op_allowlist import is_allowed

logger = logging.getLogger(__name__)
aten = torch.ops.aten

_ASKED = (aten.sym_size.int, aten.sym_numel.default)


def sizes_from_inputs(module: GraphModule) -> None:
    """Replace size queries by sizes of the inputs, in place; keep data-dependent sizes."""
    queries = [node for node in module.graph.nodes if node.target in _ASKED]
    sizes = _add_size_nodes(module.graph) if queries else {}
    for node in queries:
        value = node.meta["val"]
        if not isinstance(value, torch.SymInt):
            node.replace_all_uses_with(value)
        elif value.node.expr.free_symbols <= sizes.keys():
            expression = value.node.expr
            if expression not in sizes:
                sizes[expression] = _compute_size(node, expression, sizes)
            node.replace_all_uses_with(sizes[expression])
        else:
            continue
        module.graph.erase_node(node)


def _add_size_nodes(graph: Graph) -> dict[Any, Node]:
    """Return size symbol → node that reads the size from an input."""
    inputs = graph.find_nodes(op="placeholder")
    sizes: dict[Any, Node] = {}
    # At the top, so that every size can be computed from these nodes.
    at = inputs[-1] if inputs else None
    for source in reversed(inputs):
        value = source.meta.get("val")
        for axis, size in enumerate(value.shape if isinstance(value, torch.Tensor) else ()):
            if isinstance(size, torch.SymInt) and size.node.expr.is_Symbol:
                with graph.inserting_after(at):
                    node = graph.call_function(aten.sym_size.int, (source, axis))
                node.meta["val"] = size
                sizes[size.node.expr] = node
    return sizes


def _compute_size(node: Node, expression: Any, known: dict[Any, Node]) -> Node:
    graph = node.graph
    tracer = GraphAppendingTracer(graph)
    last = node.prev
    with graph.inserting_before(node):
        symbols = {symbol: Proxy(known[symbol], tracer) for symbol in expression.free_symbols}
        result = sympy_interp(PythonReferenceAnalysis, symbols, expression).node
    while last.next is not node:
        last = last.next
        values = torch.fx.map_arg((last.args, last.kwargs), lambda operand: operand.meta["val"])
        target: Any = last.target
        last.meta["val"] = target(*values[0], **values[1])
    assert isinstance(result, Node)
    return result


#: Ops that write to their inputs although their schema declares no mutation.
_WRONG_SCHEMA = (aten.native_batch_norm.default,)
#: Modules of functions of sizes, which take no tensors.
_OF_SIZES = ("_operator", "math", "torch")


@torch.no_grad()
def make_functional(module: GraphModule) -> bool:
    """Rewrite a captured graph in place without in-place ops, as torch would.

    Return False on failure: the graph is then unusable, and its program has to be traced again.
    """
    try:
        for node in list(module.graph.nodes):
            if node.op == "call_function":
                _expand_op(node)
        remove_updates(module.graph)
        sizes_from_inputs(module)
    except Exception:
        # torch's tracer raises unrelated types for ops that need more than an isolated trace.
        logger.debug("the graph requires another trace", exc_info=True)
        return False
    module.graph.eliminate_dead_code()
    module.recompile()
    return True


def _expand_op(node: Node) -> None:
    """Expand an op that may or may not copy, and separate the result of an in-place op.

    Raises:
        NeedsTraceError: if the op cannot be expanded alone.
    """
    target: Any = node.target
    if getattr(target, "__module__", None) in _OF_SIZES:
        return
    if target in _EXPANDED:
        _EXPANDED[target](node)
        return
    if not isinstance(target, OpOverload) or target in _WRONG_SCHEMA:
        raise NeedsTraceError(str(target))
    if target._schema.is_mutable:
        op = out_of_place_op(target)
        if op is None:
            raise NeedsTraceError(str(target))
        _expand_op(separate_value(node, op))
        return
    if torch.Tag.maybe_aliasing_or_mutating in target.tags:
        raise NeedsTraceError(str(target))
    if find_aliased_indices(target) and _is_composite_op(target):
        _retrace_op(node)
    elif is_expandable(target):
        try:
            _retrace_op(node)
        except RuntimeError:
            # Sizes that depend on data; the op itself neither writes to nor shares memory.
            logger.debug("%s cannot be expanded", target, exc_info=True)


def is_expandable(target: object) -> bool:
    """Whether an op is composed of others, and programs in files may not call the op itself."""
    if not isinstance(target, OpOverload) or not _is_composite_op(target):
        return False
    library, _, name = target._schema.name.partition("::")
    return not is_allowed(library, name)


def _is_composite_op(target: OpOverload) -> bool:
    """Whether an op is composed of others, for inference and training alike."""
    return bool(
        torch._C._dispatch_has_kernel_for_dispatch_key(target.name(), "CompositeImplicitAutograd")
    )


def _expand_batch_norm(norm: Node) -> None:
    image, weight, bias, mean, variance, training, momentum, epsilon = norm.args[:8]
    if training or mean is None or variance is None:
        raise NeedsTraceError("batch norm in training")
    value = norm.meta["val"]
    with norm.graph.inserting_before(norm):
        call = (image, weight, bias, mean, variance, momentum, epsilon)
        results = norm.graph.call_function(aten._native_batch_norm_legit_no_training.default, call)
        results.meta = {**norm.meta, "val": (value, value.new_empty(0), value.new_empty(0))}
        first = norm.graph.call_function(operator.getitem, (results, 0))
        first.meta = dict(norm.meta)
    norm.replace_all_uses_with(first)
    norm.graph.erase_node(norm)


def _expand_dropout(node: Node) -> None:
    if node.args[2]:
        raise NeedsTraceError("dropout in training")
    if node.target is aten.dropout.default:
        _replace_with_clone(node)
    else:
        _bypass_node(node)


def _replace_with_clone(node: Node) -> None:
    node.target, node.args = aten.clone.default, node.args[:1]


def _bypass_node(node: Node) -> None:
    node.replace_all_uses_with(node.all_input_nodes[0])
    node.graph.erase_node(node)


#: Op → function that rewrites a node to its functional form without a trace.
_EXPANDED: Mapping[Any, Callable[[Node], None]] = {
    aten.batch_norm.default: _expand_batch_norm,
    # Code that makes a tensor of numbers copies a constant, and detaches the copy in place.
    aten.lift_fresh_copy.default: _replace_with_clone,
    aten.detach_.default: _bypass_node,
    **dict.fromkeys(
        (
            aten.dropout.default,
            aten.dropout_.default,
            aten.alpha_dropout_.default,
            aten.alpha_dropout.default,
            aten.feature_dropout_.default,
            aten.feature_dropout.default,
            aten.feature_alpha_dropout_.default,
            aten.feature_alpha_dropout.default,
        ),
        _expand_dropout,
    ),
}


def _retrace_op(node: Node) -> None:
    """Replace one op by torch's functional trace of the op on its own arguments."""
    target: Any = node.target
    leaves, structure = pytree.tree_flatten((node.args, node.kwargs))
    sources = [leaf for leaf in leaves if isinstance(leaf, Node)]

    def call_target(*values: object) -> Any:
        arguments = iter(values)
        called = [next(arguments) if isinstance(leaf, Node) else leaf for leaf in leaves]
        args, kwargs = pytree.tree_unflatten(called, structure)
        return target(*args, **kwargs)

    values = [source.meta["val"] for source in sources]
    if any(isinstance(value, torch.Tensor) and value.is_complex() for value in values):
        raise NeedsTraceError(f"{target} of complex numbers")
    # New tensors of the op must be of the same mode as all other tensors of the graph.
    with detect_fake_mode(values) or nullcontext():
        traced = make_fx(torch.func.functionalize(call_target))(*values).graph
    inlined = dict(zip(traced.find_nodes(op="placeholder"), sources, strict=True))
    for part in traced.nodes:
        if part.op == "call_function":
            with node.graph.inserting_before(node):
                copied = node.graph.node_copy(part, inlined.__getitem__)
            copied.meta = {**node.meta, "val": part.meta.get("val")}
            inlined[part] = copied
            if isinstance(part.target, OpOverload) and part.target._schema.is_mutable:
                _expand_op(copied)  # torch leaves updates inside of a few ops, as in pad_sequence
        elif part.op not in ("placeholder", "output"):
            raise NeedsTraceError(f"{target} with a constant")
    (result,) = traced.output_node().args
    if isinstance(result, Node):
        node.replace_all_uses_with(inlined[result])
    else:
        for user in list(node.users):
            user.replace_all_uses_with(inlined[result[user.args[1]]])
            user.graph.erase_node(user)
    node.graph.erase_node(node)
