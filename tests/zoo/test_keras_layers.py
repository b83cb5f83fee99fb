"""One small model per Keras layer class goes through tune, audit, save and reload."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import keras
import pytest
from keras import layers
from zoo.harness import Case, Row, check_complete, check_page, convert
from zoo.keras_cases import CASES

from neural_mp import MixedPrecision
from neural_mp.errors import ModelLoadError

#: Layer class → why it has no case.
WITHOUT = {
    "FlaxLayer": "runs on the JAX backend of Keras only",
    "JaxLayer": "runs on the JAX backend of Keras only",
    "TorchModuleWrapper": "runs on the PyTorch backend of Keras only",
}


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_a_layer_is_converted_audited_saved_and_loaded(
    case: Case, tmp_path: Path, record_row: Callable[[str, Row], None]
) -> None:
    if not hasattr(layers, case.name.split()[0]):
        pytest.skip("this Keras has no such layer")
    record_row("keras", convert(case, tmp_path))


def test_every_layer_class_has_a_case() -> None:
    kinds = {name: getattr(layers, name) for name in dir(layers)}
    classes = {
        kind.__name__ if kind.__name__ in kinds else name  # a class may have several names
        for name, kind in kinds.items()
        if isinstance(kind, type) and issubclass(kind, layers.Layer)
    }
    check_complete(CASES, classes, WITHOUT)


def test_the_page_lists_every_case() -> None:
    check_page("keras", CASES)


@pytest.mark.parametrize("name", ["LSTM", "GRU", "SimpleRNN"])
def test_a_layer_that_keeps_its_state_is_refused_with_the_reason(name: str) -> None:
    inputs = keras.Input(batch_shape=(2, 6, 8))
    net = keras.Model(inputs, getattr(layers, name)(4, stateful=True)(inputs))
    converter = MixedPrecision(model=net)
    with pytest.raises(ModelLoadError, match="must not keep state between calls.*stateful=False"):
        converter.sensitivity(0)
