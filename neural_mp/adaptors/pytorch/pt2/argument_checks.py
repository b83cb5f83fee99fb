"""Arguments of ops whose kernels trust their arguments, in exported programs nevertheless.

Kernels of core ATen such as `_native_batch_norm_legit` leave checks to the function that calls them
in PyTorch, and read or write memory outside the tensors if sizes do not match.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any, TypeGuard

import torch
from torch._ops import OpOverload
from torch.fx.experimental.symbolic_shapes import statically_known_true

#: Arguments of a call by name.
Arguments = Mapping[str, Any]
#: Layers of a recurrent op: more than any model has.
_MAX_LAYERS = 1000
#: Recurrent ops, with their gates.
GATES = {"lstm": 4, "gru": 3, "rnn_tanh": 1, "rnn_relu": 1}
#: Bags of embeddings.
BAGS = ("_embedding_bag", "embedding_bag")
#: Ways to scale a Fourier transform: not at all, by the root of its length, by its length.
_SCALINGS = (0, 1, 2)


def get_packet_name(op: object) -> str:
    """Return the name of an op of ATen without its variant; nothing for other functions."""
    if not isinstance(op, OpOverload):
        return ""
    library, _, name = op._schema.name.partition("::")
    return name if library == "aten" else ""


def is_checked(op: object) -> bool:
    """Whether the kernels of an op trust arguments that are checked here."""
    return get_packet_name(op) in _CHECKS


def find_faults(op: OpOverload, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Iterator[str]:
    """Yield what is wrong with the arguments of a call; nothing for ops that check these."""
    check = _CHECKS.get(get_packet_name(op))
    if check is None:
        return
    names = [argument.name for argument in op._schema.arguments]
    defaults = {a.name: a.default_value for a in op._schema.arguments if a.has_default_value()}
    yield from check(op, {**defaults, **dict(zip(names, args, strict=False)), **kwargs})


def _is_known_equal(first: object, second: object) -> bool:
    return bool(statically_known_true(first == second))


def has_shape(tensor: object, shape: tuple[Any, ...]) -> TypeGuard[torch.Tensor]:
    """Whether a value is a tensor of this shape."""
    return (
        isinstance(tensor, torch.Tensor)
        and tensor.dim() == len(shape)
        and all(map(_is_known_equal, tensor.shape, shape))
    )


def _find_batch_norm_faults(_: OpOverload, given: Arguments) -> Iterator[str]:
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
        if not has_shape(tensor, (x.shape[1],)):
            yield f"{name} must have a value per channel ({x.shape[1]}), got {tuple(tensor.shape)}"
    if types - {x.dtype} and (types != {torch.float32} or x.dtype.itemsize != 2):
        yield f"weights must be of the type {x.dtype}, got {', '.join(map(str, types))}"


def _find_weight_norm_faults(_: OpOverload, given: Arguments) -> Iterator[str]:
    direction, size, dim = given["v"], given["g"], given["dim"]
    if not 0 <= dim < direction.dim():
        yield f"dim must be an axis of v, which has {direction.dim()}, got {dim}"
        return
    expected = tuple(n if axis == dim else 1 for axis, n in enumerate(direction.shape))
    if not has_shape(size, expected) or not all(
        _is_known_equal(n, int(n)) and n > 0 for n in expected
    ):
        yield f"g must have the shape {expected}, got {tuple(size.shape)}"
    if size.dtype != direction.dtype or not size.is_floating_point():
        yield f"g and v must have the same float type, got {size.dtype} and {direction.dtype}"


def _find_fourier_faults(op: OpOverload, given: Arguments) -> Iterator[str]:
    x, axes = given["self"], given["dim"]
    if not axes or len(set(axes)) < len(axes) or not all(0 <= axis < x.dim() for axis in axes):
        yield f"dim must name different axes of an input with {x.dim()}, got {list(axes)}"
        return
    if given["normalization"] not in _SCALINGS:
        yield f"normalization must be 0, 1 or 2, got {given['normalization']}"
    name = get_packet_name(op)
    real = name == "_fft_r2c"
    supported = x.is_floating_point() if real else x.is_complex()
    if not supported or x.dtype.itemsize < 4:
        yield f"input must be of {'floats' if real else 'complex numbers'}, got {x.dtype}"
    if not all(statically_known_true(x.shape[axis] > 0) for axis in axes):
        yield "the transformed axes must not be empty"
    if name == "_fft_c2r" and not _is_known_equal(
        given["last_dim_size"] // 2 + 1, x.shape[axes[-1]]
    ):
        yield f"last_dim_size must suit {x.shape[axes[-1]]} values, got {given['last_dim_size']}"


def _find_recurrent_faults(op: OpOverload, given: Arguments) -> Iterator[str]:
    name, layers = get_packet_name(op), given.get("num_layers")
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
    if not all(has_shape(t, (layers * sides, batch, t.shape[2])) for t in states):
        yield f"states must be of {layers * sides} layers and {batch} samples"
    expected: list[tuple[Any, ...]] = []
    for layer in range(layers):
        input_size = x.shape[2] if layer == 0 else result * sides
        height = GATES[name] * width
        biases = [(height,), (height,)] if given["has_biases"] else []
        projection = [] if _is_known_equal(result, width) else [(result, width)]
        expected += [(height, input_size), (height, result), *biases, *projection] * sides
    if len(weights) != len(expected) or not all(map(has_shape, weights, expected)):
        yield f"params must have the shapes {expected[:8]}"
    if {t.dtype for t in (*states, *weights)} != {x.dtype} or not x.is_floating_point():
        yield "input, states and params must have the same float type"


def _find_attention_faults(_: OpOverload, given: Arguments) -> Iterator[str]:
    query, key, value = (given[name] for name in ("query", "key", "value"))
    if {t.dim() for t in (query, key, value)} != {4}:
        yield "query, key and value must have 4 axes"
        return
    batch, heads, length, width = query.shape
    if not all(has_shape(t, (batch, heads, key.shape[2], width)) for t in (key, value)):
        yield "key and value must have the samples, heads and width of query"
    if not all(statically_known_true(n > 0) for n in (batch, heads, length, width, key.shape[2])):
        yield "query and key must not be empty"
    if {key.dtype, value.dtype} != {query.dtype} or not query.is_floating_point():
        yield "query, key and value must have the same float type"


def _find_bag_faults(_: OpOverload, given: Arguments) -> Iterator[str]:
    if given["offsets"].dim() != 1 or given["weight"].dim() != 2:
        yield "offsets must have 1 axis, and weight 2"
    elif _is_known_equal(given["offsets"].shape[0], 0):
        yield "offsets must not be empty"


def _find_power_faults(_: OpOverload, given: Arguments) -> Iterator[str]:
    if not -(2**31) < given["n"] < 2**31:
        yield f"n must have 32 bits, got {given['n']}"


_CHECKS: dict[str, Callable[[OpOverload, Arguments], Iterator[str]]] = {
    **dict.fromkeys(("_fft_c2c", "_fft_c2r", "_fft_r2c"), _find_fourier_faults),
    **dict.fromkeys(
        (
            "_native_batch_norm_legit",
            "_native_batch_norm_legit_functional",
            "_native_batch_norm_legit_no_training",
            "native_batch_norm",
        ),
        _find_batch_norm_faults,
    ),
    **dict.fromkeys(BAGS, _find_bag_faults),
    **dict.fromkeys(GATES, _find_recurrent_faults),
    **dict.fromkeys(("linalg_matrix_power", "matrix_power"), _find_power_faults),
    "_scaled_dot_product_flash_attention_for_cpu": _find_attention_faults,
    "_weight_norm": _find_weight_norm_faults,
}
