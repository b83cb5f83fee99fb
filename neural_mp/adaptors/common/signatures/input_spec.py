"""Input and output options of a model, alike in all frameworks, and synthetic inputs."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from neural_mp.adaptors.common.signatures.signature import Array, Signature, TensorSpec
from neural_mp.core.enums import Capture
from neural_mp.errors import ConfigurationError, DataError
from neural_mp.io.limits import MAX_EXAMPLE_ELEMENTS
from neural_mp.util.open_axes import Shapes, parse_given_shapes
from neural_mp.util.pytree import tree_leaves


@dataclass(frozen=True)
class InputSpec:
    """The inputs and outputs that a user asks for.

    Attributes:
        names: the inputs in the order of the data; empty for the model's own order.
        outputs: the outputs to keep; empty for all.
        example: the inputs of one batch; None without data.
        shapes: shapes of the inputs, with None for dynamic axes; None for those of the example.
    """

    names: tuple[str, ...] = ()
    outputs: tuple[str, ...] = ()
    example: Any = None
    shapes: Shapes | None = None

    @classmethod
    def from_arguments(cls, inputs: object, outputs: object, example: object) -> InputSpec:
        """Parse the arguments of `Adaptor.load`.

        Raises:
            ConfigurationError: `inputs` is not names, example tensors or shapes, or `outputs` not
                names.
        """
        shapes = parse_given_shapes(inputs)
        names, shown = ((), None) if shapes is not None else _names_or_example(inputs)
        outputs = _parse_names(outputs, "outputs")
        return cls(names, outputs, example if shown is None else shown, shapes)

    @property
    def used_names(self) -> tuple[str, ...]:
        """The names of inputs that the user or the data mention."""
        by_name = self.example if isinstance(self.example, Mapping) else ()
        return (*self.names, *map(str, by_name))

    def without_shapes(self, what: str) -> InputSpec:
        """Return the spec unchanged, for models (`what`) that do not support shapes.

        Raises:
            ConfigurationError: shapes were given.
        """
        if self.shapes is None:
            return self
        raise ConfigurationError(
            f"inputs must be names or example tensors for {what}, got the shapes {self.shapes}; "
            f"shapes apply to Keras models and tf.functions, which are traced"
        )

    def make_feeds(self, signature: Signature) -> tuple[dict[str, Array], list[str]]:
        """Return inputs for a run, synthetic without data, and warnings about assumed sizes.

        Raises:
            DataError: the example does not fit the model.
        """
        if self.example is not None:
            return signature.bind_inputs(self.example), []
        unknown = [port for port in signature.inputs if port.has_unknown_sizes]
        warnings = [
            f"without data, unknown sizes of the input {port} are assumed to be 1; set inputs to "
            f"an example array for other sizes"
            for port in unknown[:1]
        ]
        return make_synthetic_example(signature), warnings


def unused_capture_warning(framework: str, capture: Capture) -> tuple[str, ...]:
    """Return a warning if capture by modules is requested for a graph framework."""
    if capture is Capture.WHOLE:
        return ()
    return (
        f"capture = {str(capture)!r} is ignored for {framework}, where every model is one graph",
    )


def _parse_names(value: object, option: str) -> tuple[str, ...]:
    """Return names given as `"a, b"` or a list; () for None. `option` is named in errors."""
    if value is None:
        return ()
    if isinstance(value, str):
        return tuple(name.strip() for name in value.split(",") if name.strip())
    if isinstance(value, Iterable):
        listed = list(value)
        if all(isinstance(name, str) for name in listed):
            return tuple(listed)
    raise ConfigurationError(f"{option} must be a name or a list of names, got {value!r}")


def _names_or_example(inputs: object) -> tuple[tuple[str, ...], Any]:
    """Return `inputs` as names or as example tensors; the other is empty."""
    if isinstance(inputs, str):
        return _parse_names(inputs, "inputs"), None
    leaves = [] if inputs is None else tree_leaves(inputs)
    if not leaves:
        return (), None
    if all(isinstance(leaf, str) for leaf in leaves):
        return tuple(leaves), None
    if all(hasattr(leaf, "__array__") for leaf in leaves):
        return (), inputs
    raise ConfigurationError(
        f"inputs must be names, example tensors or shapes, got {type(inputs).__name__}"
    )


#: Values of an input: the input and its sizes → the array.
Fill = Callable[[TensorSpec, Sequence[int]], Array]


def make_synthetic_example(signature: Signature, fill: Fill | None = None) -> dict[str, Array]:
    """Return synthetic inputs, unknown sizes 1; by default, floats from 0…1 and zeros.

    Raises:
        DataError: an input is too large.
    """
    fill = fill or _make_plain_values
    return {
        port.tensor: fill(port, _assume_free_sizes(port)) if port.default is None else port.default
        for port in signature.inputs
    }


def _assume_free_sizes(port: TensorSpec) -> list[int]:
    shape = [1 if size is None else size for size in port.shape or ()]
    if math.prod(shape) > MAX_EXAMPLE_ELEMENTS:
        raise DataError(
            f"inputs generated without data must have at most {MAX_EXAMPLE_ELEMENTS} elements, got "
            f"the input {port}; pass data, or set inputs to example arrays"
        )
    return shape


def _make_plain_values(port: TensorSpec, shape: Sequence[int]) -> Array:
    if port.dtype is None:
        return np.zeros(shape)
    if port.dtype.hasobject:
        return np.full(shape, b"", object)
    if port.dtype.kind in "fV":  # bfloat16 is of kind V in numpy
        return np.random.default_rng(0).random(shape).astype(port.dtype)
    return np.zeros(shape, port.dtype)


def in_parts(feeds: dict[str, Array], samples: int, most: int) -> Iterator[dict[str, Array]]:
    """Yield the result of `bind`, of `samples` samples, in parts of at most `most` samples."""
    if samples <= most:
        yield feeds
        return
    for start in range(0, samples, most):
        yield {tensor: array[start : start + most] for tensor, array in feeds.items()}
