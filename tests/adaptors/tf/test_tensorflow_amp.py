import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import layers, ops

from neural_mp import MixedPrecision
from neural_mp.adaptors.tensorflow.adaptor import TensorFlowAdaptor
from neural_mp.amp import AmpList, build_canonical_lists
from neural_mp.core.precision import Precision
from neural_mp.testing import AmpContract

pytestmark = pytest.mark.slow


@pytest.mark.usefixtures("quick_runs")
class TestAmp(AmpContract):
    average, softmax = "AvgPool", "Softmax"
    shape = (8, 8, 1)
    outputs = ("identity",)

    @pytest.fixture(scope="class")
    @classmethod
    def net(cls):
        keras.utils.set_random_seed(0)
        image = keras.Input(cls.shape, name="image")
        features = layers.AveragePooling2D(2)(image)
        features = layers.Conv2D(8, 3, padding="same", use_bias=False, activation="relu")(features)
        logits = layers.Dense(10, use_bias=False)(layers.Reshape((128,))(features))
        share = ops.softmax(logits + ops.negative(ops.exp(logits)))
        spread = ops.tanh(ops.mean(features, axis=(1, 2)))
        return keras.Model(image, ops.concatenate([share, spread], axis=1))


@pytest.mark.parametrize("precision", [Precision.BF16, Precision.FP16])
def test_the_lists_of_all_frameworks_say_nothing_else_than_tensorflow_itself(precision):
    """Where TensorFlow has a word on an op, it is that of our own table."""
    adaptor = TensorFlowAdaptor()
    own = adaptor.amp_lists(precision)
    ours = build_canonical_lists(precision).translated(adaptor.op_kinds)
    compared = 0
    for name in AmpList:
        for op_type in own.types(name) & {t for types in adaptor.op_kinds.values() for t in types}:
            assert ours.of(op_type) is name, op_type
            compared += 1
    assert compared > 80


def test_fused_ops_are_known():
    assert {"_FusedConv2D", "_FusedMatMul", "Conv2D"} <= set(TensorFlowAdaptor().op_types())


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_a_mask_of_the_lowest_number_masks_and_no_more(precision, monkeypatch):
    """It would become minus infinity, and a row of these NaN behind a softmax."""
    monkeypatch.setenv("FORCE_BF16", "1")
    monkeypatch.setenv("FORCE_FP16", "1")
    drawn = np.random.default_rng(0)
    weight, data = drawn.random((8, 8), np.float32), drawn.random((4, 8), np.float32)
    mask = np.finfo(np.float32).min * np.array([[0], [1], [0], [1]], np.float32)
    converter = MixedPrecision()
    converter.model = tf.function(
        lambda x: tf.nn.softmax(x @ weight + mask), input_signature=[tf.TensorSpec((4, 8))]
    ).get_concrete_function()
    converter.precisions = precision
    result = converter()
    assert result.plan.counts()[precision] >= 2
    np.testing.assert_allclose(result(data), converter.model(data), atol=0.02)


def test_outputs_that_are_further_results_of_an_op(monkeypatch):
    monkeypatch.setenv("FORCE_BF16", "1")
    graph = tf.Graph()
    with graph.as_default():
        fed = tf.compat.v1.placeholder(tf.float32, [4, 8], name="x")
        product = tf.matmul(fed, tf.eye(8), name="product")
        tf.nn.top_k(product, 3, name="top")
        tf.split(product, 2, 1, name="half")
    converter = MixedPrecision()
    converter.model, converter.precisions = graph.as_graph_def(), "bf16"
    converter.inputs, converter.outputs = ["x"], ["top:0", "top:1", "half:1"]
    data = np.arange(32, dtype=np.float32).reshape(4, 8)  # exact in BF16
    largest, indices, half = converter()(data)
    np.testing.assert_array_equal(largest, data[:, :4:-1])
    np.testing.assert_array_equal(indices, [[7, 6, 5]] * 4)
    np.testing.assert_array_equal(half, data[:, 4:])
