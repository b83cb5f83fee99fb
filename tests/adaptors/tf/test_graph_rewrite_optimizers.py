"""Optimizers, loss scales and precisions that the graph rewrite accepts or refuses."""

import keras
import numpy as np
import pytest
import tensorflow as tf
from graph_rewrite_nets import BF16, RULE, needs_pass

from neural_mp import AutoMixedPrecisionOptions
from neural_mp.adaptors.tensorflow.training.graph_rewrite_state import rewrite_is_enabled
from neural_mp.core.precision import Precision
from neural_mp.core.training_numerics import LossScale
from neural_mp.errors import ConfigurationError, UnsupportedPrecisionError
from neural_mp.training import (
    LossScaleOptimizer,
    disable_mixed_precision_graph_rewrite,
    enable_mixed_precision_graph_rewrite,
)

v1 = tf.compat.v1
pytestmark = pytest.mark.usefixtures("rewrite_disabled_afterwards")


@pytest.mark.parametrize(
    ("opt", "message"),
    [
        (keras.optimizers.LossScaleOptimizer, "must not scale the loss, got a LossScaleOptimizer"),
        (LossScaleOptimizer, "must not scale the loss, got a LossScaleOptimizer"),
    ],
)
def test_a_keras_optimizer_that_scales_the_loss_already_is_refused(opt, message):
    with pytest.raises(ConfigurationError, match=message):
        enable_mixed_precision_graph_rewrite(opt(keras.optimizers.SGD()))
    assert not rewrite_is_enabled()


def test_an_optimizer_of_tensorflow_1_that_scales_the_loss_already_is_refused():
    wrapped = v1.mixed_precision.MixedPrecisionLossScaleOptimizer(v1.train.AdamOptimizer(), 8)
    with pytest.raises(ConfigurationError, match="got a MixedPrecisionLossScaleOptimizer"):
        enable_mixed_precision_graph_rewrite(wrapped)
    assert not rewrite_is_enabled()


@needs_pass
@pytest.mark.parametrize("make", [keras.optimizers.SGD, v1.train.AdamOptimizer])
def test_what_it_gives_back_is_not_taken_again_but_another_optimizer_is(make):
    arguments = () if make is v1.train.AdamOptimizer else (0.1,)
    wrapped = enable_mixed_precision_graph_rewrite(make(*arguments))
    assert isinstance(
        wrapped,
        keras.optimizers.LossScaleOptimizer | v1.mixed_precision.MixedPrecisionLossScaleOptimizer,
    )
    with pytest.raises(ConfigurationError, match="must not scale the loss"):
        enable_mixed_precision_graph_rewrite(wrapped)
    assert rewrite_is_enabled()  # the one before counts
    enable_mixed_precision_graph_rewrite(make(*arguments))
    disable_mixed_precision_graph_rewrite()
    assert not tf.config.optimizer.get_experimental_options()[BF16]


@pytest.mark.parametrize(
    ("opt", "message"),
    [
        ("sgd", r"got 'sgd'; use keras.optimizers.get\('sgd'\)"),
        (keras.optimizers.SGD, r"call the class: SGD\("),
        (None, "opt must be an optimizer of Keras 3 or of tf.compat.v1.train, got None"),
    ],
)
def test_what_is_no_optimizer_is_refused(opt, message):
    with pytest.raises(ConfigurationError, match=message):
        enable_mixed_precision_graph_rewrite(opt)


SCALES = {
    "dynamic": ("dynamic", LossScale()),
    "number": (128, LossScale.fixed(128.0)),
    "numpy": (np.float32(2), LossScale.fixed(2.0)),
    "LossScale": (RULE, RULE),
    "fixed": (lambda: v1.mixed_precision.FixedLossScale(64), LossScale.fixed(64.0)),
    "of TensorFlow": (
        lambda: v1.mixed_precision.DynamicLossScale(2.0**30, 7, 4.0),
        LossScale(2.0**30, 7, 4.0, maximum=2.0**30),
    ),
}


@needs_pass
@pytest.mark.parametrize("given", SCALES)
@pytest.mark.parametrize("make", [keras.optimizers.SGD, v1.train.AdamOptimizer])
def test_what_loss_scale_may_be(given, make):
    value, rule = SCALES[given]
    value = value() if callable(value) else value
    assert enable_mixed_precision_graph_rewrite(make(), value).rule == rule


class OwnScale(v1.mixed_precision.DynamicLossScale):
    """A loss scale of somebody's own."""


@pytest.mark.parametrize("value", ["dyn", None, 0, -1, True, np.ones(2), np.inf, OwnScale])
@pytest.mark.parametrize("make", [keras.optimizers.SGD, v1.train.AdamOptimizer])
def test_what_loss_scale_may_not_be(value, make):
    value = value() if value is OwnScale else value
    with pytest.raises(ConfigurationError, match="loss.scale"):
        enable_mixed_precision_graph_rewrite(make(), value)
    assert not rewrite_is_enabled()


@needs_pass
@pytest.mark.parametrize("word", ["bf16", "BFLOAT16", "bfloat16", Precision.BF16, None])
def test_the_words_for_bf16(word):
    enable_mixed_precision_graph_rewrite(keras.optimizers.SGD(), precision=word)
    assert tf.config.optimizer.get_experimental_options()[BF16]


def test_fp16_without_a_gpu_is_refused_in_all_its_words():
    for precision in ("fp16", "FLOAT16", Precision.FP16):
        with pytest.raises(UnsupportedPrecisionError, match="fp16 requires a GPU"):
            enable_mixed_precision_graph_rewrite(keras.optimizers.SGD(), precision=precision)
    options = AutoMixedPrecisionOptions(data_type="FLOAT16")
    with pytest.raises(UnsupportedPrecisionError, match="fp16 requires a GPU"):
        enable_mixed_precision_graph_rewrite(keras.optimizers.SGD(), amp=options)
    assert not rewrite_is_enabled()
