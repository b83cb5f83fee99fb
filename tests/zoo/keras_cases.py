"""All cases of Keras layers."""

from __future__ import annotations

from zoo import keras_layer_cases, keras_preprocessing_cases, keras_recurrent_cases

CASES = [
    *keras_layer_cases.CASES,
    *keras_recurrent_cases.CASES,
    *keras_preprocessing_cases.CASES,
]
