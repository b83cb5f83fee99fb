"""Shapes of the results of op types, as functions of the shapes of their inputs.

A rule raises ValueError, IndexError or ArithmeticError if a size that it needs is unknown, and for
inputs that the op rejects.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import reduce
from math import prod
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from neural_mp.adaptors.common.symbolic_sizes import (
    Size,
    broadcast_size,
    ceil_div,
    is_nonnegative,
    maximum,
    minimum,
)
from neural_mp.adaptors.tensorflow.graph.tensor_graph import (
    NodeDef,
    channels_first,
    get_integers_attribute,
    get_text_attribute,
)

#: Sizes of a tensor, None if nothing is known of an axis; None if the rank is unknown.
Sizes: TypeAlias = tuple[Size | None, ...] | None


@dataclass(frozen=True)
class Facts:
    """Facts about a tensor that hold in every run.

    Attributes:
        shape: the sizes.
        value: the elements of a small tensor of integers; None if unknown.
    """

    shape: tuple[Size, ...] | None
    value: NDArray[np.object_] | None = None

    @property
    def sizes(self) -> tuple[Size, ...]:
        """The shape of a tensor of known rank."""
        if self.shape is None:
            raise ValueError("the rank is unknown")
        return self.shape

    @property
    def elements(self) -> list[Size]:
        """The elements of a tensor of known value."""
        if self.value is None:
            raise ValueError("the value is unknown")
        return list(self.value.reshape(-1))

    @property
    def integers(self) -> list[int]:
        """The elements of a tensor that is constant."""
        numbers = [element for element in self.elements if isinstance(element, int)]
        if len(numbers) < len(self.elements):
            raise ValueError("the value is not constant")
        return numbers


#: A rule returns the shapes of the first results, those of further results may be missing.
Rule: TypeAlias = Callable[[NodeDef, Sequence[Facts]], Sequence[Sizes]]


def of_first(node: NodeDef, inputs: Sequence[Facts]) -> list[Sizes]:
    return [inputs[0].shape]


def of_all(node: NodeDef, inputs: Sequence[Facts]) -> list[Sizes]:
    return [reduce(broadcast_shapes, (facts.sizes for facts in inputs))]


def broadcast_shapes(first: Sequence[Size], second: Sequence[Size]) -> tuple[Size, ...]:
    """Return the shape of two tensors combined elementwise."""
    rank = max(len(first), len(second))
    lhs, rhs = ((1,) * (rank - len(shape)) + tuple(shape) for shape in (first, second))
    return tuple(map(broadcast_size, lhs, rhs))


def _window_sizes(node: NodeDef, source: Facts, window: Sequence[Size]) -> dict[int, Size]:
    """Return axis → size after a window, of spatial sizes `window`, moves over a tensor."""
    sizes, strides = source.sizes, get_integers_attribute(node, "strides")
    dilations = get_integers_attribute(node, "dilations") or [1] * len(sizes)
    explicit = get_integers_attribute(node, "explicit_paddings")
    padding, moved = get_text_attribute(node, "padding"), {}
    for index, width in enumerate(window):
        axis = index + (2 if channels_first(node) else 1)
        size, stride = sizes[axis], strides[axis]
        if padding == "SAME":
            moved[axis] = ceil_div(size, stride)
            continue
        around = sum(explicit[2 * axis : 2 * axis + 2]) if padding == "EXPLICIT" else 0
        reach = (width - 1) * dilations[axis] + 1
        moved[axis] = ceil_div(size + around - reach + 1, stride)
    return moved


def convolution(node: NodeDef, inputs: Sequence[Facts]) -> list[Sizes]:
    source, weight = inputs[0].sizes, inputs[1].sizes
    channel_axis = 1 if channels_first(node) else len(source) - 1
    moved = _window_sizes(node, inputs[0], weight[:-2]) | {0: source[0], channel_axis: weight[-1]}
    return [tuple(moved[axis] for axis in range(len(source)))]


def depthwise_convolution(node: NodeDef, inputs: Sequence[Facts]) -> list[Sizes]:
    *window, channels, multiplier = inputs[1].sizes
    return convolution(node, [inputs[0], Facts((*window, 1, channels * multiplier))])


def pooling(node: NodeDef, inputs: Sequence[Facts]) -> list[Sizes]:
    source, window = inputs[0].sizes, get_integers_attribute(node, "ksize")
    spatial = window[2:] if channels_first(node) else window[1:-1]
    channel_axis = 1 if channels_first(node) else len(source) - 1
    if window[0] != 1 or window[channel_axis] != 1:
        return [None]
    moved = _window_sizes(node, inputs[0], spatial)
    return [tuple(moved.get(axis, size) for axis, size in enumerate(source))]


def resize(node: NodeDef, inputs: Sequence[Facts]) -> list[Sizes]:
    source = inputs[0].sizes
    return [(source[0], *map(_size_from_element, inputs[1].elements), source[3])]


def _size_from_element(element: Size) -> Size | None:
    """Return an element of a shape; None if it may be -1, which stands for another size."""
    return element if is_nonnegative(element) else None


def reshape(node: NodeDef, inputs: Sequence[Facts]) -> list[Sizes]:
    target = inputs[1].elements
    sizes = [_size_from_element(element) for element in target]
    defined = [size for size in sizes if size is not None]
    if -1 in target and inputs[0].shape is not None and len(defined) == len(target) - 1:
        sizes[target.index(-1)] = prod(inputs[0].sizes) // prod(defined)
    return [tuple(sizes)]


def fill(node: NodeDef, inputs: Sequence[Facts]) -> list[Sizes]:
    return [tuple(map(_size_from_element, inputs[0].elements))]


def broadcast_to(node: NodeDef, inputs: Sequence[Facts]) -> list[Sizes]:
    return [tuple(map(_size_from_element, inputs[1].elements))]


def transpose(node: NodeDef, inputs: Sequence[Facts]) -> list[Sizes]:
    return [tuple(inputs[0].sizes[axis] for axis in inputs[1].integers)]


def pad(node: NodeDef, inputs: Sequence[Facts]) -> list[Sizes]:
    amounts = inputs[1].elements
    pairs = zip(amounts[::2], amounts[1::2], strict=True)
    sizes = zip(inputs[0].sizes, pairs, strict=True)
    return [tuple(size + low + high for size, (low, high) in sizes)]


def tile(node: NodeDef, inputs: Sequence[Facts]) -> list[Sizes]:
    counts = zip(inputs[0].sizes, inputs[1].elements, strict=True)
    return [tuple(size * count for size, count in counts)]


def space_to_batch(node: NodeDef, inputs: Sequence[Facts]) -> list[Sizes]:
    (batch, *sizes), block, amounts = inputs[0].sizes, inputs[1].integers, inputs[2].elements
    for axis, width in enumerate(block):
        sizes[axis] = (sizes[axis] + amounts[2 * axis] + amounts[2 * axis + 1]) // width
    return [(batch * prod(block), *sizes)]


def batch_to_space(node: NodeDef, inputs: Sequence[Facts]) -> list[Sizes]:
    (batch, *sizes), block, amounts = inputs[0].sizes, inputs[1].integers, inputs[2].elements
    for axis, width in enumerate(block):
        sizes[axis] = sizes[axis] * width - amounts[2 * axis] - amounts[2 * axis + 1]
    return [(batch // prod(block), *sizes)]


def depth_to_space(node: NodeDef, inputs: Sequence[Facts]) -> list[Sizes]:
    (batch, height, width, channels), block = inputs[0].sizes, node.attr["block_size"].i
    if get_text_attribute(node, "data_format") not in ("", "NHWC"):
        return [None]
    return [(batch, height * block, width * block, channels // block**2)]


def space_to_depth(node: NodeDef, inputs: Sequence[Facts]) -> list[Sizes]:
    (batch, height, width, channels), block = inputs[0].sizes, node.attr["block_size"].i
    if get_text_attribute(node, "data_format") not in ("", "NHWC"):
        return [None]
    return [(batch, height // block, width // block, channels * block**2)]


def product(node: NodeDef, inputs: Sequence[Facts]) -> list[Sizes]:
    transposed = [
        any(flag in node.attr and node.attr[flag].b for flag in flags)
        for flags in (("transpose_a", "adj_x"), ("transpose_b", "adj_y"))
    ]
    *lhs_batch, rows, inner = inputs[0].sizes
    *rhs_batch, depth, columns = inputs[1].sizes
    rows, columns = inner if transposed[0] else rows, depth if transposed[1] else columns
    return [(*broadcast_shapes(lhs_batch, rhs_batch), rows, columns)]


def einsum(node: NodeDef, inputs: Sequence[Facts]) -> list[Sizes]:
    equation = get_text_attribute(node, "equation").replace(" ", "")
    factors, _, result = equation.partition("->")
    if "." in equation or "->" not in equation:
        return [None]
    label_sizes: dict[str, Size] = {}
    for labels, facts in zip(factors.split(","), inputs, strict=True):
        for label, size in zip(labels, facts.sizes, strict=True):
            label_sizes[label] = broadcast_size(label_sizes.get(label, 1), size)
    return [tuple(label_sizes.get(label) for label in result)]


def reduction(node: NodeDef, inputs: Sequence[Facts]) -> list[Sizes]:
    sizes = inputs[0].sizes
    axes = {axis % len(sizes) for axis in inputs[1].integers} if sizes else set()
    retained = [1 if axis in axes else size for axis, size in enumerate(sizes)]
    if node.attr["keep_dims"].b:
        return [tuple(retained)]
    return [tuple(size for axis, size in enumerate(sizes) if axis not in axes)]


def expand(node: NodeDef, inputs: Sequence[Facts]) -> list[Sizes]:
    sizes, (axis,) = list(inputs[0].sizes), inputs[1].integers
    sizes.insert(axis if axis >= 0 else axis + len(sizes) + 1, 1)
    return [tuple(sizes)]


def squeeze(node: NodeDef, inputs: Sequence[Facts]) -> list[Sizes]:
    sizes = inputs[0].sizes
    axes = {axis % len(sizes) for axis in get_integers_attribute(node, "squeeze_dims")}
    if not axes:
        return [None]
    return [tuple(size for axis, size in enumerate(sizes) if axis not in axes)]


def concat(node: NodeDef, inputs: Sequence[Facts]) -> list[Sizes]:
    first, rest = inputs[0].sizes, [facts.sizes for facts in inputs[1:-1]]
    axis = inputs[-1].integers[0] % len(first)
    # The sizes of the other axes are equal: an integer if one of them is.
    axes = zip(first, *rest, strict=True)
    sizes = [next((size for size in own if isinstance(size, int)), own[0]) for own in axes]
    sizes[axis] = sum(shape[axis] for shape in (first, *rest))
    return [tuple(sizes)]


def stack(node: NodeDef, inputs: Sequence[Facts]) -> list[Sizes]:
    sizes, axis = list(inputs[0].sizes), node.attr["axis"].i
    sizes.insert(axis if axis >= 0 else axis + len(sizes) + 1, len(inputs))
    return [tuple(sizes)]


def unstack(node: NodeDef, inputs: Sequence[Facts]) -> list[Sizes]:
    sizes = list(inputs[0].sizes)
    del sizes[node.attr["axis"].i]
    return [tuple(sizes)] * node.attr["num"].i


def split(node: NodeDef, inputs: Sequence[Facts]) -> list[Sizes]:
    sizes, (axis,) = list(inputs[1].sizes), inputs[0].integers
    number = node.attr["num_split"].i
    sizes[axis] = sizes[axis] // number
    return [tuple(sizes)] * number


def split_by_sizes(node: NodeDef, inputs: Sequence[Facts]) -> list[Sizes]:
    sizes, parts, (axis,) = list(inputs[0].sizes), inputs[1].elements, inputs[2].integers
    leading, trailing = sizes[:axis], sizes[axis:][1:]
    lengths = [_size_from_element(part) for part in parts]
    if parts.count(-1) == 1 and lengths.count(None) == 1:
        lengths[parts.index(-1)] = sizes[axis] - sum(part for part in lengths if part is not None)
    return [(*leading, part, *trailing) for part in lengths]


def gather(node: NodeDef, inputs: Sequence[Facts]) -> list[Sizes]:
    table, rows = inputs[0].sizes, inputs[1].sizes
    axis = inputs[2].integers[0] % len(table) if len(inputs) > 2 else 0
    shared = node.attr["batch_dims"].i if "batch_dims" in node.attr else 0
    return [(*table[:axis], *rows[shared:], *table[axis + 1 :])]


def slice_by_size(node: NodeDef, inputs: Sequence[Facts]) -> list[Sizes]:
    parts = zip(inputs[0].sizes, inputs[1].elements, inputs[2].elements, strict=True)
    return [tuple(size - begin if n == -1 else _size_from_element(n) for size, begin, n in parts)]


def strided_slice(node: NodeDef, inputs: Sequence[Facts]) -> list[Sizes]:
    result: list[Size | None] = []
    axis, sizes = 0, inputs[0].sizes
    bounds = [facts.elements for facts in inputs[1:4]]
    for part in index_parts(node, bounds, len(sizes)):
        if part is None:
            result.append(1)
            continue
        if isinstance(part, slice):
            result.append(slice_length(sizes[axis], part))
        axis += 1
    return [tuple(result)]


#: Part of an index: an axis at one position, some positions of an axis, or None for a new axis.
IndexPart: TypeAlias = int | slice | None


def index_parts(node: NodeDef, bounds: Sequence[Sequence[Size]], rank: int) -> list[IndexPart]:
    """Return the index of a StridedSlice, complete for all axes, given begin, end and strides.

    Positions that are not constant are -1 for an axis at one position.
    """
    begin, end, strides = bounds

    def is_set(mask: str, position: int) -> bool:
        return bool(node.attr[f"{mask}_mask"].i >> position & 1)

    new = sum(is_set("new_axis", position) for position in range(len(begin)))
    ellipses = [position for position in range(len(begin)) if is_set("ellipsis", position)]
    rest = rank - (len(begin) - new - len(ellipses))
    parts: list[IndexPart] = []
    for position, (start, stop, step) in enumerate(zip(begin, end, strides, strict=True)):
        if position in ellipses:
            parts += [slice(None)] * rest
        elif is_set("new_axis", position):
            parts.append(None)
        elif is_set("shrink_axis", position):
            parts.append(start if isinstance(start, int) else -1)
        else:
            first = None if is_set("begin", position) else start
            parts.append(slice(first, None if is_set("end", position) else stop, step))
    return parts if ellipses else [*parts, *[slice(None)] * rest]


def slice_length(size: Size, part: slice) -> Size | None:
    """Return the number of positions that a slice takes of an axis; None if unknown."""
    start, stop, step = part.start, part.stop, 1 if part.step is None else part.step
    if not isinstance(step, int) or step == 0:
        return None
    numbers = (size, *(bound for bound in (start, stop) if bound is not None))
    if all(isinstance(number, int) for number in numbers):
        return len(range(*slice(start, stop, step).indices(int(numbers[0]))))
    if step < 0:
        return ceil_div(size, -step) if start is None and stop is None else None
    if any(not isinstance(b, int) and not is_nonnegative(b) for b in numbers[1:]):
        return None
    first, last = 0 if start is None else start, size if stop is None else stop
    last = minimum(last, size) if is_nonnegative(last) else size + last
    first = first if is_nonnegative(first) else maximum(size + first, 0)
    return ceil_div(maximum(last - first, 0), step)
