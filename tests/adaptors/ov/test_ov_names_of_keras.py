"""Ops of a Keras model have the same names in OpenVINO, although its graph is laid out anew."""

from __future__ import annotations

import numpy as np
import pytest

from neural_mp import MixedPrecision, compare
from neural_mp.adaptors.transfer import transfer_model
from neural_mp.api.loading import load_source

pytest.importorskip("tensorflow")

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def net():
    from keras_nets import small_net

    return small_net()


@pytest.fixture(scope="module")
def both(net):
    """The model in TensorFlow, and in OpenVINO."""
    source = load_source(net, None, None)
    return source, transfer_model(source, "openvino")


def contractions(model) -> set[str]:
    kinds = ("Conv2D", "Convolution", "MatMul")
    return {op.name for op in model.adaptor.graph(model.held) if op.type in kinds}


def test_convolutions_and_products_have_their_names(both):
    source, target = both
    assert contractions(target) == contractions(source)
    assert len(contractions(target)) == 7
    names = {op.name for op in source.adaptor.graph(source.held)}
    common = [op.name for op in target.adaptor.graph(target.held) if op.name in names]
    assert len(common) > 0.8 * len(target.adaptor.graph(target.held))


def test_renaming_changes_no_number(both):
    source, target = both
    images = np.random.default_rng(0).random((4, 8, 8, 1), np.float32)
    np.testing.assert_allclose(target(images), source(images), rtol=1e-4, atol=1e-5)


def test_ops_are_compared_wherever_their_channels_lie():
    """Also where a shape does not show the layout: as many channels as rows and columns."""
    import keras
    from keras import layers

    keras.utils.set_random_seed(0)
    cube = keras.Sequential(
        [
            keras.Input((8, 8, 1)),
            layers.Conv2D(8, 3, padding="same", activation="relu"),
            layers.Conv2D(16, 3, padding="same", activation="relu"),
            layers.GlobalAveragePooling2D(),
            layers.Dense(4),
        ]
    )
    source = load_source(cube, None, None)
    target = transfer_model(source, "openvino")
    images = np.random.default_rng(0).random((4, 8, 8, 1), np.float32)
    comparison = compare(source, target, [images])
    assert len(comparison.layers) >= 6
    assert min(layer.sqnr for layer in comparison.layers) > 90


def test_a_limit_of_a_layer_holds_in_openvino(net, both):
    images = np.random.default_rng(0).random((32, 8, 8, 1), np.float32)
    layer = sorted(contractions(both[0]))[0]
    result = MixedPrecision(
        model=net,
        runtime="openvino",
        precisions="int8",
        calib_dataloader=[images],
        op_wise={layer: {"precisions": "fp32"}},
        cache=False,
    )()
    assert result.framework == "openvino"
    rest = contractions(both[0]) - {layer}
    assert result.plan[layer].precision == "fp32"
    assert {result.plan[name].precision.value for name in rest} == {"int8"}
