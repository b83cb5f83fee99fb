"""Free (dynamic) axes of model inputs: from given shapes, or from batches that differ."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from neural_mp.util.labels import without_labels
from neural_mp.util.pytree import tree_leaves

Shape = tuple[int | None, ...]
#: Shape per input, by position or by name; None is a free axis.
Shapes = list[Shape] | dict[str, Shape]


def given_shapes(inputs: object) -> Shapes | None:
    """Return the shapes given for inputs; None if the inputs contain no shapes.

    Args:
        inputs: shape such as `(None, None, 32)`, specification with a shape (`tf.TensorSpec`,
            `keras.Input`), or list or dict of these.
    """
    single = _shape(inputs)
    if single is not None:
        return [single]
    if isinstance(inputs, Mapping):
        named = {str(name): _shape(value) for name, value in inputs.items()}
        found = {name: shape for name, shape in named.items() if shape is not None}
        return found if found and len(found) == len(named) else None
    if isinstance(inputs, tuple | list):
        listed = [shape for shape in map(_shape, inputs) if shape is not None]
        return listed if listed and len(listed) == len(inputs) else None
    return None


def _shape(value: object) -> Shape | None:
    if isinstance(value, tuple | list):
        sizes = [size for size in value if size is None or type(size) is int]
        return tuple(sizes) if sizes and len(sizes) == len(value) else None
    if not hasattr(value, "shape") or not hasattr(value, "dtype"):
        return None
    try:
        shape = tuple(value.shape)
    except ValueError:  # unknown rank
        return None
    return shape if None in shape or not hasattr(value, "__array__") else None


def differing(batches: Iterable[Any]) -> tuple[Shapes, Any] | None:
    """Return shapes with axes that differ between batches free, and a batch unlike the first.

    Args:
        batches: inputs of some batches. The first axis counts samples and is always free.

    Returns:
        None if all other axes agree, or if the numbers of inputs or axes differ.
    """
    first: Shapes | None = None
    unlike = None
    for batch in batches:
        shapes = _shapes_of(batch)
        if first is None:
            first = shapes
        common = _common(first, shapes)
        if common is None:
            return None
        if unlike is None and common != first:
            unlike = batch
        first = common
    return None if first is None or unlike is None else (first, unlike)


def _shapes_of(batch: object) -> Shapes:
    if isinstance(batch, Mapping):
        return {str(name): _sizes(value) for name, value in without_labels(batch, ()).items()}
    return list(map(_sizes, tree_leaves(batch)))


def _sizes(value: object) -> Shape:
    return (None, *getattr(value, "shape", ())[1:])


def _common(one: Shapes, other: Shapes) -> Shapes | None:
    """Return the shapes with differing axes as None; None if not comparable."""
    if isinstance(one, dict) and isinstance(other, dict):
        if set(one) != set(other):
            return None
        named = {name: _joined(one[name], other[name]) for name in one}
        found = {name: shape for name, shape in named.items() if shape is not None}
        return found if len(found) == len(named) else None
    if isinstance(one, dict) or isinstance(other, dict) or len(one) != len(other):
        return None
    listed = [_joined(*pair) for pair in zip(one, other, strict=True)]
    shapes = [shape for shape in listed if shape is not None]
    return shapes if len(shapes) == len(listed) else None


def _joined(one: Shape, other: Shape) -> Shape | None:
    if len(one) != len(other):
        return None
    return tuple(a if a == b else None for a, b in zip(one, other, strict=True))
