"""The graph rewrite and dtype policies of Keras exclude each other."""

import keras
import numpy as np
import pytest
import tensorflow as tf
from graph_rewrite_nets import needs_pass, trained

from neural_mp.adaptors.tensorflow.training.graph_rewrite_state import rewrite_is_enabled
from neural_mp.errors import ConfigurationError
from neural_mp.training import (
    LossScale,
    LossScaleOptimizer,
    disable_mixed_precision_graph_rewrite,
    enable_mixed_precision_graph_rewrite,
    set_policy,
)

v1 = tf.compat.v1
pytestmark = pytest.mark.usefixtures("rewrite_disabled_afterwards")
POLICIES = {
    "mixed_float16": lambda: "mixed_float16",
    "an entry of a map": lambda: keras.dtype_policies.DTypePolicyMap(
        default_policy="float32", policy_map={"net/last": keras.DTypePolicy("mixed_bfloat16")}
    ),
}


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("make", [keras.optimizers.SGD, v1.train.AdamOptimizer])
def test_a_mixed_policy_that_is_set_is_refused_for_both_kinds(policy, make):
    keras.config.set_dtype_policy(POLICIES[policy]())
    with pytest.raises(ConfigurationError, match=r"mixed_.*set_dtype_policy\('float32'\)"):
        enable_mixed_precision_graph_rewrite(make())
    assert not rewrite_is_enabled()


@needs_pass
@pytest.mark.parametrize("policy", ["float32", "bfloat16"])
def test_a_policy_of_one_type_is_not_refused(policy):
    keras.config.set_dtype_policy(policy)
    enable_mixed_precision_graph_rewrite(keras.optimizers.SGD())
    assert rewrite_is_enabled()


SETTERS = (
    keras.config.set_dtype_policy,
    keras.mixed_precision.set_global_policy,
    tf.keras.mixed_precision.set_global_policy,
)


@needs_pass
@pytest.mark.parametrize("setter", SETTERS)
@pytest.mark.parametrize("policy", POLICIES)
def test_a_mixed_policy_set_later_is_refused_in_the_setter(enabled_rewrite, policy, setter):
    original = keras.config.dtype_policy()
    with pytest.raises(ValueError, match="disable_mixed_precision_graph_rewrite"):
        setter(POLICIES[policy]())
    assert keras.config.dtype_policy() == original
    disable_mixed_precision_graph_rewrite()
    setter(POLICIES[policy]())


@needs_pass
def test_a_policy_set_by_other_means_is_refused_at_the_next_step(enabled_rewrite, monkeypatch):
    weight = keras.Variable(np.ones(3, np.float32))
    enabled_rewrite.apply([tf.ones(3)], [weight])
    mixed = keras.DTypePolicy("mixed_bfloat16")
    monkeypatch.setattr(keras.config, "dtype_policy", lambda: mixed)
    with pytest.raises(ConfigurationError, match="both convert ops to 16 bits"):
        enabled_rewrite.apply([tf.ones(3)], [weight])


@needs_pass
def test_an_optimizer_of_tensorflow_1_refuses_at_the_next_step(monkeypatch):
    wrapped = enable_mixed_precision_graph_rewrite(v1.train.GradientDescentOptimizer(0.1))
    weight = tf.Variable([1.0, 2.0])
    wrapped.minimize(lambda: tf.reduce_sum(weight), var_list=[weight])
    mixed = keras.DTypePolicy("mixed_bfloat16")
    monkeypatch.setattr(keras.config, "dtype_policy", lambda: mixed)
    with pytest.raises(ConfigurationError, match="both convert ops to 16 bits"):
        wrapped.minimize(lambda: tf.reduce_sum(weight), var_list=[weight])


def test_errors_are_those_of_tensorflow_too():
    """Scripts for TensorFlow catch ValueError or TypeError."""
    with pytest.raises(ValueError, match="opt must be an optimizer"):
        enable_mixed_precision_graph_rewrite("sgd")
    with pytest.raises(ValueError, match="at least 1, got 0.5"):
        enable_mixed_precision_graph_rewrite(keras.optimizers.SGD(), loss_scale=0.5)
    with pytest.raises(ValueError, match="policy must be one of .* got 'float64'"):
        set_policy("float64")
    with pytest.raises(TypeError, match="optimizer must be a Keras optimizer"):
        LossScaleOptimizer("sgd")
    with pytest.raises(TypeError, match="optimizer must not scale the loss"):
        LossScaleOptimizer(LossScaleOptimizer(keras.optimizers.SGD()))
    with pytest.raises(ValueError, match="initial must be between"):
        LossScale(initial=2.0**30)


@needs_pass
def test_our_own_way_to_set_a_policy_refuses_at_once(enabled_rewrite, monkeypatch):
    monkeypatch.setenv("FORCE_BF16", "1")
    with pytest.raises(ConfigurationError, match="the graph rewrite, which is enabled"):
        set_policy("mixed_bfloat16")
    set_policy("float32")
    disable_mixed_precision_graph_rewrite()
    set_policy("mixed_bfloat16")
    assert keras.config.dtype_policy().name == "mixed_bfloat16"


@needs_pass
def test_a_map_of_ours_is_refused_like_any_policy(monkeypatch):
    monkeypatch.setenv("FORCE_BF16", "1")
    set_policy("mixed_bfloat16", keep=("out",))
    with pytest.raises(ConfigurationError, match="the graph rewrite cannot be combined with"):
        enable_mixed_precision_graph_rewrite(keras.optimizers.SGD())
    set_policy("float32")


@pytest.mark.slow
def test_optimizers_beside_the_rewrite_take_any_policy(digits):
    keras.config.set_dtype_policy("mixed_bfloat16")
    trained(LossScaleOptimizer(keras.optimizers.SGD()), digits)
