"""Nested results: what form a model returns its outputs in, told so that it can be written down."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

#: Positions of outputs in nested lists and dicts, None where a model returns None.
Structure = int | None | list[Any] | dict[str, Any]


def described(results: Any) -> tuple[Structure, list[str]]:
    """The structure of what a function returns, and a name for every output, in their order.

    What lies under keys is named after them, as in a signature; the rest by its position.
    """
    names: list[str] = []

    def visit(value: Any, path: tuple[str, ...]) -> Structure:
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


def packed(structure: Structure, values: Sequence[Any]) -> Any:
    """Values in the places that a structure gives them."""
    if isinstance(structure, dict):
        return {key: packed(item, values) for key, item in structure.items()}
    if isinstance(structure, list):
        return [packed(item, values) for item in structure]
    return None if structure is None else values[structure]


def flattened(inputs: Any) -> list[Any]:
    """The leaves of nested tuples, lists and dicts, the latter in the order of their keys.

    That is the order in which TensorFlow flattens what a model takes.
    """
    if isinstance(inputs, Mapping):
        return [leaf for key in sorted(inputs) for leaf in flattened(inputs[key])]
    if isinstance(inputs, tuple | list):
        return [leaf for item in inputs for leaf in flattened(item)]
    return [inputs]
