import keras
import numpy as np
import pytest
from keras import layers, ops
from keras_nets import ChannelsLast

from neural_mp.errors import PlanError
from neural_mp.testing import FACTOR, CorrectionCase, CorrectionContract


def convolution(channels, **settings):
    return layers.Conv2D(channels, 3, padding="same", bias_initializer="random_normal", **settings)


def dense(channels):
    return layers.Dense(channels, bias_initializer="random_normal")


def scale(layer: layers.Layer, channel: int, factor: float, axis: int = -1) -> None:
    """Multiply one channel of the weight along an axis; with the last axis, of the bias too."""
    weight, bias = layer.get_weights()
    np.moveaxis(weight, axis, 0)[channel] *= factor
    if axis == -1:
        bias[channel] *= factor
    layer.set_weights([weight, bias])


def outliers() -> keras.Model:
    """See the contract; in groups of one channel, which is what has a kernel in integers."""
    image = keras.Input((8, 8, 1), name="image")
    first, last = convolution(12), convolution(12)
    grouped = layers.DepthwiseConv2D(
        3, padding="same", depth_multiplier=2, bias_initializer="random_normal"
    )
    norm = layers.LayerNormalization(beta_initializer="random_normal")
    query, key = dense(10), dense(10)
    features = ops.relu(grouped(ops.relu(first(image))))
    features = ops.relu(last(layers.MaxPooling2D(2)(features)))
    features = norm(layers.Reshape((16, 12))(features))
    net = keras.Model(image, query(features) * key(features))
    scale(first, 5, FACTOR)
    scale(grouped, 5, 1 / FACTOR, axis=2)
    weight, bias = grouped.get_weights()
    weight[:, :, 3, 1] *= FACTOR  # output 7 is the second of channel 3
    bias[7] *= FACTOR
    grouped.set_weights([weight, bias])
    scale(last, 7, 1 / FACTOR, axis=2)
    scale(norm, 5, FACTOR)
    scale(query, 5, 1 / FACTOR, axis=0)
    scale(key, 5, 1 / FACTOR, axis=0)
    return net


def residual() -> keras.Model:
    image = keras.Input((8, 8, 1), name="image")
    features = ops.relu(convolution(8)(image))
    return keras.Model(image, convolution(8)(features) + features)


def two_outputs() -> keras.Model:
    image = keras.Input((8, 8, 1), name="image")
    features = ops.relu(convolution(8)(image))
    return keras.Model(image, [convolution(8)(features), features])


def normed() -> keras.Model:
    image = keras.Input((8, 8, 1), name="image")
    norm = layers.LayerNormalization(beta_initializer=keras.initializers.RandomNormal(stddev=1))
    product = dense(16)
    net = keras.Model(image, product(norm(layers.Reshape((8, 8))(image))))
    scale(norm, 5, FACTOR)
    scale(product, 5, 1 / FACTOR, axis=0)
    return net


def seeded(build) -> keras.Model:
    keras.utils.set_random_seed(0)
    return build()


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
