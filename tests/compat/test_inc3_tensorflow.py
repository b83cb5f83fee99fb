"""`quantize_model` and `autotune` of `neural_compressor.tensorflow`."""

from __future__ import annotations

import numpy as np
import pytest

pytest.importorskip("keras")

import keras

from neural_mp.compat.inc.v3.tensorflow_names import (
    BaseDataLoader,
    Model,
    StaticQuantConfig,
    TuningConfig,
    autotune,
    default_collate,
    quantize_model,
)
from neural_mp.errors import DataError

pytestmark = pytest.mark.slow


class Images:
    """Random images with labels."""

    def __getitem__(self, index: int) -> tuple[np.ndarray, int]:
        return np.random.RandomState(index).rand(8, 8, 3).astype("float32"), index % 10

    def __len__(self) -> int:
        return 64


@pytest.fixture(scope="module")
def net() -> keras.Model:
    keras.utils.set_random_seed(0)
    return keras.Sequential(
        [
            keras.layers.Input((8, 8, 3)),
            keras.layers.Conv2D(16, 3, activation="relu"),
            keras.layers.Flatten(),
            keras.layers.Dense(10),
        ]
    )


@pytest.fixture
def loader() -> BaseDataLoader:
    return BaseDataLoader(Images(), batch_size=16)


def test_local_settings_keep_a_type_in_fp32(net, loader):
    floats = StaticQuantConfig(weight_dtype="fp32", act_dtype="fp32")
    converted = quantize_model(net, StaticQuantConfig().set_local("Dense", floats), loader)
    precisions = {op.rpartition("/")[2]: config.precision for op, config in converted.plan.items()}
    assert precisions == {"convolution": "int8", "MatMul": "fp32"}
    images, _ = next(iter(loader))
    assert np.allclose(converted(images), net(images), atol=0.05)


def test_a_saved_model_is_calibrated_by_a_function_of_the_user(net, loader, tmp_path):
    net.export(tmp_path / "saved", verbose=False)
    model = Model(str(tmp_path / "saved"))

    def calibrate(observed: Model) -> None:
        for images, _ in loader:
            feed = dict(zip(observed.input_tensor, [images], strict=True))
            observed.sess.run(observed.output_tensor, feed)

    by_function = quantize_model(model, StaticQuantConfig(), calib_func=calibrate)
    by_loader = quantize_model(model, StaticQuantConfig(), loader)
    assert by_function.observations.ranges == by_loader.observations.ranges
    with pytest.raises(DataError, match="no run was seen"):
        quantize_model(model, StaticQuantConfig(), calib_func=lambda observed: None)


def test_configurations_are_tried_in_order(net, loader):
    accuracies = iter([1.0, 0.5, 0.995])
    options = TuningConfig(StaticQuantConfig(act_algorithm=["kl", "minmax"]))
    tuned = autotune(net, options, lambda model: next(accuracies), calib_dataloader=loader)
    algorithms = {c.activation.algorithm for c in tuned.plan.values() if c.activation}
    assert algorithms == {"minmax"}


def test_samples_are_collated_by_item():
    first, second = np.zeros((2, 3)), np.ones((2, 3))
    images, labels = default_collate([(first, 1), (second, 2)])
    assert images.shape == (2, 2, 3)
    assert labels == (1, 2)
