"""Arguments of ops whose kernels trust their arguments, in exported programs nevertheless.

Kernels of core ATen such as `_native_batch_norm_legit` leave checks to the function that calls them
in PyTorch, and read or write memory outside the tensors if sizes do not match. Shapes in a file are
claims: the shapes of the checked nodes are derived from the inputs and weights of the program.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch._ops import OpOverload
from torch.export import ExportedProgram
from torch.fx import GraphModule, Interpreter, Node
from torch.fx.experimental.symbolic_shapes import statically_known_true
from torch.utils import _pytree as pytree

from neural_mp.adaptors.pytorch.recurrent import free_lengths

#: Arguments of a call by name.
Arguments = Mapping[str, Any]
#: Layers of a recurrent op: more than any model has.
_MAX_LAYERS = 1000
#: Gates of the recurrent ops.
_GATES = {"lstm": 4, "gru": 3, "rnn_tanh": 1, "rnn_relu": 1}
#: Ways to scale a Fourier transform: not at all, by the root of its length, by its length.
_SCALINGS = (0, 1, 2)


def check_arguments(program: ExportedProgram, values: Mapping[str, torch.Tensor]) -> None:
    """Check the arguments of all ops of a program whose kernels do not.

    Args:
        program: the program.
        values: name of a weight, constant or input → its value, for inputs that of the example.

    Raises:
        ValueError: an argument does not fit.
    """
    checked = [node for node in program.graph.nodes if _is_checked(node)]
    for node in checked:
        for fault in _of_bags(node, values):
            raise ValueError(_wrong(node, fault))
    for module in program.graph_module.modules():
        if module is not program.graph_module and isinstance(module, GraphModule):
            for node in filter(_is_checked, module.graph.nodes):
                raise ValueError(
                    f"the op {node.target} ({node.name!r}) must not be in a nested graph, since "
                    f"the sizes of its arguments are unknown there; export the model without it"
                )
    if checked:
        _Propagation(program.graph_module, checked, values).propagate()


def _is_checked(node: Node) -> bool:
    return isinstance(node.target, OpOverload) and _packet(node.target) in _CHECKS


def _packet(op: OpOverload) -> str:
    library, _, name = op._schema.name.partition("::")
    return name if library == "aten" else ""


def _wrong(node: Node, fault: str) -> str:
    return f"the arguments of the op {node.target} ({node.name!r}) are wrong: {fault}"


def faults(op: OpOverload, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Iterator[str]:
    """Yield what is wrong with the arguments of a call; nothing for ops that check these."""
    check = _CHECKS.get(_packet(op))
    if check is None:
        return
    names = [argument.name for argument in op._schema.arguments]
    defaults = {a.name: a.default_value for a in op._schema.arguments if a.has_default_value()}
    yield from check(op, {**defaults, **dict(zip(names, args, strict=False)), **kwargs})


class _Propagation(Interpreter):
    """Derives the tensors of nodes without their values, and checks the arguments of some."""

    def __init__(
        self, module: GraphModule, checked: list[Node], values: Mapping[str, torch.Tensor]
    ) -> None:
        super().__init__(module)
        self._checked = set(checked)
        self._sizes = _example_sizes(module, values)
        self._needed: set[Node] = set()
        for node in reversed(module.graph.nodes):
            if node in self._needed or node in self._checked:
                self._needed.update(node.all_input_nodes)

    def propagate(self) -> None:
        """Run the nodes that the checked ones depend on.

        Raises:
            ValueError: an argument does not fit.
        """
        inputs = [n.meta.get("val") for n in self.module.graph.nodes if n.op == "placeholder"]
        fake = torch._guards.detect_fake_mode(inputs)
        if fake is None:
            raise ValueError("the inputs of a program must be tensors")
        with fake, torch.no_grad(), free_lengths():
            self.run(*inputs, enable_io_processing=False)

    def run_node(self, n: Node) -> Any:
        """Return the tensor of a node; None for nodes that no checked one depends on."""
        if n in self._checked:
            given = self.fetch_args_kwargs_from_env(n)
            fault = next(faults(n.target, *given), None)
            if fault is not None and _packet(n.target) in _GATES:
                fault = self._fault_of_example(n.target, *given)
            if fault is not None:
                raise ValueError(_wrong(n, fault))
        return super().run_node(n) if n.op == "placeholder" or n in self._needed else None

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
        sized = pytree.tree_map(self._sized, (args, kwargs))
        return next(faults(op, *sized), None)

    def _sized(self, leaf: Any) -> Any:
        """Return a tensor with the sizes of the example; unchanged if these are unknown."""
        if not isinstance(leaf, torch.Tensor):
            return leaf
        sizes = [self._size(size) for size in leaf.shape]
        if any(size is None for size in sizes):
            return leaf
        return torch.empty(sizes, dtype=leaf.dtype, device="meta")

    def _size(self, size: Any) -> int | None:
        if isinstance(size, int):
            return size
        found = size.node.expr.subs(self._sizes)
        return int(found) if found.is_Integer else None


def _example_sizes(module: GraphModule, values: Mapping[str, torch.Tensor]) -> dict[Any, int]:
    """Return free size, a symbol, → size in the example inputs."""
    found = {}
    for node in module.graph.nodes:
        tensor, value = node.meta.get("val"), values.get(node.name)
        if node.op != "placeholder" or not isinstance(tensor, torch.Tensor) or value is None:
            continue
        for free, size in zip(tensor.shape, value.shape, strict=False):
            if isinstance(free, torch.SymInt) and free.node.expr.is_Symbol:
                found[free.node.expr] = size
    return found


def _equal(first: Any, second: Any) -> bool:
    return bool(statically_known_true(first == second))


def _has_shape(tensor: Any, shape: tuple[Any, ...]) -> bool:
    """Whether a value is a tensor of this shape."""
    return (
        isinstance(tensor, torch.Tensor)
        and tensor.dim() == len(shape)
        and all(map(_equal, tensor.shape, shape))
    )


def _batch_norm(_: OpOverload, given: Arguments) -> Iterator[str]:
    x = given["input"]
    if x.dim() < 2 or not x.is_floating_point():
        yield f"input must have at least 2 axes of floats, got {x.dim()} axes of {x.dtype}"
        return
    if not given.get("training") and given.get("running_mean") is None:
        yield "running_mean must be given unless in training"
    types = set()
    for name in ("weight", "bias", "running_mean", "running_var"):
        tensor = given.get(name)
        if tensor is None:
            continue
        types.add(tensor.dtype)
        if not _has_shape(tensor, (x.shape[1],)):
            yield f"{name} must have a value per channel ({x.shape[1]}), got {tuple(tensor.shape)}"
    if types - {x.dtype} and (types != {torch.float32} or x.dtype.itemsize != 2):
        yield f"weights must be of the type {x.dtype}, got {', '.join(map(str, types))}"


def _weight_norm(_: OpOverload, given: Arguments) -> Iterator[str]:
    direction, size, dim = given["v"], given["g"], given["dim"]
    if not 0 <= dim < direction.dim():
        yield f"dim must be an axis of v, which has {direction.dim()}, got {dim}"
        return
    expected = tuple(n if axis == dim else 1 for axis, n in enumerate(direction.shape))
    if not _has_shape(size, expected) or not all(_equal(n, int(n)) and n > 0 for n in expected):
        yield f"g must have the shape {expected}, got {tuple(size.shape)}"
    if size.dtype != direction.dtype or not size.is_floating_point():
        yield f"g and v must have the same float type, got {size.dtype} and {direction.dtype}"


def _fourier(op: OpOverload, given: Arguments) -> Iterator[str]:
    x, axes = given["self"], given["dim"]
    if not axes or len(set(axes)) < len(axes) or not all(0 <= axis < x.dim() for axis in axes):
        yield f"dim must name different axes of an input with {x.dim()}, got {list(axes)}"
        return
    if given["normalization"] not in _SCALINGS:
        yield f"normalization must be 0, 1 or 2, got {given['normalization']}"
    name = _packet(op)
    real = name == "_fft_r2c"
    fits = x.is_floating_point() if real else x.is_complex()
    if not fits or x.dtype.itemsize < 4:
        yield f"input must be of {'floats' if real else 'complex numbers'}, got {x.dtype}"
    if not all(statically_known_true(x.shape[axis] > 0) for axis in axes):
        yield "the transformed axes must not be empty"
    if name == "_fft_c2r" and not _equal(given["last_dim_size"] // 2 + 1, x.shape[axes[-1]]):
        yield f"last_dim_size must suit {x.shape[axes[-1]]} values, got {given['last_dim_size']}"


def _recurrent(op: OpOverload, given: Arguments) -> Iterator[str]:
    name, layers = _packet(op), given.get("num_layers")
    if op._overloadname != "input" or not isinstance(layers, int) or not 0 < layers <= _MAX_LAYERS:
        yield f"the op must be of the kind input, with 1 to {_MAX_LAYERS} layers, got {layers}"
        return
    x, states, weights = given["input"], given["hx"], list(given["params"])
    states = list(states) if name == "lstm" else [states]
    sides = 2 if given["bidirectional"] else 1
    if len(states) != (2 if name == "lstm" else 1) or {t.dim() for t in (x, *states)} != {3}:
        yield "input and states must have 3 axes"
        return
    result, width = states[0].shape[2], states[-1].shape[2]
    batch = x.shape[0 if given["batch_first"] else 1]
    if not all(_has_shape(t, (layers * sides, batch, t.shape[2])) for t in states):
        yield f"states must be of {layers * sides} layers and {batch} samples"
    expected: list[tuple[Any, ...]] = []
    for layer in range(layers):
        read = x.shape[2] if layer == 0 else result * sides
        height = _GATES[name] * width
        biases = [(height,), (height,)] if given["has_biases"] else []
        projection = [] if _equal(result, width) else [(result, width)]
        expected += [(height, read), (height, result), *biases, *projection] * sides
    if len(weights) != len(expected) or not all(map(_has_shape, weights, expected)):
        yield f"params must have the shapes {expected[:8]}"
    if {t.dtype for t in (*states, *weights)} != {x.dtype} or not x.is_floating_point():
        yield "input, states and params must have the same float type"


def _attention(_: OpOverload, given: Arguments) -> Iterator[str]:
    query, key, value = (given[name] for name in ("query", "key", "value"))
    if {t.dim() for t in (query, key, value)} != {4}:
        yield "query, key and value must have 4 axes"
        return
    batch, heads, length, width = query.shape
    if not all(_has_shape(t, (batch, heads, key.shape[2], width)) for t in (key, value)):
        yield "key and value must have the samples, heads and width of query"
    if not all(statically_known_true(n > 0) for n in (batch, heads, length, width, key.shape[2])):
        yield "query and key must not be empty"
    if {key.dtype, value.dtype} != {query.dtype} or not query.is_floating_point():
        yield "query, key and value must have the same float type"


def _of_bags(node: Node, values: Mapping[str, torch.Tensor]) -> Iterator[str]:
    """Yield the faults of the first indices of bags of embeddings, unless these are in order.

    The op itself checks the first and last of them, and the indices.
    """
    if _packet(node.target) not in _BAGS:
        return
    source = node.args[2] if len(node.args) > 2 else node.kwargs.get("offsets")
    while isinstance(source, Node) and isinstance(source.target, OpOverload):
        if _packet(source.target) not in _COPIES:
            break
        source = source.args[0]
    if not isinstance(source, Node):
        yield "offsets must be a tensor"
    elif source.op == "placeholder":
        value = values.get(source.name)
        if value is not None and not (value.numel() and bool((value.diff() >= 0).all())):
            yield "offsets must be numbers in ascending order"
    elif not _ascends(source):
        yield "offsets must be an input, a constant, or of the op arange"


def _ascends(node: Node) -> bool:
    """Whether a node counts upwards: `arange`, also in steps of a size."""
    if not isinstance(node.target, OpOverload):
        return False
    if _packet(node.target) == "mul" and isinstance(node.args[0], Node):
        return _ascends(node.args[0]) and _is_count(node.args[1])
    if _packet(node.target) != "arange":
        return False
    numbers = list(node.args)
    start, end = (numbers[0], numbers[1]) if len(numbers) > 1 else (0, numbers[0])
    step = numbers[2] if len(numbers) > 2 else 1
    ends = isinstance(end, Node) or (isinstance(end, int) and end > 0)
    return start == 0 and ends and (isinstance(step, Node) or (isinstance(step, int) and step > 0))


def _is_count(value: object) -> bool:
    """Whether an argument is a positive number or the size of a tensor."""
    if isinstance(value, Node):
        return value.target is torch.ops.aten.sym_size.int
    return isinstance(value, int) and value > 0


def _bag(_: OpOverload, given: Arguments) -> Iterator[str]:
    if given["offsets"].dim() != 1 or given["weight"].dim() != 2:
        yield "offsets must have 1 axis, and weight 2"
    elif _equal(given["offsets"].shape[0], 0):
        yield "offsets must not be empty"


def _power(_: OpOverload, given: Arguments) -> Iterator[str]:
    if not -(2**31) < given["n"] < 2**31:
        yield f"n must have 32 bits, got {given['n']}"


_BAGS = ("_embedding_bag", "embedding_bag")
#: Ops that keep the order of numbers.
_COPIES = ("_to_copy", "alias", "clone", "detach", "lift_fresh_copy", "reshape", "to", "view")
_CHECKS: dict[str, Callable[[OpOverload, Arguments], Iterator[str]]] = {
    **dict.fromkeys(("_fft_c2c", "_fft_c2r", "_fft_r2c"), _fourier),
    **dict.fromkeys(
        (
            *("_native_batch_norm_legit", "_native_batch_norm_legit_functional"),
            *("_native_batch_norm_legit_no_training", "native_batch_norm"),
        ),
        _batch_norm,
    ),
    **dict.fromkeys(_BAGS, _bag),
    **dict.fromkeys(_GATES, _recurrent),
    **dict.fromkeys(("linalg_matrix_power", "matrix_power"), _power),
    "_scaled_dot_product_flash_attention_for_cpu": _attention,
    "_weight_norm": _weight_norm,
}
