"""What a user gives beside a model, read the same way for every framework."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from neural_mp.adaptors.common.signature import Array, Signature, example_for
from neural_mp.core.enums import Capture
from neural_mp.errors import ConfigurationError
from neural_mp.util.open_axes import Shapes, given_shapes
from neural_mp.util.pytree import tree_leaves


@dataclass(frozen=True)
class InputSpec:
    """What is known of the inputs and outputs that a user wants.

    Attributes:
        names: the inputs in the order in which the data has them; none for the model's own order.
        outputs: the outputs to keep; none for all.
        example: the inputs of one batch; None where there is no data.
        shapes: shapes of the inputs, None in them for axes that are to be free; None for those of
            the example.
    """

    names: tuple[str, ...] = ()
    outputs: tuple[str, ...] = ()
    example: Any = None
    shapes: Shapes | None = None

    @classmethod
    def read(cls, inputs: object, outputs: object, example: object) -> InputSpec:
        """What the arguments of `Adaptor.load` say.

        Raises:
            ConfigurationError: inputs are no names, example tensors or shapes, or outputs no names.
        """
        shapes = given_shapes(inputs)
        names, shown = ((), None) if shapes is not None else _names_or_example(inputs)
        outputs = _names_in(outputs, "outputs")
        return cls(names, outputs, example if shown is None else shown, shapes)

    def without_shapes(self, what: str) -> InputSpec:
        """Return the same, where shapes are of no use.

        Args:
            what: what it is that the shapes are of no use for, such as "a SavedModel".

        Raises:
            ConfigurationError: there are shapes.
        """
        if self.shapes is None:
            return self
        raise ConfigurationError(
            f"inputs must be names or example tensors for {what}, got the shapes {self.shapes}; "
            f"shapes free the axes of Keras models and tf.functions, which are traced"
        )

    def feeds(self, signature: Signature) -> tuple[dict[str, Array], list[str]]:
        """Inputs that a model can be run on, made up where there is no data, and what to say then.

        Raises:
            DataError: the example does not fit the model.
        """
        if self.example is not None:
            return signature.bind(self.example), []
        unknown = [port for port in signature.inputs if port.has_unknown_sizes]
        warnings = [
            f"no data was given, so unknown sizes of the input {port} were taken to be 1; "
            f"set inputs to an example array to be sure"
            for port in unknown[:1]
        ]
        return example_for(signature), warnings


def unused_capture(framework: str, capture: Capture) -> tuple[str, ...]:
    """What to say where modules are asked for of a framework whose models are graphs already."""
    if capture is Capture.WHOLE:
        return ()
    return (f"capture = {str(capture)!r} is not used for {framework}: every model is one graph",)


def _names_in(value: object, option: str) -> tuple[str, ...]:
    """Names given as `"a, b"` or as a list; none for None. `option` is what a message calls it."""
    if value is None:
        return ()
    if isinstance(value, str):
        return tuple(name.strip() for name in value.split(",") if name.strip())
    if isinstance(value, Iterable):
        listed = list(value)
        if all(isinstance(name, str) for name in listed):
            return tuple(listed)
    raise ConfigurationError(f"{option} must be names, got {value!r}")


def _names_or_example(inputs: object) -> tuple[tuple[str, ...], Any]:
    """Whether a user's `inputs` are names or example tensors: one of the two, the other empty."""
    if isinstance(inputs, str):
        return _names_in(inputs, "inputs"), None
    found = [] if inputs is None else tree_leaves(inputs)
    if not found:
        return (), None
    if all(isinstance(leaf, str) for leaf in found):
        return tuple(found), None
    if all(hasattr(leaf, "__array__") for leaf in found):
        return (), inputs
    raise ConfigurationError(
        f"inputs must be names, example tensors or shapes, got {type(inputs).__name__}"
    )
