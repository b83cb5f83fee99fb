"""Every form a TensorFlow model comes in computes what it did, and keeps its names and types."""

import numpy as np
import pytest
import tensorflow as tf
from google.protobuf import text_format
from keras import Input, Model, layers
from tensorflow.python.framework.convert_to_constants import convert_variables_to_constants_v2

from neural_mp.adaptors.registry import adaptor_for
from neural_mp.adaptors.tensorflow.adaptor import TensorFlowAdaptor
from neural_mp.errors import CaptureError, ConfigurationError, DataError, ModelLoadError


def traced(net):
    function = tf.function(lambda image: net(image, training=False))
    return function.get_concrete_function(tf.TensorSpec([None, 8, 8, 1], name="image"))


def frozen(net):
    return convert_variables_to_constants_v2(traced(net)).graph.as_graph_def()


def as_saved_model(net, folder):
    net.export(folder / "exported", verbose=False)
    return str(folder / "exported")


def as_keras_file(net, folder):
    net.save(folder / "net.keras")
    return folder / "net.keras"


def as_h5(net, folder):
    net.save(folder / "net.h5")
    return folder / "net.h5"


def as_pb(net, folder):
    (folder / "net.pb").write_bytes(frozen(net).SerializeToString())
    return folder / "net.pb"


def as_pbtxt(net, folder):
    (folder / "net.pbtxt").write_text(text_format.MessageToString(frozen(net)))
    return folder / "net.pbtxt"


def as_graph(net, folder):
    weights_within, graph = frozen(net), tf.Graph()
    with graph.as_default():
        tf.graph_util.import_graph_def(weights_within, name="")
    return graph


def as_tf_function(net, folder):
    return tf.function(
        lambda image: net(image, training=False),
        input_signature=[tf.TensorSpec([None, 8, 8, 1], name="image")],
    )


FORMS = {
    "saved model": as_saved_model,
    "saved_model.pb": lambda net, folder: as_saved_model(net, folder) + "/saved_model.pb",
    "loaded saved model": lambda net, folder: tf.saved_model.load(as_saved_model(net, folder)),
    "keras file": as_keras_file,
    "h5": as_h5,
    "pb": as_pb,
    "pbtxt": as_pbtxt,
    "graph": as_graph,
    "graph def": lambda net, folder: frozen(net),
    "concrete function": lambda net, folder: traced(net),
    "tf.function": as_tf_function,
    "keras": lambda net, folder: net,
}


@pytest.mark.slow
@pytest.mark.parametrize("form", FORMS)
def test_every_form_of_a_model_computes_the_same(form, net, digits, tmp_path):
    images = digits[1].images[:40]
    source = FORMS[form](net, tmp_path)
    adaptor = adaptor_for(source)
    model = adaptor.load(source)
    assert adaptor.framework == "tensorflow"
    expected = np.asarray(net(images, training=False))
    np.testing.assert_allclose(adaptor.predict(model, images), expected, atol=1e-4)
    assert {op.type for op in adaptor.graph(model)} >= {"Conv2D", "MatMul", "Relu"}
    assert not any(op.type.startswith("FusedBatchNorm") for op in adaptor.graph(model))


def two_ways():
    left, right = Input((4,), name="left"), Input((3,), name="right")
    joined = layers.Concatenate()([layers.Dense(5)(left), right])
    return Model([left, right], [layers.Dense(2, name="a")(joined), layers.Dense(1)(joined)])


class TestSeveralInputsAndOutputs:
    @pytest.fixture
    def net(self):
        return two_ways()

    @pytest.fixture
    def data(self):
        draw = np.random.default_rng(0)
        return draw.random((6, 4), np.float32), draw.random((6, 3), np.float32)

    def test_by_position_and_by_name(self, net, data):
        adaptor = TensorFlowAdaptor()
        model = adaptor.load(net)
        expected = [np.asarray(y) for y in net(list(data))]
        for inputs in (data, list(data), {"right": data[1], "left": data[0]}):
            for output, reference in zip(adaptor.predict(model, inputs), expected, strict=True):
                np.testing.assert_allclose(output, reference, atol=1e-5)

    def test_in_the_order_the_user_names_them(self, net, data):
        adaptor = TensorFlowAdaptor()
        model = adaptor.load(net, inputs=["right", "left"], outputs="output_1")
        outputs = adaptor.predict(model, data[::-1])
        np.testing.assert_allclose(outputs, np.asarray(net(list(data))[1]), atol=1e-5)

    def test_a_saved_model_returns_its_names(self, net, data, tmp_path):
        net.export(tmp_path / "net", verbose=False)
        adaptor = TensorFlowAdaptor()
        outputs = adaptor.predict(adaptor.load(tmp_path / "net", inputs="left, right"), data)
        assert set(outputs) == {"output_0", "output_1"}
        np.testing.assert_allclose(outputs["output_0"], np.asarray(net(list(data))[0]), atol=1e-5)

    def test_inputs_of_a_graph_are_distinguished_from_the_outputs(self, net, data):
        function = tf.function(net).get_concrete_function(
            [tf.TensorSpec([None, 4], name="left"), tf.TensorSpec([None, 3], name="right")]
        )
        graph = convert_variables_to_constants_v2(function).graph.as_graph_def()
        adaptor = TensorFlowAdaptor()
        model = adaptor.load(graph, outputs=["Identity_1:0"])
        names = [port.name for port in model.signature.inputs]
        assert sorted(names) == ["left", "right"]
        outputs = adaptor.predict(model, {"left": data[0], "right": data[1]})
        np.testing.assert_allclose(outputs, np.asarray(net(list(data))[1]), atol=1e-5)

    def test_what_does_not_fit_is_said(self, net, data):
        adaptor = TensorFlowAdaptor()
        model = adaptor.load(net)
        with pytest.raises(DataError, match=r"2 inputs \(left: float32\[\?.*got 1"):
            adaptor.predict(model, data[0])
        with pytest.raises(DataError, match="must hold the input right"):
            adaptor.predict(model, {"left": data[0]})
        with pytest.raises(DataError, match="'rihgt'.*did you mean 'right'"):
            adaptor.predict(model, {"left": data[0], "rihgt": data[1]})
        with pytest.raises(DataError, match=r"shape \[6, 3\] for the input left"):
            adaptor.predict(model, data[::-1])
        with pytest.raises(DataError, match="array of complex128 for the input left"):
            adaptor.predict(model, (data[0].astype(complex), data[1]))
        with pytest.raises(ConfigurationError, match="'right' is missing"):
            adaptor.load(net, inputs=["left"])


@pytest.mark.slow
def test_a_graph_can_be_cut_at_a_tensor(net, digits):
    graph = frozen(net)
    adaptor = TensorFlowAdaptor()
    whole = adaptor.load(graph)
    pooled = next(op.name for op in adaptor.graph(whole) if op.type == "Mean")
    tail = adaptor.load(graph, inputs=[pooled])
    features = np.random.default_rng(0).random((5, 32), np.float32)
    dense = net.get_layer("head")
    np.testing.assert_allclose(
        adaptor.predict(tail, features), np.asarray(dense(features)), atol=1e-5
    )
    assert {op.type for op in adaptor.graph(tail)} == {"MatMul", "BiasAdd", "Identity"}


@pytest.mark.parametrize("option", ["inputs", "outputs"])
def test_names_that_are_not_there_are_answered_with_the_nearest(net, option):
    with pytest.raises(ConfigurationError, match=f"{option} names 'imag'.*did you mean 'image'"):
        TensorFlowAdaptor().load(frozen(net), **{option: ["imag"]})


def test_a_subclassed_model_is_traced_with_the_data(digits):
    class Own(Model):
        def __init__(self):
            super().__init__()
            self.conv, self.dense = layers.Conv2D(4, 3, activation="relu"), layers.Dense(10)

        def call(self, x):
            return {"logits": self.dense(layers.Flatten()(self.conv(x)))}

    net, images = Own(), digits[1].images[:7]
    adaptor = TensorFlowAdaptor()
    with pytest.raises(CaptureError, match="Own declares no inputs; pass data"):
        adaptor.load(net)
    model = adaptor.load(net, example=images[:2])
    expected = np.asarray(net(images)["logits"])
    np.testing.assert_allclose(adaptor.predict(model, images)["logits"], expected, atol=1e-5)


def test_the_users_model_is_left_alone(net, digits):
    original = [weight.copy() for weight in net.get_weights()]
    trainable = net.trainable
    adaptor = TensorFlowAdaptor()
    model = adaptor.load(net)
    assert adaptor.native(model) is net
    assert net.trainable is trainable
    assert all(np.array_equal(a, b) for a, b in zip(original, net.get_weights(), strict=True))


def test_floats_of_numpy_and_tensors_are_taken(net, digits):
    adaptor = TensorFlowAdaptor()
    model, images = adaptor.load(net), digits[1].images[:5]
    expected = adaptor.predict(model, images)
    np.testing.assert_array_equal(adaptor.predict(model, images.astype(np.float64)), expected)
    outputs = adaptor.predict(model, tf.constant(images))
    assert tf.is_tensor(outputs)
    np.testing.assert_array_equal(outputs.numpy(), expected)


def test_a_signature_of_another_name_is_found_if_it_is_the_only_one(tmp_path):
    module = tf.Module()
    module.run = tf.function(lambda x: x * 2.0, input_signature=[tf.TensorSpec([None], name="x")])
    tf.saved_model.save(module, str(tmp_path), signatures={"double": module.run})
    adaptor = TensorFlowAdaptor()
    model = adaptor.load(tmp_path)
    assert model.signature.keys == ("double",)
    np.testing.assert_array_equal(adaptor.predict(model, np.ones(3, np.float32)), [2, 2, 2])


def test_models_that_are_no_models_are_refused(tmp_path):
    adaptor = TensorFlowAdaptor()
    with pytest.raises(ModelLoadError, match="there is no model file or folder"):
        adaptor.load(tmp_path / "missing.pb")
    with pytest.raises(ModelLoadError, match="holds no saved_model.pb"):
        adaptor.load(tmp_path)
