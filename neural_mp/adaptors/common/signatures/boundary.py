"""The boundary between callers of a model and the runtime that the model was transferred to."""

from __future__ import annotations

from collections.abc import Callable, Collection, Hashable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from functools import cached_property
from typing import Annotated, Any, ClassVar

import numpy as np

from neural_mp.adaptors.common.signatures.signature import (
    Array,
    Signature,
    find_positions,
    get_batch_layout,
    list_flat_leaves,
    remember_layout,
)
from neural_mp.adaptors.detect import FRAMEWORKS
from neural_mp.util.json_fields import NOT_STORED, JsonFields
from neural_mp.util.pytree import NamedOutputs, convert_to_numpy, tree_leaves
from neural_mp.util.text import format_count
from neural_mp.util.validators import (
    InvalidValueError,
    invalid_value_error,
    mapping_of,
    non_negative_integer,
    one_of,
    optional,
)

#: Index of an output, None, or the kind of a container with its parts by position or name.
Containers = int | None | Sequence[Any]
TUPLE, LIST, DICT, NAMED = "tuple", "list", "dict", "named"


def arrange_in_containers(containers: Containers, values: Sequence[Any]) -> Any:
    """Return the values in containers."""
    if containers is None or isinstance(containers, int):
        return None if containers is None else values[containers]
    kind, parts = containers
    if isinstance(parts, Mapping):
        outputs = {name: arrange_in_containers(part, values) for name, part in parts.items()}
        return NamedOutputs(outputs) if kind == NAMED else outputs
    items = [arrange_in_containers(part, values) for part in parts]
    return tuple(items) if kind == TUPLE else items


@dataclass(frozen=True)
class Boundary(JsonFields):
    """The calls of a model in its source framework, for a model that runs in another one.

    Attributes:
        framework: the source framework.
        signature: inputs in the order of a batch; inputs and outputs in the order of the runtime.
        containers: containers of the outputs; None for those of the signature.
        held: an object that must live as long as the model.
    """

    optional_keys: ClassVar[Collection[str] | None] = ()

    framework: Annotated[str, one_of(tuple(FRAMEWORKS))]
    signature: Signature
    containers: Annotated[Containers, _parse_containers] = None
    held: Any = field(default=None, compare=False, repr=False, metadata=NOT_STORED)

    def __getstate__(self) -> dict[str, Any]:
        """Return the state without process-local parts."""
        return {member.name: getattr(self, member.name) for member in fields(self)} | {"held": None}

    def bind_arrays(self, inputs: object) -> tuple[Array, ...]:
        """Return the inputs of one batch as arrays in the order of the runtime.

        Raises:
            DataError: the inputs do not fit the model.
        """
        values = self.signature.assign_inputs(inputs)
        return tuple(self.signature.bind_inputs(_tensors_to_arrays(values)).values())

    def bind_inputs(self, inputs: object) -> tuple[tuple[Array, ...], bool]:
        """Return the inputs in the order of the runtime, and whether the batch holds tensors.

        Tensors are those of the source framework. Arrays of a known layout are not checked: the
        runtime does, and `arrays` raises the error in the names of the source framework.

        Raises:
            DataError: the inputs do not fit the model.
        """
        leaves = list_flat_leaves(inputs)
        key = (get_batch_layout(inputs), *map(type, leaves))
        cached = self._leaf_positions.get(key)
        if cached is not None:
            order, tensors = cached
            return _tensors_to_arrays([leaves[index] for index in order]), tensors
        arrays, package = self.bind_arrays(inputs), FRAMEWORKS[self.framework].package
        tensors = any(type(v).__module__.partition(".")[0] == package for v in tree_leaves(inputs))
        if all(hasattr(leaf, "__array__") for leaf in leaves):
            indices = find_positions(self.signature.assign_inputs(inputs), leaves)
            if indices is not None:
                remember_layout(self._leaf_positions, key, (indices, tensors))
        return arrays, tensors

    @cached_property
    def _leaf_positions(self) -> dict[Hashable, tuple[list[int], bool]]:
        """Layout and types of a batch → index of the leaf of each input, whether it has tensors."""
        return {}

    def restore_outputs(self, outputs: object, tensor: Callable[[Array], Any] | None) -> Any:
        """Return outputs of the runtime as the source would.

        Args:
            outputs: the only output, or a list.
            tensor: conversion of an array to a tensor of the source; None to keep arrays.
        """
        values: list[Any] = outputs if isinstance(outputs, list) else [outputs]
        if tensor is not None:
            values = [tensor(value) for value in values]
        if self.containers is None:
            return self.signature.pack_outputs(values)
        return arrange_in_containers(self.containers, values)

    def calls_of_file(self) -> str:
        """Return the inputs and outputs of the runtime's own file, as text."""
        inputs = ", ".join(
            repr(port.tensor)
            + ("" if port.tensor == port.name else f" ({port.name!r} in {self.framework})")
            for port in self.signature.inputs
        )
        outputs = format_count(len(self.signature.outputs), "output")
        return f"inputs {inputs}; {outputs}, in the order of {self.framework}, without containers"

    @classmethod
    def from_dict(cls, data: object) -> Boundary:
        """Read back the result of `to_dict`.

        Raises:
            NeuralMPError: the data is malformed.
        """
        boundary = super().from_dict(data)
        for index in _collect_indices(boundary.containers):
            if index >= len(boundary.signature.outputs):
                raise invalid_value_error("the index of an output", index)
        return boundary


def _tensors_to_arrays(values: Sequence[Any]) -> tuple[Any, ...]:
    return tuple(
        [
            value
            if type(value) is np.ndarray or not hasattr(value, "detach")
            else convert_to_numpy(value)
            for value in values
        ]
    )


def _collect_indices(containers: Containers) -> list[int]:
    if containers is None or isinstance(containers, int):
        return [] if containers is None else [containers]
    parts = containers[1]
    values = parts.values() if isinstance(parts, Mapping) else parts
    return [index for part in values for index in _collect_indices(part)]


def _parse_containers(value: object) -> Containers:
    if not isinstance(value, list):
        return optional(non_negative_integer)(value)
    if len(value) != 2 or value[0] not in (TUPLE, LIST, DICT, NAMED):
        raise InvalidValueError("containers must have a known kind and parts")
    kind, parts = value
    if kind in (DICT, NAMED):
        return [kind, mapping_of(_parse_containers)(parts)]
    if not isinstance(parts, list):
        raise invalid_value_error("a list of parts", parts)
    return [kind, [_parse_containers(part) for part in parts]]
