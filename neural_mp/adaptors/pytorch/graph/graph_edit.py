"""Helpers to read and edit nodes, and to insert constants into a captured graph."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from operator import attrgetter
from typing import Any

import torch
from numpy.typing import NDArray
from torch.fx import GraphModule, Node
from torch.fx._lazy_graph_module import _LazyGraphModule

from neural_mp.adaptors.pytorch.graph.dynamic_shapes import SIZES, watch_sizes

#: Key of `Node.meta` for the op's name.
OP_NAME = "neural_mp_op"
#: Key of `Node.meta` for the name of a graph input that differs from the node's name.
INPUT_NAME = "neural_mp_input"
#: Key of `Node.meta` of a kernel: the op whose result the kernel computes, and the quantization
#: parameters if the result is uint8.
RESULT = "neural_mp_result"


def get_attribute(module: GraphModule, target: str) -> Any:
    """Return the parameter, buffer or constant named by a `get_attr` node."""
    return attrgetter(target)(module)


def get_constant(module: GraphModule, node: object) -> torch.Tensor | None:
    """Return the tensor of a `get_attr` node; None for any other node or value."""
    if isinstance(node, Node) and node.op == "get_attr":
        value = get_attribute(module, str(node.target))
        return value.detach() if isinstance(value, torch.Tensor) else None
    return None


def iterate_node_constants(module: GraphModule, node: Node) -> Iterator[torch.Tensor]:
    """Yield the constants that a node reads."""
    for source in node.all_input_nodes:
        value = get_constant(module, source)
        if value is not None:
            yield value


def map_op_nodes(module: GraphModule) -> dict[str, Node]:
    """Return op name → node, in graph order."""
    return {n.meta[OP_NAME]: n for n in module.graph.nodes if OP_NAME in n.meta}


def get_op_type(node: Node) -> str:
    """Return the user-visible type of an op: `conv2d`, `relu`, `add`."""
    target: Any = node.target
    if hasattr(target, "_schema"):
        return str(target._schema.name).split("::")[-1]
    return str(getattr(target, "__name__", target))


def get_tensor_name(node: Node) -> str:
    """Return the name of a node's result: the op's name or the graph input's."""
    return str(node.meta.get(OP_NAME) or node.meta.get(INPUT_NAME, node.name))


def get_arguments(node: Node) -> dict[str, Any]:
    """Return all arguments of an op by schema name, defaults included."""
    target: Any = node.target
    schema = target._schema.arguments
    values = {argument.name: value for argument, value in zip(schema, node.args, strict=False)}
    values.update(node.kwargs)
    return {argument.name: values.get(argument.name, argument.default_value) for argument in schema}


def set_arguments(node: Node, **changes: object) -> None:
    """Change arguments of an op whose schema has no keyword-only arguments."""
    node.args = tuple({**get_arguments(node), **changes}.values())
    node.kwargs = {}


def sizes_of_result(node: Node) -> tuple[Any, ...]:
    """Return the sizes of a node's result for comparison: numbers, or symbolic expressions."""
    return get_size_expressions(node.meta["val"].shape)


def get_size_expressions(sizes: Iterable[int | torch.SymInt]) -> tuple[Any, ...]:
    """Return sizes or strides for comparison, which then adds no condition to the graph."""
    # Not as text: printing an expression costs more than building one.
    return tuple(size.node.expr if isinstance(size, torch.SymInt) else size for size in sizes)


def get_likely_size(size: int | torch.SymInt) -> int:
    """Return a size; for a dynamic size, its value at capture."""
    if isinstance(size, torch.SymInt):
        return int(size.node.hint) if size.node.has_hint() else 1
    return int(size)


def is_float(value: object) -> bool:
    """Whether a value is a floating-point tensor."""
    return isinstance(value, torch.Tensor) and value.is_floating_point()


def has_tensors(node: Node) -> bool:
    """Whether a node's result is or contains a tensor."""
    value = node.meta.get("val")
    values = value if isinstance(value, tuple | list) else (value,)
    return any(isinstance(v, torch.Tensor) for v in values)


def add_constant(module: GraphModule, name: str, value: torch.Tensor, next_node: Node) -> Node:
    """Register a buffer under a numbered name, and read the buffer right before a node."""
    number = 0
    while hasattr(module, f"{name}_{number}"):
        number += 1
    module.register_buffer(f"{name}_{number}", value)
    return read_constant(module, f"{name}_{number}", next_node)


def put_constant(module: GraphModule, layer: Node, name: str, values: NDArray[Any]) -> None:
    """Replace a layer's `weight` or `bias` by an array, in the dtype of its weight."""
    weight = get_constant(module, get_arguments(layer)["weight"])
    assert weight is not None
    stored = torch.from_numpy(values).to(weight.dtype)
    added = add_constant(module, f"{layer.name}_new_{name}", stored, layer)
    set_arguments(layer, **{name: added})


def read_constant(module: GraphModule, target: str, next_node: Node) -> Node:
    """Read a parameter or buffer right before a node."""
    with module.graph.inserting_before(next_node):
        node: Node = module.graph.get_attr(target)
    value = get_constant(module, node)
    node.meta["val"] = None if value is None else make_placeholder(value.shape, value.dtype)
    return node


def make_placeholder(shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
    """Return a tensor that stores one value, whatever its shape.

    For `Node.meta` as well, since graphs keep the nodes they erase.
    """
    return torch.zeros((), dtype=dtype).expand(tuple(shape))


def copy_graph_shallowly(module: GraphModule) -> GraphModule:
    """Copy a graph for rewriting; the weights stay shared with `module`.

    Code is generated on the first call, if any: models run through code of their own.
    """
    graph = torch.fx.Graph()
    copied: dict[Node, Node] = {}
    output = graph.graph_copy(module.graph, copied)
    graph.output(output)
    graph.set_codegen(module.graph._codegen)
    rewritten: GraphModule = _LazyGraphModule(module, graph)
    watch_sizes(rewritten, module.meta[SIZES])
    return rewritten


def finish_graph(module: GraphModule) -> GraphModule:
    """Remove unused nodes, parameters and submodules, then check the graph."""
    module.graph.eliminate_dead_code()
    used = set(_used_attribute_paths(module))
    called = tuple(f"{n.target}." for n in module.graph.nodes if n.op == "call_module")
    for name, _ in [*module.named_parameters(), *module.named_buffers()]:
        if name not in used and not name.startswith(called):
            parent, _, leaf = name.rpartition(".")
            holder = module.get_submodule(parent)
            holder._parameters.pop(leaf, None)
            holder._buffers.pop(leaf, None)
    _delete_unused(module, used)
    module.graph.lint()
    module.recompile()
    return module


def _used_attribute_paths(module: GraphModule, prefix: str = "") -> Iterator[str]:
    for node in module.graph.nodes:
        if node.op != "get_attr":
            continue
        path = f"{prefix}{node.target}"
        yield path
        inner = get_attribute(module, str(node.target))
        if isinstance(inner, GraphModule):
            yield from _used_attribute_paths(inner, f"{path}.")


def _delete_unused(module: GraphModule, used: set[str]) -> None:
    """Delete submodules without anything that a graph reads or calls.

    `GraphModule.delete_all_unused_submodules` deletes those of nested graphs, too.
    """
    called = [str(n.target) for n in module.graph.nodes if n.op == "call_module"]
    retained = {
        path.rsplit(".", parts)[0]
        for path in [*used, *called]
        for parts in range(path.count(".") + 1)
    }
    below = tuple(f"{path}." for path in called)
    for path, _ in [*module.named_modules()]:
        if path and path not in retained and not path.startswith(below):
            module.delete_submodule(path)
