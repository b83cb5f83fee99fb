"""Sessions of TensorFlow 1 follow the graph rewrite, unless their configuration forbids it."""

import warnings
from types import SimpleNamespace

import keras
import numpy as np
import pytest
import tensorflow as tf
from graph_rewrite_nets import BF16, FP16, config_with, convolved, needs_pass
from tensorflow.core.protobuf.rewriter_config_pb2 import RewriterConfig

from neural_mp import AutoMixedPrecisionOptions
from neural_mp.adaptors.tensorflow.training import graph_rewrite_checks
from neural_mp.adaptors.tensorflow.training.graph_rewrite_state import rewrite_is_enabled
from neural_mp.errors import NeuralMPError
from neural_mp.training import (
    disable_mixed_precision_graph_rewrite,
    enable_mixed_precision_graph_rewrite,
)

v1 = tf.compat.v1
pytestmark = pytest.mark.usefixtures("rewrite_disabled_afterwards")


@pytest.mark.slow
@needs_pass
def test_existing_sessions_cause_a_warning():
    def enable():
        enable_mixed_precision_graph_rewrite(keras.optimizers.SGD())
        disable_mixed_precision_graph_rewrite()

    with v1.Session(graph=tf.Graph()), pytest.warns(UserWarning, match=r"without.*: 1\."):
        enable()
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        enable()  # that one is closed
        with v1.Session(graph=tf.Graph(), config=config_with(BF16, RewriterConfig.ON)):
            enable()


@pytest.mark.slow
@needs_pass
def test_sessions_made_while_it_was_enabled_cause_no_warning(enabled_rewrite):
    with v1.Session(graph=tf.Graph()), v1.Session(graph=tf.Graph(), config=v1.ConfigProto()):
        disable_mixed_precision_graph_rewrite()
        with warnings.catch_warnings():
            warnings.simplefilter("error", UserWarning)
            enable_mixed_precision_graph_rewrite(keras.optimizers.SGD())


def test_disabled_without_being_enabled_it_warns():
    with pytest.warns(UserWarning, match="has no effect: the graph rewrite is not enabled"):
        disable_mixed_precision_graph_rewrite()


@needs_pass
def test_disabled_once_it_does_not_warn_but_twice_it_does(enabled_rewrite):
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        disable_mixed_precision_graph_rewrite()
    with pytest.warns(UserWarning, match="was disabled before"):
        disable_mixed_precision_graph_rewrite()


@pytest.mark.parametrize("precision", [None, "FLOAT16"])
def test_where_there_is_a_gpu_it_is_fp16_and_sessions_follow(monkeypatch, precision):
    gpu = SimpleNamespace(name="/physical_device:GPU:0", device_type="GPU")
    monkeypatch.setattr(tf.config, "list_physical_devices", lambda kind=None: [gpu])
    enable_mixed_precision_graph_rewrite(keras.optimizers.SGD(), precision=precision)
    assert tf.config.optimizer.get_experimental_options()[FP16]
    config = config_with("disable_meta_optimizer", False)
    with v1.Session(graph=tf.Graph(), config=config) as session:
        rewrites = session._config.graph_options.rewrite_options
        assert rewrites.auto_mixed_precision == RewriterConfig.ON
    disable_mixed_precision_graph_rewrite()
    with v1.Session(graph=tf.Graph(), config=config) as session:
        assert session._config == config


@needs_pass
def test_sessions_follow_it_unless_their_config_forbids_it(enabled_rewrite):
    low, casts = convolved()
    assert casts
    for config in (v1.ConfigProto(), config_with("remapping", RewriterConfig.OFF)):
        original = config.SerializeToString()
        values, count = convolved(config)
        assert count == casts
        assert config.SerializeToString() == original
        np.testing.assert_array_equal(values, low)
    plain, none = convolved(config_with(BF16, RewriterConfig.OFF))
    assert none == 0
    disable_mixed_precision_graph_rewrite()
    for config in (None, v1.ConfigProto()):
        values, none = convolved(config)
        assert none == 0
        np.testing.assert_array_equal(values, plain)
    assert 0 < np.abs(low - plain).max() < 0.05


@needs_pass
def test_a_session_that_somebody_else_has_wrapped_stays_wrapped(enabled_rewrite, monkeypatch):
    sessions = []
    within = graph_rewrite_checks.BaseSession.__init__

    def counted(self, *args, **options):
        sessions.append(self)
        within(self, *args, **options)

    monkeypatch.setattr(graph_rewrite_checks.BaseSession, "__init__", counted)
    disable_mixed_precision_graph_rewrite()
    assert convolved(v1.ConfigProto())[1] == 0
    assert len(sessions) == 1


@needs_pass
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # TensorFlow's own
def test_a_wrong_config_is_refused_as_before(enabled_rewrite):
    with pytest.raises(TypeError, match="must be a tf.ConfigProto"):
        v1.Session(graph=tf.Graph(), config="fast")


@needs_pass
def test_an_edit_that_does_not_fit_leaves_what_was_enabled(enabled_rewrite):
    moved = AutoMixedPrecisionOptions(denylist_add="MatMul")
    with pytest.raises(NeuralMPError, match="remove the type from that list"):
        enable_mixed_precision_graph_rewrite(keras.optimizers.SGD(), amp=moved)
    assert rewrite_is_enabled()
    assert convolved(v1.ConfigProto())[1]
