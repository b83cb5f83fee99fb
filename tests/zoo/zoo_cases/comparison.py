"""Comparison of nested outputs: classes and names, values, and their noise."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

#: Decibels of equal arrays.
EQUAL_DB = 150.0
#: Attributes of caches that hold no values of the model.
_BOOKKEEPING = frozenset({"device", "dtype", "layer_class_to_replicate"})


def leaves(value: Any, path: str = "") -> Iterator[tuple[str, np.ndarray]]:
    """Yield the path and the array of every tensor and number in nested outputs."""
    if hasattr(value, "detach"):
        value = value.detach()
        yield path, np.asarray((value.float() if value.dtype.itemsize == 2 else value).cpu())
    elif hasattr(value, "__array__"):
        yield path, np.asarray(value)
    else:
        for key, item in _items(value):
            yield from leaves(item, f"{path}.{key}" if path else str(key))


def _items(value: Any) -> list[tuple[Any, Any]]:
    if isinstance(value, Mapping):
        return list(value.items())
    if isinstance(value, list | tuple):
        return list(enumerate(value))
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return [(field.name, getattr(value, field.name)) for field in dataclasses.fields(value)]
    if type(value).__module__.startswith("transformers."):
        return [(key, item) for key, item in vars(value).items() if key not in _BOOKKEEPING]
    return []


def structure(value: Any) -> Any:
    """Return the classes and names of nested outputs, without values."""
    if hasattr(value, "detach") or hasattr(value, "__array__"):
        return "array"
    parts = [[str(key), structure(item)] for key, item in _items(value) if item is not None]
    kind = list if isinstance(value, list) else type(value)  # names of outputs make no other class
    return [kind.__name__, parts] if parts else None


def difference(expected: Any, actual: Any, path: str = "output") -> str:
    """Return the first difference of two structures in words; empty if they agree."""
    if not isinstance(expected, list) or not isinstance(actual, list):
        return "" if expected == actual else f"{path} is {_shown(actual)}, not {_shown(expected)}"
    if expected[0] != actual[0]:
        return f"{path} is of class {actual[0]}, not {expected[0]}"
    names, actual_names = ([name for name, _ in parts] for parts in (expected[1], actual[1]))
    if names != actual_names:
        return f"{path} has the names {', '.join(actual_names)}, not {', '.join(names)}"
    pairs = zip(expected[1], actual[1], strict=True)
    differences = (
        difference(mine[1], counterpart[1], f"{path}.{mine[0]}") for mine, counterpart in pairs
    )
    return next(filter(None, differences), "")


def _shown(structure: Any) -> str:
    return str(structure[0] if isinstance(structure, list) else structure)


def noise(reference: np.ndarray, values: np.ndarray) -> float:
    """Return the SQNR in dB; minus infinity if shapes, dtypes or infinities differ.

    For integers, booleans and texts, the share of equal elements takes the place of the SQNR, so
    that nine tenths of equal elements are 20 dB.
    """
    if reference.shape != values.shape or reference.dtype != values.dtype:
        return -np.inf
    if not np.issubdtype(reference.dtype, np.inexact):
        unequal = float(np.mean(reference != values)) if reference.size else 0.0
        return EQUAL_DB if unequal == 0 else -20 * float(np.log10(unequal))
    finite = np.isfinite(reference)
    if not np.array_equal(np.isfinite(values), finite):
        return -np.inf
    kind = np.complex128 if np.iscomplexobj(reference) else np.float64
    real, approximate = reference[finite].astype(kind), values[finite].astype(kind)
    error, signal = float(np.linalg.norm(real - approximate)), float(np.linalg.norm(real))
    if error == 0:
        return EQUAL_DB
    return min(20 * float(np.log10(signal / error)), EQUAL_DB) if signal else -np.inf


def mean_noise(decibels: list[float]) -> float:
    """Return the SQNR of the mean noise of several batches, in dB."""
    ratio = float(np.mean([10 ** (-level / 10) for level in decibels]))
    return -10 * float(np.log10(ratio)) if ratio < np.inf else -np.inf
