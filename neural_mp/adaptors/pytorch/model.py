"""A PyTorch model as the adaptor holds it."""

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

#: Key of `Node.meta` under which the op's name is kept.
OP_NAME = "neural_mp_op"
#: Ops that a conversion inserts → the kind of conversion.
CONVERSIONS = {
    kernel_ops.quantize_uint8: "quantize",
    qdq_ops.quantize_dynamic: "quantize",
    kernel_ops.dequantize_uint8: "dequantize",
    torch.ops.aten._to_copy.default: "cast",
}
#: Key of `Node.meta` under which the name of a graph input is kept, where it is not the node's.
INPUT_NAME = "neural_mp_input"
#: Key of `Node.meta` under which a kernel's node keeps the op whose result it has, and how that is
#: stored in uint8, if it is.
RESULT = "neural_mp_result"
#: The path of the part that is the whole model.
WHOLE = ""


@dataclass(frozen=True)
class Part:
    """A captured graph: of a whole model, or of one of its modules.

    Attributes:
        portable: the graph in the form that is saved: float ops, casts, quantize/dequantize pairs.
        runnable: the graph that is run: `portable` itself, or its integer kernels.
        example: inputs the graph was captured with.
    """

    portable: GraphModule
    runnable: GraphModule
    example: CallArgs


@dataclass(frozen=True)
class TorchModel:
    """A captured model.

    Attributes:
        parts: path of a module → its graph; `WHOLE` alone where the whole model is one graph.
        example: inputs the model is called with.
        convention: how it is called.
        shell: the user's module whose own code calls the parts; None where the whole is one graph.
        original: the user's own module; None for a model that was converted or loaded.
        warnings: what the user should know about the capture.
    """

    parts: Mapping[str, Part]
    example: CallArgs
    convention: CallSignature
    shell: nn.Module | None = None
    original: nn.Module | None = None
    warnings: tuple[str, ...] = ()

    @property
    def portable(self) -> GraphModule:
        """The graph of the whole model in the form that is saved."""
        return self.parts[WHOLE].portable

    @property
    def runnable(self) -> GraphModule:
        """The graph of the whole model that is run."""
        return self.parts[WHOLE].runnable

    def call(self, inputs: object) -> CallArgs:
        """How the model is called with the inputs of one batch: as it was captured.

        Raises:
            DataError: the inputs hold something that is no number, or are not those it takes.
        """
        return self.convention.call(inputs, like=self.example)

    @cached_property
    def module(self) -> nn.Module:
        """What is run: the graph, or the user's code that calls the graphs of its modules."""
        return self.built(lambda part: part.runnable)

    def once(self, make: Callable[[TorchModel], T]) -> T:
        """What a function makes of the model; later calls give back the same."""
        if make not in self._made:
            self._made[make] = make(self)
        made: T = self._made[make]
        return made

    @cached_property
    def _made(self) -> dict[Callable[[TorchModel], Any], Any]:
        return {}

    @property
    def counts(self) -> ConversionCounts:
        """The conversions that were put in."""
        nodes = (node for part in self.parts.values() for node in part.runnable.graph.nodes)
        # A cast of the user's own bears a name; ours do not.
        ours = [CONVERSIONS.get(node.target) for node in nodes if OP_NAME not in node.meta]
        return ConversionCounts(*map(ours.count, ("cast", "quantize", "dequantize")))

    @property
    def weights(self) -> dict[str, torch.Tensor]:
        """The parameters and buffers of the portable form, by name."""
        module = self.built(lambda part: part.portable)
        return {**dict(module.named_parameters()), **dict(module.named_buffers())}

    def built(self, form: Callable[[Part], nn.Module]) -> nn.Module:
        """The model with this form of every part."""
        return assembled(self.shell, {path: form(part) for path, part in self.parts.items()})


def assembled(shell: nn.Module | None, parts: Mapping[str, nn.Module]) -> nn.Module:
    """The user's code with these modules in place of its own; weights of the rest are shared.

    Args:
        shell: the user's module; None where the only part is the whole.
        parts: path of a module → what is called instead.
    """
    if shell is None:
        (whole,) = parts.values()
        return whole
    # What stands in the memo is not copied but taken from there.
    memo: dict[int, Any] = {id(weight): weight for weight in shell.parameters()}
    memo.update({id(value): value.detach() for value in _tensors_of(shell)})
    memo.update({id(shell.get_submodule(path)): part for path, part in parts.items()})
    return copy.deepcopy(shell, memo)


def _tensors_of(module: nn.Module) -> Iterator[torch.Tensor]:
    """Tensors kept as plain attributes, such as a loss of the last step: with their history."""
    for part in module.modules():
        yield from (value for value in vars(part).values() if isinstance(value, torch.Tensor))


def attribute(module: GraphModule, target: str) -> Any:
    """The parameter, buffer or constant that a `get_attr` node names."""
    found: Any = module
    for part in target.split("."):
        found = getattr(found, part)
    return found


def constant(module: GraphModule, node: object) -> torch.Tensor | None:
    """The tensor of a `get_attr` node; None for any other node or value."""
    if isinstance(node, Node) and node.op == "get_attr":
        value = attribute(module, str(node.target))
        return value.detach() if isinstance(value, torch.Tensor) else None
    return None


def constants_of(module: GraphModule, node: Node) -> Iterator[torch.Tensor]:
    """The constants that a node reads."""
    for source in node.all_input_nodes:
        value = constant(module, source)
        if value is not None:
            yield value


def op_nodes(module: GraphModule) -> dict[str, Node]:
    """Op name → node, in the graph's order."""
    return {n.meta[OP_NAME]: n for n in module.graph.nodes if OP_NAME in n.meta}


def op_type(node: Node) -> str:
    """The op's type as users know it: `conv2d`, `relu`, `add`."""
    target: Any = node.target
    if hasattr(target, "_schema"):
        return str(target._schema.name).split("::")[-1]
    return str(getattr(target, "__name__", target))


def tensor_name(node: Node) -> str:
    """The name of a node's result: the op's name, or that of the graph input."""
    return str(node.meta.get(OP_NAME) or node.meta.get(INPUT_NAME, node.name))


def arguments(node: Node) -> dict[str, Any]:
    """All that an op is called with, by the names of its schema, defaults included."""
    target: Any = node.target
    schema = target._schema.arguments
    given = {argument.name: value for argument, value in zip(schema, node.args, strict=False)}
    given.update(node.kwargs)
    return {argument.name: given.get(argument.name, argument.default_value) for argument in schema}


def set_arguments(node: Node, **changes: object) -> None:
    """Let an op that takes all of its arguments by position be called with others."""
    node.args = tuple({**arguments(node), **changes}.values())
    node.kwargs = {}


def sizes_of_result(node: Node) -> tuple[Any, ...]:
    """The sizes of a node's result, to compare: numbers, and expressions where they are free."""
    # Not as text: to write an expression takes longer than to make it.
    sizes = node.meta["val"].shape
    return tuple(size.node.expr if isinstance(size, torch.SymInt) else size for size in sizes)


def likely_size(size: int | torch.SymInt) -> int:
    """A size; for one that is free, what it was when the graph was captured."""
    if isinstance(size, torch.SymInt):
        return int(size.node.hint) if size.node.has_hint() else 1
    return int(size)


def is_float(value: object) -> bool:
    """Whether a value is a tensor of floating-point numbers."""
    return isinstance(value, torch.Tensor) and value.is_floating_point()


def has_tensors(node: Node) -> bool:
    """Whether a node's result is, or holds, a tensor."""
    value = node.meta.get("val")
    values = value if isinstance(value, tuple | list) else (value,)
    return any(isinstance(v, torch.Tensor) for v in values)


def add_constant(module: GraphModule, name: str, value: torch.Tensor, before: Node) -> Node:
    """Register a buffer, with a number behind its name, and read it right before a node."""
    number = 0
    while hasattr(module, f"{name}_{number}"):
        number += 1
    module.register_buffer(f"{name}_{number}", value)
    return read_constant(module, f"{name}_{number}", before)


def put_constant(module: GraphModule, layer: Node, word: str, values: NDArray[Any]) -> None:
    """Let a layer read an array as its `weight` or `bias`, in the dtype that its weight has."""
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
    """A graph that can be rewritten while the weights stay shared with `module`."""
    graph = torch.fx.Graph()
    copied: dict[Node, Node] = {}
    output = graph.graph_copy(module.graph, copied)
    graph.output(output)
    graph.set_codegen(module.graph._codegen)
    rewritten = GraphModule(module, graph)
    watch_sizes(rewritten, module.meta[SIZES])
    return rewritten


def finish(module: GraphModule) -> GraphModule:
    """Drop what nothing reads any more, parameters included, and check the graph."""
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
    """The digest of every op with its options, in order, and of every weight and constant."""
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
        # Constants of the code are no buffers; branches are graphs themselves.
        value = attrgetter(node.target)(module)
        if isinstance(value, GraphModule):
            _feed_graph(digest, value)
        elif isinstance(value, torch.Tensor) and not isinstance(value, torch.nn.Parameter):
            _feed_tensor(digest, value)


def _feed_tensor(digest: hashlib._Hash, value: torch.Tensor) -> None:
    stored = value.detach().contiguous().reshape(-1).view(torch.uint8)
    digest.update(stored.numpy().tobytes())
