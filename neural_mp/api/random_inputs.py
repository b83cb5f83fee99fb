"""Example inputs from words, for models that come without any."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from neural_mp.errors import ConfigurationError
from neural_mp.util.argument_checks import brief, check_size


def random_inputs(descriptions: Sequence[str]) -> tuple[np.ndarray, ...] | None:
    """Example inputs from words such as `2,3,224,224` or `int64:2,128`; None for no words.

    Floats are drawn from 0…1, integers are zeros (an index that is always valid).

    Raises:
        ConfigurationError: a description is malformed.
    """
    arrays = []
    for text in descriptions:
        kind, _, shape_text = text.rpartition(":")
        try:
            dtype = np.dtype(kind or "float32")
            shape = tuple(int(size) for size in shape_text.split(","))
            check_size(f"input shape {brief(text)}", shape, np.dtype(np.float64).itemsize)
            drawn = np.random.default_rng(0).random(shape)
        except (TypeError, ValueError):
            raise ConfigurationError(
                f"input shape {text!r} is malformed; write sizes with commas, such as 2,3,224,224, "
                f"or with a dtype before them, such as int64:2,128"
            ) from None
        arrays.append((drawn if dtype.kind == "f" else np.zeros(shape)).astype(dtype))
    return tuple(arrays) or None
