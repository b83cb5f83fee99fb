"""Application of a plan to a Keras model: dtype policies of layers, built or not."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import keras

from neural_mp.adaptors.tensorflow.training.policies import (
    FLOAT32,
    computes_in_float16,
    layers_of,
    name_in,
    path_of,
    put_policy,
    scaled,
    unit_layers,
    watch_compile,
)
from neural_mp.core.precision import Precision
from neural_mp.errors import UnknownOperatorError, did_you_mean

_POLICIES = {
    Precision.BF16: "mixed_bfloat16",
    Precision.FP16: "mixed_float16",
    Precision.FP32: FLOAT32,
}
#: Functions that Keras compiled for a model with the policies at that time.
_COMPILED = ("train_function", "test_function", "predict_function")


def apply_plan(model: keras.Model, plan: Mapping[str, Precision]) -> Any:
    """Set the dtype policies of layers, given by name or path."""
    layers: dict[str, list[Any]] = {}
    for layer in layers_of(model):
        for name in {name_in(model, layer), path_of(layer), layer.name}:
            layers.setdefault(name, []).append(layer)
    for name in plan:
        if name not in layers:
            hint = did_you_mean(name, layers)
            if not all(layer.built for group in layers.values() for layer in group):
                hint = "; some of its layers are not built: call the model on a batch first"
            raise UnknownOperatorError(
                f"the plan names {name!r}, which is not a layer of model {model.name!r}{hint}"
            )
    # Outer layers first: their policy holds for nested layers that the plan does not name.
    for name in sorted(plan, key=lambda name: -len(layers[name][0]._flatten_layers())):
        put_policy(layers[name], _POLICIES[plan[name]])
    named = {id(layer) for name in plan for layer in layers[name]}
    if all(id(layer) in named for group in unit_layers(model).values() for layer in group):
        # A 16-bit model casts its inputs, also for layers that should be in float32.
        for holder in model._flatten_layers():
            if isinstance(holder, keras.Model):
                holder._dtype_policy = keras.DTypePolicy(FLOAT32)
    for name in _COMPILED:
        setattr(model, name, None)
    watch_compile()
    if getattr(model, "compiled", False) and computes_in_float16(model):
        model.optimizer = scaled(model.optimizer)
    return model
