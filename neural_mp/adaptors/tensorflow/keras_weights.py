"""The weights that a model of Keras makes while it is read: no more than its file holds.

Keras makes all weights by what the configuration says of their sizes, and only then looks at those
in the file. A configuration of a few hundred bytes can declare more than any memory holds.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np

#: How many times the weights in the file are made; an optimizer that is not in it keeps two more.
_MOST_TIMES = 4
#: What may be made beside: weights that are not kept in files, such as those of metrics.
_BESIDE = 256 * 2**20
#: Bytes of an element of a type that numpy does not know.
_OF_UNKNOWN = 16


class TooManyWeightsError(Exception):
    """A configuration declares more weights than are in the file."""


@contextmanager
def bounded_weights(nbytes: int) -> Iterator[None]:
    """Let Keras make no more weights in this thread than belong to a file.

    Args:
        nbytes: what the weights in the file take.

    Raises:
        TooManyWeightsError: from inside Keras, before the first weight too many is made.
    """
    import keras

    original, thread = keras.Variable.__init__, threading.get_ident()
    left = _MOST_TIMES * nbytes + _BESIDE

    def make(variable: Any, initializer: Any, shape: Any = None, *args: Any, **named: Any) -> None:
        nonlocal left
        if threading.get_ident() == thread and shape is not None:
            left -= _nbytes(shape, args[0] if args else named.get("dtype"))
            if left < 0:
                raise TooManyWeightsError(
                    f"its configuration declares more weights than the {nbytes} bytes of them "
                    f"that are in the file"
                )
        original(variable, initializer, shape, *args, **named)

    keras.Variable.__init__ = make
    try:
        yield
    finally:
        keras.Variable.__init__ = original


def _nbytes(shape: Any, dtype: Any) -> int:
    """What a weight takes; nothing where Keras itself will refuse its shape."""
    from keras import backend

    try:
        count = math.prod(int(length) for length in shape)
    except (TypeError, ValueError):
        return 0
    try:
        return count * np.dtype(backend.standardize_dtype(dtype)).itemsize
    except (TypeError, ValueError):  # such as that of texts, which numpy calls otherwise
        return count * _OF_UNKNOWN
