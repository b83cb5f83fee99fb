import keras
import numpy as np
import pytest
from keras import layers, ops
from keras_contract_nets import (
    convolution,
    dense,
    normed,
    outliers,
    residual,
    scale,
    seeded,
    two_outputs,
)
from keras_nets import ChannelsLast

from neural_mp.errors import PlanError
from neural_mp.testing import FACTOR, CorrectionCase, CorrectionContract


@pytest.mark.slow
class TestCorrections(ChannelsLast, CorrectionContract):
    @pytest.fixture(scope="class")
    @classmethod
    def net(cls):
        return seeded(outliers)

    @pytest.fixture(scope="class")
    @classmethod
    def residual(cls):
        return seeded(residual)

    @pytest.fixture(scope="class")
    @classmethod
    def two_outputs(cls):
        return seeded(two_outputs)

    @pytest.fixture(scope="class")
    @classmethod
    def normed(cls):
        return seeded(normed)


IMAGES = np.random.default_rng(0).random((128, 8, 8, 1), np.float32)


def normed_over(axes, **settings) -> keras.Model:
    image = keras.Input((8, 8, 1), name="image")
    norm = layers.LayerNormalization(axis=axes, beta_initializer="random_normal", **settings)
    return keras.Model(image, dense(6)(norm(layers.Reshape((8, 8))(image))))


@pytest.mark.parametrize("axes", [1, (1, 2)])
def test_a_norm_over_other_axes_is_left_alone(axes):
    case = CorrectionCase(seeded(lambda: normed_over(axes)), IMAGES)
    (product,) = case.space.tunable_ops
    with pytest.raises(PlanError, match=product):
        case.convert(case.with_corrections_of(product, "smooth"))


def test_activations_that_are_not_in_proportion_are_not_passed():
    def build() -> keras.Model:
        image = keras.Input((8, 8, 1), name="image")
        return keras.Model(image, convolution(6)(layers.ReLU(6)(convolution(8)(image))))

    case = CorrectionCase(seeded(build), IMAGES)
    with pytest.raises(PlanError, match=case.space.tunable_ops[1]):
        case.convert(case.with_corrections_of(case.space.tunable_ops[1], "equalize"))


def test_a_layer_used_twice_is_changed_where_it_has_to_be():
    def build() -> keras.Model:
        image = keras.Input((8, 8, 1), name="image")
        twice = dense(8)
        outputs = twice(ops.relu(twice(layers.Reshape((8, 8))(image))))
        scale(twice, 3, FACTOR)
        return keras.Model(image, outputs)

    case = CorrectionCase(seeded(build), IMAGES)
    assert case.best
    outputs = case.run(case.in_fp32(case.corrected))
    np.testing.assert_allclose(outputs, case.reference, 1e-3, 1e-5 * np.abs(case.reference).max())
