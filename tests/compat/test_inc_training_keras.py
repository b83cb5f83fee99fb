"""Training scripts of Intel Neural Compressor 2.x for Keras models: `prepare_compression`."""

import keras
import numpy as np
import pytest
from sklearn.datasets import load_digits

import neural_mp
from neural_mp.compat.inc.config import QuantizationAwareTrainingConfig
from neural_mp.compat.inc.import_aliases import NotHereError
from neural_mp.compat.inc.training import prepare_compression

pytestmark = pytest.mark.slow
_IMAGES = load_digits().images[..., None].astype(np.float32) / 16
_LABELS = load_digits().target
_LOSS = keras.losses.SparseCategoricalCrossentropy(from_logits=True)


@pytest.fixture(scope="module")
def net():
    keras.utils.set_random_seed(0)
    layers = [
        keras.layers.Conv2D(12, 3, activation="relu", name="conv"),
        keras.layers.Flatten(name="flat"),
        keras.layers.Dense(10, name="logits"),
    ]
    model = keras.Sequential([keras.Input((8, 8, 1)), *layers], name="net")
    model.compile(keras.optimizers.Adam(3e-3), _LOSS)
    model.fit(_IMAGES[:1297], _LABELS[:1297], batch_size=64, epochs=8, verbose=0)
    return model


def _accuracy(model):
    return float((np.asarray(model(_IMAGES[1297:])).argmax(1) == _LABELS[1297:]).mean())


def test_the_script_of_the_example_trains_to_the_accuracy_of_fp32(net, tmp_path):
    """Compile and fit `manager.model.model` between the callbacks, then save."""
    net.save(tmp_path / "baseline.keras")
    manager = prepare_compression(
        str(tmp_path / "baseline.keras"), QuantizationAwareTrainingConfig()
    )
    batches = [(_IMAGES[start : start + 64], _LABELS[start : start + 64]) for start in (0, 64)]
    manager.callbacks.on_train_begin(batches)
    simulation = manager.model.model
    simulation.compile(keras.optimizers.Adam(5e-4), _LOSS)
    simulation.fit(_IMAGES[:1297], _LABELS[:1297], batch_size=64, epochs=2, verbose=0)
    manager.callbacks.on_train_end()
    assert set(manager.model.optimized.plan.precisions.values()) == {"int8"}
    manager.save(tmp_path / "saved")
    saved = neural_mp.load(tmp_path / "saved")
    accuracy = float((saved(_IMAGES[1297:]).argmax(1) == _LABELS[1297:]).mean())
    assert accuracy > _accuracy(net) - 0.01


def test_training_without_batches_for_calibration_names_the_way(net):
    manager = prepare_compression(net, QuantizationAwareTrainingConfig())
    with pytest.raises(NotHereError, match=r"on_train_begin\(dataloader\)"):
        manager.callbacks.on_train_begin()
