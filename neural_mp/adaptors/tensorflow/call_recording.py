"""Inputs of the calls that the user's own code makes to a Keras model."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import numpy as np
import tensorflow as tf

from neural_mp.adaptors.tensorflow.keras_models import calls_wrapped
from neural_mp.errors import ConversionError

#: Functions that Keras compiles from `call` on their first use.
_COMPILED = ("predict_function", "test_function", "train_function")


@contextmanager
def recording(model: Any, record: Callable[[Any], None]) -> Iterator[None]:
    """Pass the inputs of every call of a model within this context to `record`, as arrays.

    `predict`, `evaluate` and `fit` run without compiled functions meanwhile, which hide inputs. A
    call inside of a `tf.function` of the user has no arrays, and is not recorded.

    Raises:
        ConversionError: the object is no Keras model.
    """
    if not isinstance(model, tf.keras.Model):
        raise ConversionError(
            f"only calls of Keras models can be recorded, got {type(model).__name__}; pass the "
            f"calibration data as calib_dataloader"
        )

    def before(_: Any, call: Callable[..., Any], args: Any, kwargs: Mapping[str, Any]) -> Any:
        inputs = _inputs(args, kwargs)
        if inputs is not None:
            record(inputs)
        return call(*args, **kwargs)

    with _without_compilation(model), calls_wrapped([model], before):
        yield


@contextmanager
def _without_compilation(model: Any) -> Iterator[None]:
    original = {name: getattr(model, name, None) for name in _COMPILED}
    eager = model.run_eagerly
    model.run_eagerly = True
    for name in original:
        setattr(model, name, None)
    try:
        yield
    finally:
        model.run_eagerly = eager
        for name, function in original.items():
            setattr(model, name, function)


def _inputs(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    """Return the inputs of a call as a batch; None if they are not arrays, but symbols."""
    named = {name: value for name, value in kwargs.items() if name not in ("training", "mask")}
    data = [value for value in (*args, *named.values()) if _is_data(value)]
    if not data or any(map(tf.is_symbolic_tensor, tf.nest.flatten(data))):
        return None
    arrays = tf.nest.map_structure(np.array, data)
    only = arrays[0] if len(arrays) == 1 else arrays
    return tuple(only) if isinstance(only, list) else only


def _is_data(value: Any) -> bool:
    leaves = tf.nest.flatten(value)
    return bool(leaves) and all(isinstance(leaf, tf.Tensor | np.ndarray) for leaf in leaves)
