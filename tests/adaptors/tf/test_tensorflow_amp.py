import keras
import pytest
from amp_contract import SIXTEEN, AmpContract
from keras import layers, ops

from neural_mp.adaptors.tensorflow.adaptor import TensorFlowAdaptor
from neural_mp.amp import AmpList, canonical_lists


class TestAmp(AmpContract):
    average, softmax = "AvgPool", "Softmax"
    shape = (8, 8, 1)
    outputs = ("identity",)

    @pytest.fixture
    def net(self):
        image = keras.Input(self.shape, name="image")
        found = layers.AveragePooling2D(2)(image)
        found = layers.Conv2D(8, 3, padding="same", use_bias=False, activation="relu")(found)
        logits = layers.Dense(10, use_bias=False)(layers.Reshape((128,))(found))
        share = ops.softmax(logits + ops.negative(ops.exp(logits)))
        spread = ops.tanh(ops.mean(found, axis=(1, 2)))
        return keras.Model(image, ops.concatenate([share, spread], axis=1))


@pytest.mark.parametrize("precision", SIXTEEN)
def test_the_lists_of_all_frameworks_say_nothing_else_than_tensorflow_itself(precision):
    """Where TensorFlow has a word on an op, it is that of our own table."""
    adaptor = TensorFlowAdaptor()
    own = adaptor.amp_lists(precision)
    ours = canonical_lists(precision).translated(adaptor.kinds())
    compared = 0
    for name in AmpList:
        for op_type in own.types(name) & {t for types in adaptor.kinds().values() for t in types}:
            assert ours.of(op_type) is name, op_type
            compared += 1
    assert compared > 80


def test_fused_ops_are_known():
    assert {"_FusedConv2D", "_FusedMatMul", "Conv2D"} <= set(TensorFlowAdaptor().op_types())
