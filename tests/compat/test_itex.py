"""Snippets of the guide of Intel Extension for TensorFlow, after one changed import."""

import numpy as np
import pytest
from machine import has_rewrite_pass

import neural_mp.compat.itex as itex
from neural_mp.errors import ConfigurationError, UnsupportedPrecisionError
from neural_mp.training import disable_graph_rewrite

tf = pytest.importorskip("tensorflow")
pytestmark = pytest.mark.skipif(
    not has_rewrite_pass(), reason="TensorFlow's pass for BF16 does nothing on this machine"
)
DRAWN = np.random.default_rng(0)
DATA = DRAWN.random((8, 64), np.float32)
WEIGHT = DRAWN.random((64, 64), np.float32)


@pytest.fixture(autouse=True)
def _off_again():
    yield
    disable_graph_rewrite()


def runs_in_bf16():
    """Whether every result of a function has no more than the 8 significant bits of BF16."""

    @tf.function
    def run(x):
        hidden = tf.nn.relu(tf.matmul(x, WEIGHT) + 1.0)
        return tf.identity(tf.nn.relu(tf.matmul(hidden, WEIGHT)))

    return bool((run(DATA).numpy().view(np.uint32) & 0xFFFF == 0).all())


def test_the_snippet_of_the_guide():
    auto_mixed_precision_options = itex.AutoMixedPrecisionOptions()
    auto_mixed_precision_options.data_type = itex.BFLOAT16

    graph_options = itex.GraphOptions(auto_mixed_precision_options=auto_mixed_precision_options)
    graph_options.auto_mixed_precision = itex.ON

    config = itex.ConfigProto(graph_options=graph_options)
    itex.set_config(config)

    assert itex.get_config() is config
    assert runs_in_bf16()
    itex.set_config()
    assert not runs_in_bf16()


def test_the_older_form_with_a_backend_and_edits_of_the_lists():
    options = itex.AutoMixedPrecisionOptions()
    options.allowlist_remove, options.denylist_add = "MatMul", "MatMul"
    graph_options = itex.GraphOptions(
        auto_mixed_precision=itex.ON, auto_mixed_precision_options=options
    )
    itex.set_backend("cpu", itex.ConfigProto(graph_options=graph_options))
    assert itex.get_backend() == "CPU"
    assert not runs_in_bf16()
    itex.set_backend(
        "CPU", itex.ConfigProto(graph_options=itex.GraphOptions(auto_mixed_precision=itex.ON))
    )
    assert runs_in_bf16()


@pytest.mark.skipif(bool(tf.config.list_physical_devices("GPU")), reason="FP16 runs on a GPU")
def test_float16_without_a_gpu_is_an_error_and_changes_nothing():
    options = itex.AutoMixedPrecisionOptions(data_type=itex.FLOAT16)
    graph_options = itex.GraphOptions(itex.ON, options)
    with pytest.raises(UnsupportedPrecisionError):
        itex.set_config(itex.ConfigProto(graph_options=graph_options))
    assert not runs_in_bf16()


def test_words_that_are_unknown_or_without_effect(caplog):
    with pytest.raises(ConfigurationError, match="did you mean 'auto_mixed_precision'"):
        itex.GraphOptions().auto_mixed_precison = itex.ON
    with pytest.raises(ConfigurationError, match="backend must be one of CPU, GPU, AUTO"):
        itex.set_backend("tpu")
    with pytest.raises(ConfigurationError, match="config must be a ConfigProto"):
        itex.set_config({"auto_mixed_precision": True})
    itex.set_config(itex.ConfigProto(graph_options=itex.GraphOptions(onednn_graph=itex.ON)))
    assert caplog.messages == [
        "graph_options.onednn_graph has no effect: TensorFlow optimizes graphs as ever"
    ]
