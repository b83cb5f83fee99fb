"""Runs of ops in torch's own interpreter: no Python between the ops.

An op that is called from Python costs some microseconds for its arguments, as long as many a kernel
takes. Neither the ops nor their order differ, nor does anything optimize them: Python functions
that call ops are inlined, and results are written over dead ones, never with another bit.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import cache
from operator import getitem
from typing import Any, TypeAlias, cast

import torch
from torch.fx import Graph, GraphModule, Node, Proxy
from torch.fx.node import map_arg
from torch.fx.proxy import GraphAppendingTracer

from neural_mp.adaptors.pytorch.capture.in_place_updates import IN_PLACE
from neural_mp.adaptors.pytorch.graph.graph_edit import get_attribute, get_constant, sizes_of_result
from neural_mp.adaptors.pytorch.graph.kernel_ops import COMPOSED, run_pixel_product
from neural_mp.adaptors.pytorch.versions import INTEGER_CONVOLUTIONS

logger = logging.getLogger(__name__)

_C: Any = torch._C
#: Graph, value and type of a program, which torch declares in part only.
ProgramGraph: TypeAlias = Any
ProgramValue: TypeAlias = Any
ProgramType: TypeAlias = Any
#: Libraries of ops that are no Python functions.
_LIBRARIES = frozenset({"aten", "onednn", "mkldnn", "quantized"})
#: Shortest run: a program takes as long to call as one or two ops.
_LEAST = 3
_SIZES = (int, torch.SymInt)
#: Types of numbers among the values of a graph, and those of a program; bool is an int as well.
_NUMBERS = (
    ((bool, torch.SymBool), _C.BoolType),
    (_SIZES, _C.IntType),
    ((float, torch.SymFloat), _C.FloatType),
)
#: Memory format → its number in programs.
_FORMATS = {
    torch.contiguous_format: 0,
    torch.preserve_format: 1,
    torch.channels_last: 2,
    torch.channels_last_3d: 3,
}
#: Returns the program's value for a node that an op of a type reads.
_Lookup = Callable[[Node], ProgramValue]


def call_programs(module: GraphModule) -> None:
    """Call programs instead of runs of three ops or more, whose results stay the same."""
    if not _can_run_programs():
        return
    inline_kernels(module)
    overwrite_dead_inputs(module)
    for number, run in enumerate(_find_runs(module)):
        _replace_by_program(module, run, f"program_{number}")
    module.graph.lint()


@cache
def _can_run_programs() -> bool:
    """Whether programs can be built and called, tried once per process."""
    graph = Graph()
    result = graph.call_function(torch.ops.aten.neg.default, (graph.placeholder("x"),))
    graph.output(result)
    try:
        run = _build_program(GraphModule({}, graph), [result], [result.args[0]], [result])
        return bool(run(torch.ones(1)) == -1)
    except (AttributeError, RuntimeError, TypeError):
        logger.debug("no programs in this version of torch", exc_info=True)
        return False


def _find_runs(module: GraphModule) -> list[list[Node]]:
    """Return runs of ops that programs can call, in order; sizes are no part of a run."""
    runs: list[list[Node]] = [[]]
    for node in module.graph.nodes:
        if _fits_program(module, node):
            runs[-1].append(node)
        elif node.op not in ("get_attr", "placeholder"):
            is_size = isinstance(node.meta.get("val"), _SIZES)
            # A size that reads no result of the run can be computed before it.
            if not is_size or set(runs[-1]).intersection(node.all_input_nodes):
                runs.append([])
    return [run for run in runs if len(run) >= _LEAST]


def _fits_program(module: GraphModule, node: Node) -> bool:
    """Whether a program can call an op: one that returns a tensor, of arguments it understands."""
    op = node.target
    if not isinstance(op, torch._ops.OpOverload) or op.namespace not in _LIBRARIES:
        return False
    returns = op._schema.returns
    if len(returns) != 1 or returns[0].type.kind() != "TensorType":
        return False
    graph = _C.Graph()
    try:
        called = _append_call(
            graph, node, lambda source: _set_value_type(graph.addInput(), module, source)
        )
        return bool(called.schema() == str(op._schema))
    except (RuntimeError, TypeError):
        logger.debug("%s cannot be part of a program", node.format_node(), exc_info=True)
        return False


def _set_value_type(value: ProgramValue, module: GraphModule, node: Node) -> ProgramValue:
    if node.op == "get_attr":
        stored = get_attribute(module, str(node.target))
        if isinstance(stored, _C.ScriptObject):
            value.setType(stored._type())
    else:
        for types, kind in _NUMBERS:
            if isinstance(node.meta.get("val"), types):
                value.setType(kind.get())
                break
    return value


def _append_call(graph: ProgramGraph, node: Node, lookup: _Lookup) -> Any:
    schema: Any = node.target._schema
    arguments = dict(zip((argument.name for argument in schema.arguments), node.args, strict=False))
    arguments.update(node.kwargs)
    values = [
        _to_program_value(
            graph, arguments.get(argument.name, argument.default_value), argument.type, lookup
        )
        for argument in schema.arguments
    ]
    called = graph.create(schema.name, values, 1)
    graph.insertNode(called)
    return called


def _to_program_value(
    graph: ProgramGraph, value: Any, kind: ProgramType, lookup: _Lookup
) -> ProgramValue:
    if isinstance(value, Node):
        return lookup(value)
    if kind.kind() == "OptionalType" and value is not None:
        kind = kind.getElementType()
    integers = isinstance(value, list | tuple) and value and all(type(v) is int for v in value)
    # A program need not build a list of numbers in every call.
    if integers and kind.getElementType().kind() == "IntType":
        return graph.insertConstant(list(value))
    if isinstance(value, list | tuple):
        parts = [_to_program_value(graph, part, kind.getElementType(), lookup) for part in value]
        built = graph.create("prim::ListConstruct", parts, 1)
        graph.insertNode(built)
        built.output().setType(kind)
        return built.output()
    if kind.kind() == "FloatType" and value is not None:
        value = float(value)
    return graph.insertConstant(_FORMATS.get(value, value) if kind.kind() == "IntType" else value)


def _replace_by_program(module: GraphModule, run: list[Node], name: str) -> None:
    inside = set(run)
    sources = dict.fromkeys(source for node in run for source in node.all_input_nodes)
    inputs = [source for source in sources if source not in inside and source.op != "get_attr"]
    results = [node for node in run if not inside.issuperset(node.users)]
    program = _build_program(module, run, inputs, results)
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


def _build_program(
    module: GraphModule, run: list[Node], inputs: list[Node], results: list[Node]
) -> Callable[..., Any]:
    """Return a function from the inputs of a run to its results.

    Constants are part of the program, or attributes of an object of the interpreter: arguments
    would be converted in every call.
    """
    graph, constants = _C.Graph(), _C.ScriptModule("constants", _C.CompilationUnit(), True)
    container = graph.addInput("constants")
    values = {node: _set_value_type(graph.addInput(), module, node) for node in inputs}

    def lower_node_value(node: Node) -> Any:
        if node not in values:
            value = get_attribute(module, str(node.target))
            values[node] = _store_constant(
                graph, container, constants, f"value_{len(values)}", value
            )
        return values[node]

    for node in run:
        values[node] = _append_call(graph, node, lower_node_value).output()
    returned = [values[node] for node in results]
    if len(returned) > 1:
        joined = graph.create("prim::TupleConstruct", returned, 1)
        graph.insertNode(joined)
        joined.output().setType(_C.TupleType([value.type() for value in returned]))
        returned = [joined.output()]
    graph.registerOutput(*returned)
    container.setType(constants._type())
    function = _C._create_function_from_graph("run", graph)
    # torch calls this function instead while any thread exports a model.
    function._torchdynamo_inline = _make_python_form(module, run, inputs, results)
    optimizes, optimize = _C._get_graph_executor_optimize, _C._set_graph_executor_optimize

    def run_program(*inputs: object) -> Any:
        previous = optimizes()
        optimize(False)
        try:
            return function(constants, *inputs)
        finally:
            optimize(previous)

    return run_program


def _make_python_form(
    module: GraphModule, run: list[Node], inputs: list[Node], results: list[Node]
) -> Callable[..., Any]:
    """Return a function like that of `_build_program` whose ops are called from Python."""
    calls = [(node, cast(Any, node.target), node.args, node.kwargs) for node in run]
    stored = {
        source: get_attribute(module, str(source.target))
        for node in run
        for source in node.all_input_nodes
        if source.op == "get_attr"
    }

    def call_ops(_: object, *tensors: object) -> Any:
        values: dict[Node, Any] = {**stored, **dict(zip(inputs, tensors, strict=True))}
        for node, op, args, kwargs in calls:
            values[node] = op(
                *map_arg(args, values.__getitem__), **map_arg(kwargs, values.__getitem__)
            )
        outputs = tuple(values[node] for node in results)
        return outputs[0] if len(outputs) == 1 else outputs

    return call_ops


def _store_constant(
    graph: ProgramGraph, container: ProgramValue, constants: Any, name: str, value: Any
) -> ProgramValue:
    is_tensor = isinstance(value, torch.Tensor)
    if is_tensor and value.layout is torch.strided:
        return graph.insertConstant(value.detach())
    kind = _C.TensorType.get() if is_tensor else value._type()
    constants._register_attribute(name, kind, value.detach() if is_tensor else value)
    node = graph.create("prim::GetAttr", [container], 1)
    node.s_("name", name)
    node.output().setType(kind)
    graph.insertNode(node)
    return node.output()


aten = torch.ops.aten
onednn = torch.ops.onednn

#: Op of a number and a tensor → its variant that writes the result to a tensor.
_WITH_OUTPUT = {aten.add.Tensor: aten.add.out, aten.addcmul.default: aten.addcmul.out}

#: Activation → in-place equivalent.
_IN_PLACE = {op: in_place for op, in_place in IN_PLACE.items() if op._overloadname == "default"}
#: Ops whose result is always memory of its own, which none of their inputs share.
_OWN_RESULT = INTEGER_CONVOLUTIONS.union(_IN_PLACE) | {
    onednn.qlinear_pointwise.default,
    onednn.qlinear_pointwise.binary,
    aten.add.Tensor,
    aten.sub.Tensor,
    aten.mul.Tensor,
    aten.div.Tensor,
    aten.gelu.default,
    aten.mean.dim,
    aten.sum.dim_IntList,
    aten.amax.default,
    aten.addmm.default,
    aten.mm.default,
}


def inline_kernels(module: GraphModule) -> None:
    """Replace calls of composed kernels by the ops that these call."""
    images: set[Node] = set()
    for node in list(module.graph.nodes):
        if node.target is run_pixel_product:
            images.add(_inline_kernel(module.graph, node))
        elif node.target in COMPOSED:
            _inline_kernel(module.graph, node)
    _drop_views(module.graph, images)
    module.graph.lint()


def _drop_views(graph: Graph, images: set[Node]) -> None:
    """Run activations between products on rows, and drop the views as images and back.

    Args:
        graph: a graph with inlined kernels.
        images: views of rows [batch, channels] as images [batch, channels, 1, 1].
    """
    for node in list(graph.nodes):
        source: Any = node.args[0] if node.args else None
        if not isinstance(source, Node) or source not in images:
            continue
        if node.target is aten.reshape.default and node.args[1] == source.args[1][:2]:
            node.replace_all_uses_with(source.args[0])
            graph.erase_node(node)
        elif node.target in _IN_PLACE:
            with graph.inserting_before(node):
                rows = graph.call_function(
                    node.target, (source.args[0], *node.args[1:]), node.kwargs
                )
                image = graph.call_function(source.target, (rows, source.args[1]))
            image.meta = dict(node.meta)
            node.replace_all_uses_with(image)
            graph.erase_node(node)
            images.add(image)
    for node in reversed(graph.nodes):
        if node in images and not node.users:
            graph.erase_node(node)


def _inline_kernel(graph: Graph, node: Node) -> Node:
    previous, kernel, tracer = node.prev, cast(Any, node.target), GraphAppendingTracer(graph)
    with graph.inserting_before(node):
        result = kernel(*map_arg(node.args, lambda operand: Proxy(operand, tracer))).node
    first = previous.next
    if first.target is aten.to.dtype and _get_result_dtype(first.args[0]) is first.args[1]:
        first.replace_all_uses_with(cast(Node, first.args[0]))
        graph.erase_node(first)
    result.meta = dict(node.meta)
    node.replace_all_uses_with(result)
    graph.erase_node(node)
    return cast(Node, result)


def _get_result_dtype(node: Node) -> torch.dtype | None:
    value = node.meta.get("val")
    return value.dtype if isinstance(value, torch.Tensor) else None


def overwrite_dead_inputs(module: GraphModule) -> None:
    """Write activations, products and floats to be quantized over inputs that no op reads later.

    These then stay in the cache: a pass over them takes up to half as long.
    """
    order = {node: index for index, node in enumerate(module.graph.nodes)}
    own = {node for node in order if node.target in _OWN_RESULT}
    for node in order:
        position = 1 if node.target in _WITH_OUTPUT else 0
        if node.target is not aten.mul.Tensor and node.target not in {**_WITH_OUTPUT, **_IN_PLACE}:
            continue
        operand: Any = node.args[position]
        if operand not in own or not _is_last_use(operand, node, order):
            continue
        if node.target in _IN_PLACE:
            node.target = _IN_PLACE[node.target]
        elif position == 0:
            dtype = _get_result_dtype(node)
            same = dtype is not None and dtype is _get_result_dtype(operand)
            if same and sizes_of_result(node) == sizes_of_result(operand):
                node.target = aten.mul_.Tensor
        elif (
            (number := get_constant(module, node.args[0])) is not None
            and number.ndim == 0
            and number.dtype is _get_result_dtype(operand)
            and all(_is_broadcast_factor(factor, operand) for factor in node.args[2:])
        ):
            node.target, node.kwargs = _WITH_OUTPUT[node.target], {**node.kwargs, "out": operand}


def _is_last_use(operand: Node, op: Node, order: dict[Node, int]) -> bool:
    """Whether no op but this one needs the memory of a tensor from then on."""
    return all(
        reader is op or (order[reader] < order[op] and reader.target in _OWN_RESULT)
        for reader in operand.users
    )


def _is_broadcast_factor(factor: object, operand: Node) -> bool:
    """Whether a product of a tensor and a factor has the shape and dtype of the tensor."""
    if not isinstance(factor, Node) or None in (
        _get_result_dtype(factor),
        _get_result_dtype(operand),
    ):
        return False
    sizes, whole = sizes_of_result(factor), sizes_of_result(operand)
    same = _get_result_dtype(factor) is _get_result_dtype(operand) and len(sizes) == len(whole)
    return same and all(size in (1, full) for size, full in zip(sizes, whole, strict=True))
