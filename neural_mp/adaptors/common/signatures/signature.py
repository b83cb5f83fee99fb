"""Signatures of models: tensors of inputs and outputs, their structure, and layouts of batches."""

from __future__ import annotations

import math
from collections.abc import Collection, Hashable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Annotated, Any, ClassVar, TypeVar

import numpy as np

from neural_mp.errors import ConfigurationError, DataError, did_you_mean
from neural_mp.io.limits import MAX_ELEMENT_BYTES, MAX_EXAMPLE_ELEMENTS
from neural_mp.util.json_fields import JsonFields
from neural_mp.util.labels import without_labels
from neural_mp.util.pytree import Array, NamedList, Structure, tree_leaves, tree_unflatten
from neural_mp.util.text import format_count
from neural_mp.util.validators import (
    InvalidValueError,
    invalid_value_error,
    list_of,
    mapping_of,
    non_negative_integer,
    optional,
    short_string,
    validate_nested_numbers,
)

#: Sizes of a tensor, None if unknown before a run; None if the rank is unknown.
Shape = tuple[int | None, ...] | None
_HINT = "name the inputs in the order of the data with inputs="
#: Maximum number of known layouts; batches of further layouts are checked in every call.
MAX_LAYOUTS = 256
_S = TypeVar("_S", bound="Signature")
T = TypeVar("T")


@dataclass(frozen=True)
class TensorSpec(JsonFields):
    """An input or output.

    Attributes:
        name: the name for callers.
        tensor: the tensor of the graph.
        dtype: the element type; object for strings, None for non-tensors.
        alias: another name for callers.
        default: of an optional input, the value for batches without the input; else None.
    """

    optional_keys: ClassVar[Collection[str] | None] = ("default",)

    name: str
    tensor: str
    dtype: Annotated[np.dtype[Any], _parse_dtype] | None
    shape: Annotated[Shape, parse_tensor_shape]
    alias: str | None = None
    default: Annotated[Array, validate_nested_numbers] | None = field(
        default=None, compare=False, repr=False
    )

    def to_dict(self) -> dict[str, Any]:
        """Return strings and numbers for JSON."""
        shape = None if self.shape is None else list(self.shape)
        dtype = None if self.dtype is None else self.dtype.name
        data = {**vars(self), "dtype": dtype, "shape": shape}
        # Versions without optional inputs read files without the key.
        del data["default"]
        return data if self.default is None else {**data, "default": self.default.tolist()}

    @classmethod
    def from_dict(cls, data: object) -> TensorSpec:
        """Read back the result of `to_dict`.

        Raises:
            NeuralMPError: the data is malformed, or a matching array would exceed the memory limit.
        """
        spec = super().from_dict(data)
        if spec.default is None:
            return spec
        try:
            return replace(spec, default=np.asarray(spec.default, spec.dtype))
        except (TypeError, ValueError, OverflowError):
            raise invalid_value_error(f"a default of the type {spec.dtype}", spec.default) from None

    @property
    def is_optional(self) -> bool:
        """Whether a batch may leave out the input."""
        return self.default is not None

    @property
    def has_unknown_sizes(self) -> bool:
        """Whether sizes other than the batch size are unknown."""
        return self.dtype is not None and (self.shape is None or None in self.shape[1:])

    def answers_to(self, name: str) -> bool:
        """Whether callers may use this name."""
        return name in (self.name, self.alias, self.tensor, f"{self.tensor}:0")

    def __str__(self) -> str:
        sizes = "?"
        if self.shape is not None:
            sizes = ", ".join("?" if size is None else str(size) for size in self.shape)
        if self.dtype is None:
            return f"{self.name}: no tensor"
        kind = "string" if self.dtype.hasobject else self.dtype.name
        return f"{self.name}: {kind}[{sizes}]"


@dataclass(frozen=True)
class Signature(JsonFields):
    """The inputs and outputs of a model.

    Attributes:
        inputs: in the order of positional inputs.
        outputs: in the order in which they are returned.
        returns: the structure of the returned value, with indices of outputs as leaves.
    """

    optional_keys: ClassVar[Collection[str] | None] = ()

    inputs: tuple[TensorSpec, ...]
    outputs: tuple[TensorSpec, ...]
    returns: Annotated[Structure, _parse_structure] = 0

    @cached_property
    def input_tensors(self) -> list[str]:
        """The tensors of the inputs."""
        return [port.tensor for port in self.inputs]

    @cached_property
    def output_tensors(self) -> list[str]:
        """The tensors of the outputs."""
        return [port.tensor for port in self.outputs]

    @classmethod
    def from_dict(cls: type[_S], data: object) -> _S:
        """Read back the result of `to_dict`; raise `NeuralMPError` if the data is malformed."""
        signature = super().from_dict(data)
        count = len(signature.outputs)
        for position in tree_leaves(signature.returns):
            if position is not None and position >= count:
                raise invalid_value_error(f"an index of one of {count} outputs", position)
        return signature

    def bind_inputs(self, inputs: object) -> dict[str, Array]:
        """Return tensor → array for the inputs of one batch.

        A dict is matched by name, without labels that the model does not accept; a tuple or list by
        position; anything else is the only input. Optional inputs may be left out.

        Raises:
            DataError: the number, names, dtypes or shapes do not match the model.
        """
        cached = self._array_layouts.bind_known_layout(inputs)
        if cached is not None:
            return cached
        values = self.assign_inputs(inputs)
        bound = {
            port.tensor: value if _fits_at_once(port, value) else _cast_to_port(port, value)
            for port, value in zip(self.inputs, values, strict=True)
        }
        self._array_layouts.learn_layout(inputs, values, bound)
        return bound

    @cached_property
    def _array_layouts(self) -> ArrayLayouts:
        return ArrayLayouts()

    def assign_inputs(self, inputs: object) -> list[Any]:
        """Return the value for every input of `bind_inputs`, unconverted.

        Raises:
            DataError: the number or names do not match the model.
        """
        if isinstance(inputs, Mapping):
            names = {str(key) for key in inputs}
            # Names of inputs, and prefixes of nested inputs.
            accepted = [
                name
                for name in names
                if any(p.answers_to(name) or p.name.startswith(f"{name}_") for p in self.inputs)
            ]
            inputs = without_labels(inputs, accepted)
        nested = isinstance(inputs, Mapping | tuple | list) and any(
            isinstance(item, Mapping | tuple) and _holds_arrays([item])
            for item in (inputs.values() if isinstance(inputs, Mapping) else inputs)
        )
        if nested:
            values = tree_leaves(inputs, sort_keys=True)
        elif isinstance(inputs, Mapping):
            values = self._values_by_name(inputs)
        elif isinstance(inputs, tuple | list) and (_holds_arrays(inputs) or not self.inputs):
            values = list(inputs)
        else:
            values = [inputs]
        return self._arrange_by_position(values) if len(values) != len(self.inputs) else values

    def _arrange_by_position(self, values: Sequence[Any]) -> list[Any]:
        """Return the value for every input, given those of the required inputs, or of the first."""
        required = [port for port in self.inputs if not port.is_optional]
        first, rest = self.inputs[: len(values)], self.inputs[len(values) :]
        if len(values) == len(required):
            first = tuple(required)
        elif len(values) > len(first) or not all(port.is_optional for port in rest):
            several = len(required) < len(self.inputs)
            raise DataError(
                f"a batch must hold {format_count(len(required), 'input')} "
                f"({', '.join(map(str, required if several else self.inputs))}), "
                f"got {len(values)}; {_HINT}"
            )
        values_of = {port.name: value for port, value in zip(first, values, strict=True)}
        return [values_of.get(port.name, port.default) for port in self.inputs]

    def _values_by_name(self, inputs: Mapping[Any, Any]) -> list[Any]:
        values: dict[str, Any] = {}
        for key, value in inputs.items():
            port = next((p for p in self.inputs if p.answers_to(str(key))), None)
            if port is None:
                names = [p.name for p in self.inputs]
                raise DataError(
                    f"the model has no input {key!r}, which a batch holds{did_you_mean(key, names)}"
                )
            values[port.name] = value
        for port in self.inputs:
            if port.name not in values and not port.is_optional:
                raise DataError(f"a batch must hold the input {port}, which is missing; {_HINT}")
        return [values.get(port.name, port.default) for port in self.inputs]

    def in_order(
        self, feeds: Mapping[str, Array], batch_size: int | None = None
    ) -> tuple[Any, ...]:
        """Return the result of `bind_inputs` by position, repeated or cut to `batch_size`."""
        if batch_size is None:
            return tuple(feeds[port.tensor] for port in self.inputs)
        arrays = ((feeds[port.tensor], bool(port.shape and port.shape[0])) for port in self.inputs)
        return tuple(
            array
            if is_fixed or not getattr(array, "ndim", 0) or not len(array)
            else np.concatenate([array] * -(-batch_size // len(array)))[:batch_size]
            for array, is_fixed in arrays
        )

    def count_samples(self, feeds: Mapping[str, Array]) -> int:
        """Return the samples a batch can be split into; 1 unless all share a dynamic axis 0."""
        ports = (*self.inputs, *self.outputs)
        if not all(p.shape and p.shape[0] is None for p in ports):
            return 1  # non-tensors, e.g. sequences, have no shape
        lengths = {len(array) if np.ndim(array) else None for array in feeds.values()}
        return (lengths.pop() or 1) if len(lengths) == 1 else 1

    def pack_outputs(self, values: Sequence[Any]) -> Any:
        """Return the outputs in the model's structure; a list keeps their names."""
        if isinstance(self.returns, list) and all(isinstance(i, int) for i in self.returns):
            names = [self.outputs[i].name for i in self.returns]
            return NamedList.from_outputs([values[i] for i in self.returns], names)
        return tree_unflatten(self.returns, values)

    def select_ports(self: _S, inputs: tuple[str, ...], outputs: tuple[str, ...]) -> _S:
        """Return the signature with the named inputs and outputs, in this order; () for all.

        Raises:
            ConfigurationError: a name is unknown, or an input is missing.
        """
        chosen = replace(
            self,
            inputs=_select_ports(self.inputs, inputs, "inputs"),
            outputs=_select_ports(self.outputs, outputs, "outputs"),
        )
        required = [port for port in self.inputs if not port.is_optional]
        left_out = [port.name for port in required if port not in chosen.inputs]
        if left_out:
            raise ConfigurationError(
                f"inputs must name every input of the model, but {left_out[0]!r} is missing"
            )
        if not outputs:
            return chosen
        positions = range(len(chosen.outputs))
        returns: Structure = list(positions)
        if len(positions) == 1:
            returns = 0
        elif isinstance(self.returns, dict):
            returns = {port.name: i for port, i in zip(chosen.outputs, positions, strict=True)}
        return replace(chosen, returns=returns)


def parse_tensor_shape(value: object) -> Shape:
    """Validate the sizes of a tensor in a file.

    Raises:
        NeuralMPError: the sizes are malformed or exceed the memory limit.
    """
    sizes = optional(list_of(optional(non_negative_integer)))(value)
    if math.prod(size or 1 for size in sizes or ()) > MAX_EXAMPLE_ELEMENTS:
        raise InvalidValueError(f"expected sizes whose product is at most {MAX_EXAMPLE_ELEMENTS}")
    return sizes


def _parse_dtype(value: object) -> np.dtype[Any]:
    name = short_string(value)
    try:
        dtype = np.dtype(name)
    except (TypeError, ValueError, SyntaxError):
        raise invalid_value_error("the name of an element type, e.g. float32", value) from None
    if dtype.name != name or dtype.itemsize > MAX_ELEMENT_BYTES:
        raise invalid_value_error("the name of an element type, e.g. float32", value)
    return dtype


def _parse_structure(value: object) -> Structure:
    if isinstance(value, list):
        return list(list_of(_parse_structure)(value))
    below = (
        mapping_of(_parse_structure) if isinstance(value, dict) else optional(non_negative_integer)
    )
    return below(value)


def _select_ports(
    ports: tuple[TensorSpec, ...], names: tuple[str, ...], option: str
) -> tuple[TensorSpec, ...]:
    selected = []
    for name in names:
        port = next((port for port in ports if port.answers_to(name)), None)
        if port is None:
            raise ConfigurationError(
                f"{option} must name {option} of the model, got {name!r}"
                f"{did_you_mean(name, [port.name for port in ports])}"
            )
        selected.append(port)
    return tuple(selected) or ports


def _holds_arrays(inputs: Sequence[Any]) -> bool:
    """Whether a list holds arrays, as opposed to numbers that form one input."""
    return any(hasattr(leaf, "__array__") for leaf in tree_leaves(inputs))


def _fits_at_once(port: TensorSpec, value: object) -> bool:
    """Whether a value already matches the dtype and shape of an input."""
    return (
        type(value) is np.ndarray
        and value.dtype == port.dtype
        and not value.dtype.hasobject
        and _matches_shape(value.shape, port.shape)
    )


def _cast_to_port(port: TensorSpec, value: Any) -> Array:
    if port.dtype is None:
        return value  # only the runtime can validate non-tensors, e.g. sequences
    if any(leaf is None for leaf in tree_leaves(value)):
        raise DataError(f"the input {port} must be an array, got None")
    try:
        array = np.asarray(value)
    except ValueError as error:
        raise DataError(f"the input {port} must be an array: {error}") from error
    dtype = port.dtype
    if array.dtype != dtype:
        kinds = "OSU" if dtype.hasobject else "fiub"
        is_castable = dtype.hasobject or np.can_cast(array.dtype, dtype, "same_kind")
        if array.dtype.kind not in kinds or not is_castable:
            raise DataError(f"got an array of {array.dtype} for the input {port}")
        if not dtype.hasobject:
            array = array.astype(dtype)
    if not _matches_shape(array.shape, port.shape):
        raise DataError(
            f"expected matching sizes, got an array of shape {list(array.shape)} "
            f"for the input {port}"
        )
    return array


def _matches_shape(given: tuple[int, ...], expected: Shape) -> bool:
    if expected is None:
        return True
    return len(given) == len(expected) and all(
        size in (None, have) for have, size in zip(given, expected, strict=True)
    )


def list_flat_leaves(inputs: object) -> list[Any]:
    """Return the items of a plain dict, tuple or list, or the object itself as the only leaf."""
    if type(inputs) is dict:
        return list(inputs.values())
    if type(inputs) is tuple or type(inputs) is list:
        return list(inputs)
    return [inputs]


def get_batch_layout(inputs: object) -> Hashable:
    """Return the keys of a plain dict, or the type of any other batch."""
    if type(inputs) is dict:
        return tuple(inputs)
    kind: type = type(inputs)
    return kind


def get_layout_key(inputs: object, leaves: Sequence[Any]) -> tuple[Hashable, ...]:
    """Return the layout of a batch, with dtype and shape of each of its leaves, all tensors."""
    return (get_batch_layout(inputs), *[(leaf.dtype, leaf.shape) for leaf in leaves])


def find_positions(values: Sequence[object], leaves: Sequence[object]) -> list[int] | None:
    """Return the index in `leaves` of each value, by identity; None if any is missing.

    A batch that holds an object twice has no positions: the next batch may hold two objects.
    """
    indices = {id(leaf): index for index, leaf in enumerate(leaves)}
    if len(indices) < len(leaves) or not all(id(value) in indices for value in values):
        return None
    return [indices[id(value)] for value in values]


def remember_layout(known: dict[Any, T], key: Hashable, value: T) -> None:
    """Keep a value, unless the maximum number of layouts is reached."""
    if len(known) < MAX_LAYOUTS:
        known[key] = value


class ArrayLayouts:
    """Layouts of batches of arrays: the tensor, and the conversion if any, of each leaf."""

    def __init__(self) -> None:
        self._known: dict[Hashable, tuple[tuple[str, int, np.dtype[Any] | None], ...]] = {}

    def bind_known_layout(self, inputs: object) -> dict[str, Array] | None:
        """Return tensor → array for a batch of a known layout; None for any other batch."""
        leaves = list_flat_leaves(inputs)
        for leaf in leaves:
            if type(leaf) is not np.ndarray:
                return None
        layout = self._known.get(get_layout_key(inputs, leaves))
        if layout is None:
            return None
        return {
            tensor: leaves[index] if dtype is None else leaves[index].astype(dtype)
            for tensor, index, dtype in layout
        }

    def learn_layout(self, inputs: object, given: Sequence[Any], bound: Mapping[str, Any]) -> None:
        """Keep the layout of a checked batch: `given` are the values of the tensors of `bound`."""
        leaves = list_flat_leaves(inputs)
        if not all(type(value) is np.ndarray for value in (*leaves, *bound.values())):
            return
        indices = find_positions(given, leaves)
        if indices is None:
            return
        casts = [
            None if value.dtype == bound[tensor].dtype else bound[tensor].dtype
            for tensor, value in zip(bound, given, strict=True)
        ]
        remember_layout(
            self._known,
            get_layout_key(inputs, leaves),
            tuple(zip(bound, indices, casts, strict=True)),
        )
