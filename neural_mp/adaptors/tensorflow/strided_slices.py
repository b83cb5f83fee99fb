"""Indices of StridedSlice, with sizes and bounds that may be symbolic."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeAlias

from neural_mp.adaptors.common.symbolic_sizes import (
    Size,
    ceil_div,
    is_nonnegative,
    maximum,
    minimum,
)
from neural_mp.adaptors.tensorflow.tensor_graph import NodeDef

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
