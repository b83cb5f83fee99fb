"""Nested tuples, lists and dicts: what models take and return, and how to write that down."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

Array = NDArray[Any]
#: Positions of outputs in nested lists and dicts, None where a model returns None.
Structure = int | None | list[Any] | dict[str, Any]


class NamedList(list[Any]):
    """Outputs in their order, of which each has a name as well.

    Attributes:
        names: one for each.
    """

    names: tuple[str, ...] = ()

    @classmethod
    def of(cls, outputs: Sequence[Any], names: Sequence[str]) -> NamedList:
        """Outputs with their names."""
        found = cls(outputs)
        found.names = tuple(names)
        return found


def structure_of(results: object) -> tuple[Structure, list[str]]:
    """The structure of what a function returns, and a name for every output, in their order.

    What lies under keys is named after them, as in a signature; the rest by its position.
    """
    names: list[str] = []

    def visit(value: object, path: tuple[str, ...]) -> Structure:
        if value is None:
            return None
        if isinstance(value, Mapping):
            return {str(key): visit(value[key], (*path, str(key))) for key in sorted(value)}
        if isinstance(value, tuple | list):
            numbered = ((*path, str(i)) if path else () for i in range(len(value)))
            return [visit(item, under) for item, under in zip(value, numbered, strict=True)]
        names.append("_".join(path) or f"output_{len(names)}")
        return len(names) - 1

    structure = visit(results, ())
    return structure, names


def unflatten(structure: Structure, values: Sequence[Any]) -> Any:
    """Values in the places that a structure gives them."""
    if isinstance(structure, dict):
        return {key: unflatten(item, values) for key, item in structure.items()}
    if isinstance(structure, list):
        return [unflatten(item, values) for item in structure]
    return None if structure is None else values[structure]


def tree_leaves(value: object) -> list[Any]:
    """The leaves of nested tuples, lists and mappings, in the order they were put in."""
    if isinstance(value, Mapping):
        return tree_leaves(list(value.values()))
    if isinstance(value, tuple | list):
        return [leaf for item in value for leaf in tree_leaves(item)]
    return [value]


def batch_size_of(inputs: object) -> int:
    """The length of the first axis of the first array in a batch's inputs; 1 without one."""
    if isinstance(inputs, Mapping):
        inputs = next(iter(inputs.values()), None)
    while isinstance(inputs, tuple | list) and inputs:
        inputs = inputs[0]
    shape: Any = getattr(inputs, "shape", ())
    return int(shape[0]) if len(shape) else 1


def as_numpy(values: object) -> np.ndarray:
    """An array, tensor or nested list of any framework as a numpy array, bfloat16 as float32.

    Raises:
        ValueError: it does not form one array.
    """
    if hasattr(values, "detach"):
        values = values.detach().cpu()
    try:
        array = np.asarray(values)
    except TypeError:
        if not hasattr(values, "float"):
            raise
        array = np.asarray(values.float())  # numpy has no bfloat16, which tensors may have
    return array.astype(np.float32) if array.dtype.name == "bfloat16" else array


def float_arrays(value: object) -> list[np.ndarray]:
    """The arrays of floating-point numbers among the leaves."""
    arrays = (as_numpy(leaf) for leaf in tree_leaves(value) if hasattr(leaf, "shape"))
    return [array for array in arrays if array.dtype.kind == "f"]


def named_float_arrays(value: object) -> dict[str, np.ndarray]:
    """The same arrays, under the keys or positions that lead to them; one alone as `output`."""

    def visit(value: object, path: tuple[str, ...]) -> None:
        if isinstance(value, Mapping):
            for key, item in value.items():
                visit(item, (*path, str(key)))
        elif isinstance(value, tuple | list):
            names = value.names if isinstance(value, NamedList) else ()
            for index, item in enumerate(value):
                visit(item, (*path, names[index] if names else str(index)))
        elif hasattr(value, "shape"):
            array = as_numpy(value)
            if array.dtype.kind == "f":
                found[".".join(path) or "output"] = array

    found: dict[str, np.ndarray] = {}
    visit(value, ())
    return found


def flatten(inputs: object) -> list[Any]:
    """The leaves of nested tuples, lists and dicts, the latter in the order of their keys.

    That is the order in which TensorFlow flattens what a model takes.
    """
    if isinstance(inputs, Mapping):
        return [leaf for key in sorted(inputs) for leaf in flatten(inputs[key])]
    if isinstance(inputs, tuple | list):
        return [leaf for item in inputs for leaf in flatten(item)]
    return [inputs]
