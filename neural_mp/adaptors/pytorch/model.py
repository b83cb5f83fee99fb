"""Captured PyTorch models, as used by the adaptor."""

from __future__ import annotations

import copy
import hashlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from operator import attrgetter
from typing import Any, TypeVar

import torch
from numpy.typing import NDArray
from torch import nn
from torch.fx import GraphModule, Node

from neural_mp.adaptors.contract import ConversionCounts
from neural_mp.adaptors.pytorch import kernel_ops, qdq_ops
from neural_mp.adaptors.pytorch.call_signature import CallArgs, CallSignature
from neural_mp.adaptors.pytorch.dynamic_shapes import SIZES, watch_sizes

T = TypeVar("T")

#: Key of `Node.meta` for the op's name.
OP_NAME = "neural_mp_op"
#: Ops inserted by a conversion → kind of conversion.
CONVERSIONS = {
    kernel_ops.quantize_uint8: "quantize",
    qdq_ops.quantize_dynamic: "quantize",
    kernel_ops.dequantize_uint8: "dequantize",
    torch.ops.aten._to_copy.default: "cast",
}
#: Key of `Node.meta` for the name of a graph input that differs from the node's name.
INPUT_NAME = "neural_mp_input"
#: Key of `Node.meta` of a kernel: the op whose result the kernel computes, and the quantization
#: parameters if the result is uint8.
RESULT = "neural_mp_result"
#: Path of the part that is the whole model.
WHOLE = ""


@dataclass(frozen=True)
class Part:
    """Captured graph of a whole model or of one of its modules.

    Attributes:
        portable: graph in the saved form: float ops, casts, quantize/dequantize pairs.
        runnable: graph that runs: `portable` itself, or its integer kernels.
        example: inputs the graph was captured with.
    """

    portable: GraphModule
    runnable: GraphModule
    example: CallArgs


@dataclass(frozen=True)
class TorchModel:
    """A captured model.

    Attributes:
        parts: path of a module → its graph; only `WHOLE` if the whole model is one graph.
        example: example inputs of the model.
        convention: call signature of the model.
        shell: user's module whose code calls the parts; None if the whole model is one graph.
        original: the user's own module; None for a converted or restored model.
        warnings: capture warnings for the user.
    """

    parts: Mapping[str, Part]
    example: CallArgs
    convention: CallSignature
    shell: nn.Module | None = None
    original: nn.Module | None = None
    warnings: tuple[str, ...] = ()

    @property
    def portable(self) -> GraphModule:
        """Graph of the whole model in the saved form."""
        return self.parts[WHOLE].portable

    @property
    def runnable(self) -> GraphModule:
        """Graph of the whole model that runs."""
        return self.parts[WHOLE].runnable

    def call(self, inputs: object) -> CallArgs:
        """Return the call for the inputs of one batch, arranged as at capture.

        Raises:
            DataError: if a value is not numeric, or the inputs do not fit the model.
        """
        return self.convention.call(inputs, like=self.example)

    @cached_property
    def module(self) -> nn.Module:
        """The module that runs: the graph, or the user's code with graphs of its modules."""
        return self.built(lambda part: part.runnable)

    def once(self, make: Callable[[TorchModel], T]) -> T:
        """Return `make(self)`, cached for later calls."""
        if make not in self._made:
            self._made[make] = make(self)
        made: T = self._made[make]
        return made

    @cached_property
    def _made(self) -> dict[Callable[[TorchModel], Any], Any]:
        return {}

    @property
    def counts(self) -> ConversionCounts:
        """Numbers of conversions inserted into the runnable graphs."""
        nodes = (node for part in self.parts.values() for node in part.runnable.graph.nodes)
        # Casts by the user have an op name; inserted casts have none.
        ours = [CONVERSIONS.get(node.target) for node in nodes if OP_NAME not in node.meta]
        return ConversionCounts(*map(ours.count, ("cast", "quantize", "dequantize")))

    @property
    def weights(self) -> dict[str, torch.Tensor]:
        """Parameters and buffers of the portable form, by name."""
        module = self.built(lambda part: part.portable)
        return {**dict(module.named_parameters()), **dict(module.named_buffers())}

    def built(self, form: Callable[[Part], nn.Module]) -> nn.Module:
        """Assemble the model from `form` of every part."""
        return assembled(self.shell, {path: form(part) for path, part in self.parts.items()})


def assembled(shell: nn.Module | None, parts: Mapping[str, nn.Module]) -> nn.Module:
    """Return the user's module with some modules replaced; other weights stay shared.

    Args:
        shell: the user's module; None if the only part is the whole model.
        parts: path of a module → its replacement.
    """
    if shell is None:
        (whole,) = parts.values()
        return whole
    # deepcopy takes objects in the memo as they are instead of copying them.
    memo: dict[int, Any] = {id(weight): weight for weight in shell.parameters()}
    memo.update({id(value): value.detach() for value in _tensors_of(shell)})
    memo.update({id(shell.get_submodule(path)): part for path, part in parts.items()})
    return copy.deepcopy(shell, memo)


def _tensors_of(module: nn.Module) -> Iterator[torch.Tensor]:
    """Yield tensors in plain attributes, e.g. a stored loss, which hold an autograd graph."""
    for part in module.modules():
        yield from (value for value in vars(part).values() if isinstance(value, torch.Tensor))


def attribute(module: GraphModule, target: str) -> Any:
    """Return the parameter, buffer or constant named by a `get_attr` node."""
    return attrgetter(target)(module)


def constant(module: GraphModule, node: object) -> torch.Tensor | None:
    """Return the tensor of a `get_attr` node; None for any other node or value."""
    if isinstance(node, Node) and node.op == "get_attr":
        value = attribute(module, str(node.target))
        return value.detach() if isinstance(value, torch.Tensor) else None
    return None


def constants_of(module: GraphModule, node: Node) -> Iterator[torch.Tensor]:
    """Yield the constants that a node reads."""
    for source in node.all_input_nodes:
        value = constant(module, source)
        if value is not None:
            yield value


def op_nodes(module: GraphModule) -> dict[str, Node]:
    """Return op name → node, in graph order."""
    return {n.meta[OP_NAME]: n for n in module.graph.nodes if OP_NAME in n.meta}


def op_type(node: Node) -> str:
    """Return the user-visible type of an op: `conv2d`, `relu`, `add`."""
    target: Any = node.target
    if hasattr(target, "_schema"):
        return str(target._schema.name).split("::")[-1]
    return str(getattr(target, "__name__", target))


def tensor_name(node: Node) -> str:
    """Return the name of a node's result: the op's name or the graph input's."""
    return str(node.meta.get(OP_NAME) or node.meta.get(INPUT_NAME, node.name))


def arguments(node: Node) -> dict[str, Any]:
    """Return all arguments of an op by schema name, defaults included."""
    target: Any = node.target
    schema = target._schema.arguments
    given = {argument.name: value for argument, value in zip(schema, node.args, strict=False)}
    given.update(node.kwargs)
    return {argument.name: given.get(argument.name, argument.default_value) for argument in schema}


def set_arguments(node: Node, **changes: object) -> None:
    """Change arguments of an op whose schema has no keyword-only arguments."""
    node.args = tuple({**arguments(node), **changes}.values())
    node.kwargs = {}


def sizes_of_result(node: Node) -> tuple[Any, ...]:
    """Return the sizes of a node's result for comparison: numbers, or symbolic expressions."""
    # Not as text: printing an expression costs more than building one.
    sizes = node.meta["val"].shape
    return tuple(size.node.expr if isinstance(size, torch.SymInt) else size for size in sizes)


def likely_size(size: int | torch.SymInt) -> int:
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


def add_constant(module: GraphModule, name: str, value: torch.Tensor, before: Node) -> Node:
    """Register a buffer under a numbered name, and read the buffer right before a node."""
    number = 0
    while hasattr(module, f"{name}_{number}"):
        number += 1
    module.register_buffer(f"{name}_{number}", value)
    return read_constant(module, f"{name}_{number}", before)


def put_constant(module: GraphModule, layer: Node, word: str, values: NDArray[Any]) -> None:
    """Replace a layer's `weight` or `bias` by an array, in the dtype of its weight."""
    weight = constant(module, arguments(layer)["weight"])
    assert weight is not None
    stored = torch.from_numpy(values).to(weight.dtype)
    added = add_constant(module, f"{layer.name}_new_{word}", stored, layer)
    set_arguments(layer, **{word: added})


def read_constant(module: GraphModule, target: str, before: Node) -> Node:
    """Read a parameter or buffer right before a node."""
    with module.graph.inserting_before(before):
        node: Node = module.graph.get_attr(target)
    node.meta["val"] = constant(module, node)
    return node


def shallow_copy(module: GraphModule) -> GraphModule:
    """Copy a graph for rewriting; the weights stay shared with `module`."""
    graph = torch.fx.Graph()
    copied: dict[Node, Node] = {}
    output = graph.graph_copy(module.graph, copied)
    graph.output(output)
    graph.set_codegen(module.graph._codegen)
    rewritten = GraphModule(module, graph)
    watch_sizes(rewritten, module.meta[SIZES])
    return rewritten


def finish(module: GraphModule) -> GraphModule:
    """Remove unused nodes, parameters and submodules, then check the graph."""
    module.graph.eliminate_dead_code()
    used = {str(n.target) for n in module.graph.nodes if n.op == "get_attr"}
    for name, _ in [*module.named_parameters(), *module.named_buffers()]:
        if name not in used:
            owner, _, leaf = name.rpartition(".")
            holder = module.get_submodule(owner)
            holder._parameters.pop(leaf, None)
            holder._buffers.pop(leaf, None)
    module.delete_all_unused_submodules()
    module.graph.lint()
    module.recompile()
    return module


def fingerprint(model: TorchModel) -> str:
    """Return the digest of all ops with their options, in order, and all weights and constants."""
    digest = hashlib.sha256()
    for part in model.parts.values():
        _feed_graph(digest, part.portable)
    for name, value in sorted(model.weights.items()):
        digest.update(name.encode())
        _feed_tensor(digest, value)
    return digest.hexdigest()


def _feed_graph(digest: hashlib._Hash, module: GraphModule) -> None:
    for node in module.graph.nodes:
        given = f"{node.args} {node.kwargs}"
        digest.update(f"{node.op} {node.target} {node.name} {given};".encode())
        if node.op != "get_attr":
            continue
        # Constants in code are not buffers, and branches are graphs.
        value = attribute(module, node.target)
        if isinstance(value, GraphModule):
            _feed_graph(digest, value)
        elif isinstance(value, torch.Tensor) and not isinstance(value, torch.nn.Parameter):
            _feed_tensor(digest, value)


def _feed_tensor(digest: hashlib._Hash, value: torch.Tensor) -> None:
    stored = value.detach().contiguous().reshape(-1).view(torch.uint8)
    digest.update(stored.numpy().tobytes())
