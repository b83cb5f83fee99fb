"""What a user may mean by `inputs`: names, or example tensors; the same for every framework."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from neural_mp.core.nested import leaves
from neural_mp.errors import ConfigurationError


def names_in(value: Any, option: str) -> tuple[str, ...]:
    """Names given as `"a, b"` or as a list; none for None.

    Raises:
        ConfigurationError: something else was given; `option` is what the message calls it.
    """
    if value is None:
        return ()
    if isinstance(value, str):
        return tuple(name.strip() for name in value.split(",") if name.strip())
    if isinstance(value, Iterable):
        listed = list(value)
        if all(isinstance(name, str) for name in listed):
            return tuple(listed)
    raise ConfigurationError(f"{option} must be names, got {value!r}")


def names_or_examples(inputs: Any) -> tuple[tuple[str, ...], Any]:
    """Whether a user's `inputs` are names or example tensors: one of the two, the other empty.

    Raises:
        ConfigurationError: they are neither.
    """
    if isinstance(inputs, str):
        return names_in(inputs, "inputs"), None
    found = [] if inputs is None else leaves(inputs)
    if not found:
        return (), None
    if all(isinstance(leaf, str) for leaf in found):
        return tuple(found), None
    if all(hasattr(leaf, "__array__") for leaf in found):
        return (), inputs
    raise ConfigurationError(
        f"inputs must be names or example tensors, got {type(inputs).__name__}"
    )
