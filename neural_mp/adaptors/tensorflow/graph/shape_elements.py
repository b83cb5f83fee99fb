"""Elements of small tensors of integers, from which graphs compute shapes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import prod
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from neural_mp.adaptors.common.symbolic_sizes import Size, is_nonnegative
from neural_mp.adaptors.tensorflow.graph.shape_rules import Facts, index_parts
from neural_mp.adaptors.tensorflow.graph.tensor_graph import NodeDef

#: Largest tensor whose elements are tracked: the sizes of any tensor, and its paddings.
MAX_ELEMENTS = 16
Elements: TypeAlias = NDArray[np.object_]
Rule: TypeAlias = Callable[[NodeDef, Sequence[Facts]], Elements]


def to_elements(values: object) -> Elements:
    """Return integers and expressions as an array, which may have no axes."""
    return np.asarray(values, dtype=object)


def _require_value(facts: Facts) -> Elements:
    if facts.value is None:
        raise ValueError("the value is unknown")
    return facts.value


def of_first(node: NodeDef, inputs: Sequence[Facts]) -> Elements:
    return _require_value(inputs[0])


def elementwise_rule(compute: Callable[..., Size]) -> Rule:
    ufunc = np.frompyfunc(compute, 2, 1)
    return lambda node, inputs: to_elements(
        ufunc(_require_value(inputs[0]), _require_value(inputs[1]))
    )


def negative(node: NodeDef, inputs: Sequence[Facts]) -> Elements:
    return to_elements(-_require_value(inputs[0]))


def truncated_division(whole: Callable[[Size, Size], Size]) -> Callable[[Size, Size], Size]:
    """Return a division that rounds to zero: of no negative values, as one that rounds down."""

    def divide_nonnegative(lhs: Size, rhs: Size) -> Size:
        if not (is_nonnegative(lhs) and is_nonnegative(rhs)):
            raise ValueError("signs are unknown")
        return whole(lhs, rhs)

    return divide_nonnegative


def reduction_rule(compute: Callable[[Size, Size], Size]) -> Rule:
    ufunc = np.frompyfunc(compute, 2, 1)

    def reduce_elements(node: NodeDef, inputs: Sequence[Facts]) -> Elements:
        values, axes = _require_value(inputs[0]), tuple(inputs[1].integers)
        if not values.size:
            raise ValueError("there are no elements")
        for axis in sorted(axis % values.ndim for axis in axes)[::-1]:
            values = to_elements(ufunc.reduce(values, axis=axis, keepdims=node.attr["keep_dims"].b))
        return values

    return reduce_elements


def shape(node: NodeDef, inputs: Sequence[Facts]) -> Elements:
    return to_elements([*inputs[0].sizes])


def size(node: NodeDef, inputs: Sequence[Facts]) -> Elements:
    return to_elements(prod(inputs[0].sizes))


def rank(node: NodeDef, inputs: Sequence[Facts]) -> Elements:
    return to_elements(len(inputs[0].sizes))


def stack(node: NodeDef, inputs: Sequence[Facts]) -> Elements:
    return np.stack([_require_value(facts) for facts in inputs], node.attr["axis"].i)


def concat(node: NodeDef, inputs: Sequence[Facts]) -> Elements:
    return np.concatenate([_require_value(facts) for facts in inputs[:-1]], inputs[-1].integers[0])


def gather(node: NodeDef, inputs: Sequence[Facts]) -> Elements:
    if "batch_dims" in node.attr and node.attr["batch_dims"].i:
        raise ValueError("rows of batches are not tracked")
    rows = np.reshape(inputs[1].integers, [int(size) for size in _require_value(inputs[1]).shape])
    axis = inputs[2].integers[0] if len(inputs) > 2 else 0
    return to_elements(np.take(_require_value(inputs[0]), rows.astype(np.intp), axis))


def strided_slice(node: NodeDef, inputs: Sequence[Facts]) -> Elements:
    values = _require_value(inputs[0])
    bounds = [facts.integers for facts in inputs[1:4]]
    return to_elements(values[tuple(index_parts(node, bounds, values.ndim))])


def slice_by_size(node: NodeDef, inputs: Sequence[Facts]) -> Elements:
    parts = zip(inputs[1].integers, inputs[2].integers, strict=True)
    slices = (slice(begin, None if size == -1 else begin + size) for begin, size in parts)
    return to_elements(_require_value(inputs[0])[tuple(slices)])


def fill(node: NodeDef, inputs: Sequence[Facts]) -> Elements:
    (number,), shape = inputs[1].elements, inputs[0].integers
    if np.prod(shape, dtype=float) > MAX_ELEMENTS:
        raise ValueError("the tensor is large")
    return np.full(shape, number, dtype=object)


def range_of(node: NodeDef, inputs: Sequence[Facts]) -> Elements:
    numbers = range(*(facts.integers[0] for facts in inputs))
    return to_elements([*numbers[: MAX_ELEMENTS + 1]])
