"""Layouts of batches: inputs of a layout that was checked once need no second check."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from typing import Any, TypeVar

import numpy as np

from neural_mp.util.pytree import Array

T = TypeVar("T")

#: Maximum number of known layouts; batches of further layouts are checked in every call.
MAX_LAYOUTS = 256


def flat_leaves(inputs: Any) -> list[Any]:
    """Return the items of a plain dict, tuple or list, or the object itself as the only leaf."""
    kind = type(inputs)
    if kind is dict:
        return list(inputs.values())
    return list(inputs) if kind is tuple or kind is list else [inputs]


def layout_of(inputs: Any) -> Hashable:
    """Return the keys of a plain dict, or the type of any other batch."""
    kind: type = type(inputs)
    return tuple(inputs) if kind is dict else kind


def key_of(inputs: Any, leaves: Sequence[Any]) -> tuple[Hashable, ...]:
    """Return the layout of a batch, with dtype and shape of each of its leaves, all tensors."""
    return (layout_of(inputs), *[(leaf.dtype, leaf.shape) for leaf in leaves])


def positions(values: Sequence[object], leaves: Sequence[object]) -> list[int] | None:
    """Return the index in `leaves` of each value, by identity; None if any is missing.

    A batch that holds an object twice has no positions: the next batch may hold two objects.
    """
    indices = {id(leaf): index for index, leaf in enumerate(leaves)}
    if len(indices) < len(leaves) or not all(id(value) in indices for value in values):
        return None
    return [indices[id(value)] for value in values]


def remember(known: dict[Any, T], key: Hashable, value: T) -> None:
    """Keep a value, unless the maximum number of layouts is reached."""
    if len(known) < MAX_LAYOUTS:
        known[key] = value


class ArrayLayouts:
    """Layouts of batches of arrays: the tensor, and the conversion if any, of each leaf."""

    def __init__(self) -> None:
        self._known: dict[Hashable, tuple[tuple[str, int, np.dtype[Any] | None], ...]] = {}

    def bound(self, inputs: object) -> dict[str, Array] | None:
        """Return tensor → array for a batch of a known layout; None for any other batch."""
        leaves = flat_leaves(inputs)
        for leaf in leaves:
            if type(leaf) is not np.ndarray:
                return None
        layout = self._known.get(key_of(inputs, leaves))
        if layout is None:
            return None
        return {
            tensor: leaves[index] if dtype is None else leaves[index].astype(dtype)
            for tensor, index, dtype in layout
        }

    def learn(self, inputs: object, given: Sequence[Any], bound: Mapping[str, Any]) -> None:
        """Keep the layout of a checked batch.

        Args:
            inputs: the batch.
            given: the value for each tensor.
            bound: tensor → the converted value.
        """
        leaves = flat_leaves(inputs)
        if not all(type(value) is np.ndarray for value in (*leaves, *bound.values())):
            return
        indices = positions(given, leaves)
        if indices is None:
            return
        casts = [
            None if value.dtype == bound[tensor].dtype else bound[tensor].dtype
            for tensor, value in zip(bound, given, strict=True)
        ]
        remember(
            self._known, key_of(inputs, leaves), tuple(zip(bound, indices, casts, strict=True))
        )
