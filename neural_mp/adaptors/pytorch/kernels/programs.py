"""Runs of ops in torch's own interpreter: no Python between the ops.

An op that is called from Python costs some microseconds for its arguments, as long as many a kernel
takes. Neither the ops nor their order differ, nor does anything optimize them.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import cache
from operator import getitem
from typing import Any

import torch
from torch.fx import Graph, GraphModule, Node

from neural_mp.adaptors.pytorch.graph.graph_edit import attribute
from neural_mp.adaptors.pytorch.kernels.inlining import inline_kernels, overwrite_dead

logger = logging.getLogger(__name__)

_C: Any = torch._C
#: Libraries of ops that are no Python functions.
_LIBRARIES = frozenset({"aten", "onednn", "mkldnn", "quantized"})
#: Shortest run: a program takes as long to call as one or two ops.
_LEAST = 3
_SIZES = (int, torch.SymInt)
#: Memory format → its number in programs.
_FORMATS = {
    torch.contiguous_format: 0,
    torch.preserve_format: 1,
    torch.channels_last: 2,
    torch.channels_last_3d: 3,
}
#: Returns the program's value for a node that an op of a type reads.
_Lookup = Callable[[Node], Any]


def call_programs(module: GraphModule) -> None:
    """Call programs instead of runs of three ops or more, whose results stay the same."""
    if not _has_interpreter():
        return
    inline_kernels(module)
    overwrite_dead(module)
    for number, run in enumerate(_runs(module)):
        _replace(module, run, f"program_{number}")
    module.graph.lint()


@cache
def _has_interpreter() -> bool:
    """Whether programs can be built and called, tried once per process."""
    graph = Graph()
    result = graph.call_function(torch.ops.aten.neg.default, (graph.placeholder("x"),))
    graph.output(result)
    try:
        run = _program(GraphModule({}, graph), [result], [result.args[0]], [result])
        return bool(run(torch.ones(1)) == -1)
    except (AttributeError, RuntimeError, TypeError):
        logger.debug("no programs in this version of torch", exc_info=True)
        return False


def _runs(module: GraphModule) -> list[list[Node]]:
    """Return runs of ops that programs can call, in order; sizes are no part of a run."""
    runs: list[list[Node]] = [[]]
    for node in module.graph.nodes:
        if _fits(module, node):
            runs[-1].append(node)
        elif node.op not in ("get_attr", "placeholder") and not _may_precede(node, runs[-1]):
            runs.append([])
    return [run for run in runs if len(run) >= _LEAST]


def _may_precede(node: Node, run: list[Node]) -> bool:
    """Whether a size can be computed before a run."""
    value = node.meta.get("val")
    return isinstance(value, _SIZES) and not set(run).intersection(node.all_input_nodes)


def _fits(module: GraphModule, node: Node) -> bool:
    """Whether a program can call an op: one that returns a tensor, of arguments it understands."""
    op = node.target
    if not isinstance(op, torch._ops.OpOverload) or op.namespace not in _LIBRARIES:
        return False
    returns = op._schema.returns
    if len(returns) != 1 or returns[0].type.kind() != "TensorType":
        return False
    graph = _C.Graph()
    try:
        called = _call(graph, node, lambda source: _typed(graph.addInput(), module, source))
        return bool(called.schema() == str(op._schema))
    except (RuntimeError, TypeError):
        logger.debug("%s cannot be part of a program", node.format_node(), exc_info=True)
        return False


def _typed(value: Any, module: GraphModule, node: Node) -> Any:
    """Give a program's value the type of a node's result."""
    if node.op == "get_attr":
        stored = attribute(module, str(node.target))
        if isinstance(stored, _C.ScriptObject):
            value.setType(stored._type())
    elif isinstance(node.meta.get("val"), _SIZES):
        value.setType(_C.IntType.get())
    return value


def _call(graph: Any, node: Node, lookup: _Lookup) -> Any:
    """Append the call of an op to a program's graph."""
    schema: Any = node.target._schema
    arguments = dict(zip((argument.name for argument in schema.arguments), node.args, strict=False))
    arguments.update(node.kwargs)
    values = [
        _value(graph, arguments.get(argument.name, argument.default_value), argument.type, lookup)
        for argument in schema.arguments
    ]
    called = graph.create(schema.name, values, 1)
    graph.insertNode(called)
    return called


def _value(graph: Any, value: Any, kind: Any, lookup: _Lookup) -> Any:
    """Return an argument of a type as a program's value."""
    if isinstance(value, Node):
        return lookup(value)
    if kind.kind() == "OptionalType" and value is not None:
        kind = kind.getElementType()
    if _is_sizes(value) and kind.getElementType().kind() == "IntType":
        return graph.insertConstant(list(value))
    if isinstance(value, list | tuple):
        parts = [_value(graph, part, kind.getElementType(), lookup) for part in value]
        built = graph.create("prim::ListConstruct", parts, 1)
        graph.insertNode(built)
        built.output().setType(kind)
        return built.output()
    if kind.kind() == "FloatType" and value is not None:
        value = float(value)
    return graph.insertConstant(_FORMATS.get(value, value) if kind.kind() == "IntType" else value)


def _is_sizes(value: Any) -> bool:
    """Whether a value is a list of numbers, which a program then need not build in every call."""
    return isinstance(value, list | tuple) and bool(value) and all(type(v) is int for v in value)


def _replace(module: GraphModule, run: list[Node], name: str) -> None:
    """Call a program instead of a run of ops."""
    inside = set(run)
    sources = dict.fromkeys(source for node in run for source in node.all_input_nodes)
    inputs = [source for source in sources if source not in inside and source.op != "get_attr"]
    results = [node for node in run if not inside.issuperset(node.users)]
    program = _program(module, run, inputs, results)
    program.__name__ = program.__qualname__ = name
    with module.graph.inserting_after(run[-1]):
        returned = module.graph.call_function(program, tuple(inputs))
    with module.graph.inserting_after(returned):
        for number, node in enumerate(results):
            values = (returned, number)
            output = returned if len(results) == 1 else module.graph.call_function(getitem, values)
            node.replace_all_uses_with(output, lambda user: user not in inside)
    for node in reversed(run):
        module.graph.erase_node(node)


def _program(
    module: GraphModule, run: list[Node], inputs: list[Node], results: list[Node]
) -> Callable[..., Any]:
    """Return a function from the inputs of a run to its results.

    Constants are part of the program, or attributes of an object of the interpreter: arguments
    would be converted in every call.
    """
    graph, constants = _C.Graph(), _C.ScriptModule("constants", _C.CompilationUnit(), True)
    container = graph.addInput("constants")
    values = {node: _typed(graph.addInput(), module, node) for node in inputs}

    def value_of(node: Node) -> Any:
        if node not in values:
            value = attribute(module, str(node.target))
            values[node] = _constant(graph, container, constants, f"value_{len(values)}", value)
        return values[node]

    for node in run:
        values[node] = _call(graph, node, value_of).output()
    returned = [values[node] for node in results]
    if len(returned) > 1:
        joined = graph.create("prim::TupleConstruct", returned, 1)
        graph.insertNode(joined)
        joined.output().setType(_C.TupleType([value.type() for value in returned]))
        returned = [joined.output()]
    graph.registerOutput(*returned)
    container.setType(constants._type())
    function = _C._create_function_from_graph("run", graph)
    optimizes, optimize = _C._get_graph_executor_optimize, _C._set_graph_executor_optimize

    def run_program(*given: Any) -> Any:
        previous = optimizes()
        optimize(False)
        try:
            return function(constants, *given)
        finally:
            optimize(previous)

    return run_program


def _constant(graph: Any, held: Any, constants: Any, name: str, value: Any) -> Any:
    """Store a constant and return the program's value for it."""
    is_tensor = isinstance(value, torch.Tensor)
    if is_tensor and value.layout is torch.strided:
        return graph.insertConstant(value.detach())
    kind = _C.TensorType.get() if is_tensor else value._type()
    constants._register_attribute(name, kind, value.detach() if is_tensor else value)
    node = graph.create("prim::GetAttr", [held], 1)
    node.s_("name", name)
    node.output().setType(kind)
    graph.insertNode(node)
    return node.output()
