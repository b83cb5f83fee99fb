"""Nested tuples, lists and dicts of model inputs and outputs, and their structure."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

Array = NDArray[Any]
#: Indices of outputs in nested lists and dicts, None for None.
Structure = int | None | list[Any] | dict[str, Any]


class NamedList(list[Any]):
    """Outputs in order, each with a name.

    Attributes:
        names: one per output.
    """

    names: tuple[str, ...] = ()

    @classmethod
    def from_outputs(cls, outputs: Sequence[Any], names: Sequence[str]) -> NamedList:
        """Return outputs with names."""
        result = cls(outputs)
        result.names = tuple(names)
        return result


class NamedOutputs(dict[str, Any]):
    """Outputs of a model by name, attribute or position, as in `transformers`.

    For the first output `logits`, `out["logits"]`, `out.logits` and `out[0]` are equal.

    Attributes:
        absent: names of outputs that the model can return but does not; as attributes None.
    """

    absent: tuple[str, ...] = ()

    def __getattr__(self, name: str) -> Any:
        try:
            return self[name]
        except KeyError:
            if name in self.absent:
                return None
            raise AttributeError(
                f"the model has no output {name!r}; the outputs are {', '.join(self)}"
            ) from None

    def __getitem__(self, key: str | int | slice) -> Any:
        return self.to_tuple()[key] if isinstance(key, int | slice) else super().__getitem__(key)

    def to_tuple(self) -> tuple[Any, ...]:
        """Return the values as a tuple."""
        return tuple(self.values())


def build_output_structure(results: object) -> tuple[Structure, list[str]]:
    """Return the structure of nested outputs, and a name for every output, in order.

    Outputs under keys are named after the keys, as in a signature; others by index.
    """
    names: list[str] = []

    def number_leaves(value: object, path: tuple[str, ...]) -> Structure:
        if value is None:
            return None
        if isinstance(value, Mapping):
            return {str(key): number_leaves(value[key], (*path, str(key))) for key in sorted(value)}
        if isinstance(value, tuple | list):
            numbered = ((*path, str(i)) if path else () for i in range(len(value)))
            return [number_leaves(item, under) for item, under in zip(value, numbered, strict=True)]
        names.append("_".join(path) or f"output_{len(names)}")
        return len(names) - 1

    structure = number_leaves(results, ())
    return structure, names


def tree_unflatten(structure: Structure, values: Sequence[Any]) -> Any:
    """Return the values arranged in a structure."""
    if isinstance(structure, dict):
        return {key: tree_unflatten(item, values) for key, item in structure.items()}
    if isinstance(structure, list):
        return [tree_unflatten(item, values) for item in structure]
    return None if structure is None else values[structure]


def tree_leaves(value: object, *, sort_keys: bool = False) -> list[Any]:
    """Return the leaves of nested tuples, lists and mappings.

    Mappings are in insertion order, or sorted by key, as TensorFlow flattens model inputs.
    """
    if isinstance(value, Mapping):
        value = [value[key] for key in sorted(value)] if sort_keys else list(value.values())
    if isinstance(value, tuple | list):
        return [leaf for item in value for leaf in tree_leaves(item, sort_keys=sort_keys)]
    return [value]


def batch_size_of(inputs: object) -> int:
    """Return the length of the first axis of the first array in a batch's inputs; 1 without one."""
    if isinstance(inputs, Mapping):
        inputs = next(iter(inputs.values()), None)
    while isinstance(inputs, tuple | list) and inputs:
        inputs = inputs[0]
    shape: Any = getattr(inputs, "shape", ())
    return int(shape[0]) if len(shape) else 1


def sample_of(inputs: Any, index: int) -> Any:
    """Return one sample of a batch's inputs, as a batch of one."""
    if isinstance(inputs, Mapping):
        return {name: sample_of(value, index) for name, value in inputs.items()}
    if isinstance(inputs, tuple | list):
        return type(inputs)(sample_of(value, index) for value in inputs)
    return inputs[index : index + 1] if len(getattr(inputs, "shape", ())) else inputs


def with_samples(inputs: Any, chosen: list[int]) -> Any:
    """Return a batch of other samples: `chosen` are their indices, one for each sample.

    Arrays whose first axis is not that of the samples stay.
    """
    if isinstance(inputs, Mapping):
        return {name: with_samples(value, chosen) for name, value in inputs.items()}
    if isinstance(inputs, tuple | list):
        return type(inputs)(with_samples(value, chosen) for value in inputs)
    shape: Any = getattr(inputs, "shape", ())
    if not len(shape) or shape[0] != len(chosen):
        return inputs
    # Tensors of TensorFlow have no indexing by lists.
    return (inputs if hasattr(inputs, "detach") else np.asarray(inputs))[chosen]


def to_native_order(array: Array) -> Array:
    """Return an array with the byte order of this machine, which frameworks require."""
    return array if array.dtype.isnative else array.astype(array.dtype.newbyteorder("="))


def convert_to_numpy(values: Any) -> np.ndarray:
    """Convert an array, tensor or nested list of any framework to numpy, bfloat16 to float32.

    The result has the byte order of this machine.

    Raises:
        ValueError: the values do not form an array.
    """
    try:
        array = values.numpy(force=True) if hasattr(values, "detach") else np.asarray(values)
    except TypeError:
        if not hasattr(values, "float"):
            raise
        array = convert_to_numpy(values.float())  # numpy has no bfloat16
    # The name of a dtype costs more than the rest; bfloat16 is of kind V.
    if array.dtype.kind == "V" and array.dtype.name == "bfloat16":
        return array.astype(np.float32)
    return to_native_order(array)


def list_float_arrays(value: object) -> list[np.ndarray]:
    """Return the floating-point arrays among the leaves, and all other floats as one array.

    Arrays that objects among the leaves hold, such as caches and dataclasses, are among them.
    """
    leaves = tree_leaves(value)
    arrays = [convert_to_numpy(array) for array in _iterate_nested_arrays(leaves, set())]
    numbers = [leaf for leaf in leaves if type(leaf) is float]
    if numbers:  # of maps, such as the probability of each class
        arrays.append(np.array(numbers, np.float32))
    return [array for array in arrays if array.dtype.kind == "f"]


def _iterate_nested_arrays(leaves: list[Any], visited: set[int]) -> Iterator[Any]:
    """Yield the arrays among the leaves, and those in the attributes of other objects."""
    for leaf in leaves:
        if hasattr(leaf, "shape"):
            yield leaf
        elif hasattr(leaf, "__dict__") and not callable(leaf) and id(leaf) not in visited:
            visited.add(id(leaf))
            yield from _iterate_nested_arrays(tree_leaves(list(vars(leaf).values())), visited)


def _make_float_columns(value: object) -> dict[str, np.ndarray] | None:
    """Return the floats of each key in a list of maps; None for any other value."""
    if not isinstance(value, list) or not all(isinstance(item, Mapping) for item in value):
        return None
    floats = [(str(k), v) for item in value for k, v in item.items() if type(v) is float]
    keys = dict.fromkeys(key for key, _ in floats)
    return {key: np.array([number for k, number in floats if k == key], np.float32) for key in keys}


def named_float_arrays(value: object) -> dict[str, np.ndarray]:
    """Return path of keys or indices → floating-point array; a single array as `output`.

    The floats of a key in a list of maps form one array.
    """

    def collect_arrays(value: object, path: tuple[str, ...]) -> None:
        columns = _make_float_columns(value)
        if columns is not None:
            value = columns
        if isinstance(value, Mapping):
            for key, item in value.items():
                collect_arrays(item, (*path, str(key)))
        elif isinstance(value, tuple | list):
            names = value.names if isinstance(value, NamedList) else ()
            for index, item in enumerate(value):
                collect_arrays(item, (*path, names[index] if names else str(index)))
        elif hasattr(value, "shape"):
            array = convert_to_numpy(value)
            if array.dtype.kind == "f":
                arrays[".".join(path) or "output"] = array

    arrays: dict[str, np.ndarray] = {}
    collect_arrays(value, ())
    return arrays
