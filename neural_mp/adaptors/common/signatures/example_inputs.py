"""Example inputs: synthetic ones, other batch sizes, and parts of batches."""

from __future__ import annotations

import math
from collections.abc import Iterator

import numpy as np

from neural_mp.adaptors.common.signatures.signature import Signature, TensorSpec
from neural_mp.errors import DataError
from neural_mp.io.limits import MAX_EXAMPLE_ELEMENTS
from neural_mp.util.pytree import Array


def example_for(signature: Signature) -> dict[str, Array]:
    """Return synthetic inputs: floats drawn from 0…1, integers zero, unknown sizes 1.

    Raises:
        DataError: an input is too large.
    """
    return {port.tensor: _made_up(port) for port in signature.inputs}


def _made_up(port: TensorSpec) -> Array:
    if port.default is not None:
        return port.default
    shape = [1 if size is None else size for size in port.shape or ()]
    if math.prod(shape) > MAX_EXAMPLE_ELEMENTS:
        raise DataError(
            f"inputs generated without data must have at most {MAX_EXAMPLE_ELEMENTS} elements, got "
            f"the input {port}; pass data, or set inputs to example arrays"
        )
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
