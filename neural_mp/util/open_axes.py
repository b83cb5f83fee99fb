"""Free (dynamic) axes of model inputs: from given shapes, or from batches that differ."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from neural_mp.util.labels import without_labels
from neural_mp.util.pytree import tree_leaves

Shape = tuple[int | None, ...]
#: Shape per input, by position or by name; None is a free axis.
Shapes = list[Shape] | dict[str, Shape]


def parse_given_shapes(inputs: object) -> Shapes | None:
    """Return the shapes given for inputs; None if the inputs contain no shapes.

    Args:
        inputs: shape such as `(None, None, 32)`, specification with a shape (`tf.TensorSpec`,
            `keras.Input`), or list or dict of these.
    """
    single = _parse_declared_shape(inputs)
    if single is not None:
        return [single]
    if not isinstance(inputs, Mapping | tuple | list):
        return None
    values = list(inputs.values() if isinstance(inputs, Mapping) else inputs)
    shapes = [shape for shape in map(_parse_declared_shape, values) if shape is not None]
    if not shapes or len(shapes) < len(values):
        return None
    return (
        dict(zip(map(str, inputs), shapes, strict=True)) if isinstance(inputs, Mapping) else shapes
    )


def _parse_declared_shape(value: object) -> Shape | None:
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


def find_differing_axes(batches: Iterable[Any]) -> tuple[Shapes, Any] | None:
    """Return shapes with axes that differ between batches free, and a batch unlike the first.

    Args:
        batches: inputs of some batches. The first axis counts samples and is always free.

    Returns:
        None if all other axes agree, or if the numbers of inputs or axes differ.
    """
    common: Shapes | None = None
    unlike = None
    for batch in batches:
        shapes = _list_batch_shapes(batch)
        previous = shapes if common is None else common
        common = _merge_common_shapes(previous, shapes)
        if common is None:
            return None
        if unlike is None and common != previous:
            unlike = batch
    return None if common is None or unlike is None else (common, unlike)


def _list_batch_shapes(batch: object) -> Shapes:
    if isinstance(batch, Mapping):
        return {
            str(name): _open_first_axis(value) for name, value in without_labels(batch, ()).items()
        }
    return list(map(_open_first_axis, tree_leaves(batch)))


def _open_first_axis(value: object) -> Shape:
    return (None, *getattr(value, "shape", ())[1:])


def _merge_common_shapes(first: Shapes, second: Shapes) -> Shapes | None:
    """Return the shapes with differing axes as None; None if not comparable."""
    if isinstance(first, dict) and isinstance(second, dict) and set(first) == set(second):
        shapes = _open_differing_axes(list(first.values()), [second[name] for name in first])
        return None if shapes is None else dict(zip(first, shapes, strict=True))
    if isinstance(first, dict) or isinstance(second, dict):
        return None
    return _open_differing_axes(first, second)


def _open_differing_axes(first: list[Shape], second: list[Shape]) -> list[Shape] | None:
    if list(map(len, first)) != list(map(len, second)):
        return None
    pairs = (zip(*shapes, strict=True) for shapes in zip(first, second, strict=True))
    return [tuple(a if a == b else None for a, b in pair) for pair in pairs]
