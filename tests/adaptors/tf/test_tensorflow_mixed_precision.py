"""The object a user drives, as the README shows it, on TensorFlow models in three forms."""

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras_nets import ChannelsLast, hostile
from tensorflow.python.framework.convert_to_constants import convert_variables_to_constants_v2

from neural_mp import MixedPrecision
from neural_mp.testing import ApiContract, ModelFormContract

pytestmark = pytest.mark.slow


def as_pb(net, folder):
    function = tf.function(lambda image: net(image, training=False))
    concrete = function.get_concrete_function(tf.TensorSpec([None, 8, 8, 1], name="image"))
    graph = convert_variables_to_constants_v2(concrete).graph.as_graph_def()
    (folder / "net.pb").write_bytes(graph.SerializeToString())
    return str(folder / "net.pb")


def as_saved_model(net, folder):
    net.export(folder / "net", verbose=False)
    return str(folder / "net")


class OnTensorFlow(ChannelsLast):
    framework = "tensorflow"
    native = tf.Module
    convolution = "Conv2D"

    @pytest.fixture
    def reference(self, net, digits):
        return np.asarray(net(digits[1].images, training=False))


@pytest.mark.usefixtures("quick_runs")
class TestFace(OnTensorFlow, ApiContract):
    @pytest.fixture
    def model(self, net):
        return net

    @pytest.fixture
    def hostile_net(self, deep):
        return hostile(deep)


@pytest.mark.usefixtures("quick_runs")
class TestFiles(OnTensorFlow, ModelFormContract):
    @pytest.fixture(scope="class", params=[as_saved_model, as_pb])
    @classmethod
    def model(cls, request, net, tmp_path_factory):
        return request.param(net, tmp_path_factory.mktemp("files"))


def test_the_hostile_net_computes_the_same(hostile_net, deep, digits):
    images = digits[1].images
    np.testing.assert_allclose(
        np.asarray(hostile_net(images)), np.asarray(deep(images)), rtol=1e-2, atol=2e-2
    )


def test_a_tf_dataset_and_an_evaluation_function(net, digits, plain_machine):
    train, test = digits
    dataset = tf.data.Dataset.from_tensor_slices((train.images, train.labels)).batch(64)
    kinds = []

    def evaluate(model) -> float:
        kinds.append(type(model))
        return float((np.asarray(model(test.images)).argmax(1) == test.labels).mean())

    converter = MixedPrecision()
    converter.hardware = plain_machine
    converter.calib_dataloader = dataset
    converter.eval_func = evaluate
    converter.objective = "modelsize"  # latencies this short are the machine's mood
    converter.model = net
    result = converter()
    assert result.met
    assert issubclass(kinds[0], keras.Model)
    assert issubclass(kinds[1], tf.Module)
    assert set(result.report.op_counts["Conv2D"]) == {"int8"}
