"""Broken and odd models: a clear error, or FP32 where nothing else is right."""

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import Input, Model, layers
from tensorflow.python.framework.convert_to_constants import convert_variables_to_constants_v2

from neural_mp import MixedPrecision
from neural_mp.adaptors.tensorflow.adaptor import TensorFlowAdaptor
from neural_mp.core.precision import Precision
from neural_mp.errors import DataError, ModelLoadError, NeuralMPError
from neural_mp.testing import signal_to_noise, uniform

pytestmark = pytest.mark.slow

BF16, INT8 = Precision.BF16, Precision.INT8


def frozen(function, *specs, **options):
    concrete = tf.function(function).get_concrete_function(*specs)
    return convert_variables_to_constants_v2(concrete, **options).graph.as_graph_def()


@pytest.fixture
def adaptor():
    return TensorFlowAdaptor()


@pytest.fixture
def graph(net):
    return frozen(lambda x: net(x, training=False), tf.TensorSpec([None, 8, 8, 1], name="x"))


@pytest.mark.parametrize("share", [0.1, 0.5, 0.9, 0.999])
def test_a_graph_that_was_cut_off(adaptor, graph, tmp_path, share):
    data = graph.SerializeToString()
    (tmp_path / "net.pb").write_bytes(data[: int(len(data) * share)])
    with pytest.raises(ModelLoadError, match="not a graph file, or damaged"):
        adaptor.load(tmp_path / "net.pb")


def test_a_graph_cut_between_two_nodes(adaptor, graph, tmp_path):
    """What is left parses: it lacks what it reads, or at least the version behind the nodes."""
    part = tf.compat.v1.GraphDef()
    part.node.extend(list(graph.node)[:-3])
    (tmp_path / "net.pb").write_bytes(part.SerializeToString())
    assert any("cut off" in text for text in adaptor.load(tmp_path / "net.pb").warnings)
    del part.node[:4]
    (tmp_path / "net.pb").write_bytes(part.SerializeToString())
    with pytest.raises(ModelLoadError, match="the installed TensorFlow cannot run"):
        adaptor.load(tmp_path / "net.pb")


@pytest.mark.parametrize("damage", ["cut", "garbage", "empty"])
def test_a_damaged_saved_model(adaptor, net, tmp_path, damage):
    net.export(tmp_path / "net", verbose=False)
    file = tmp_path / "net" / "saved_model.pb"
    data = file.read_bytes()
    file.write_bytes({"cut": data[: len(data) // 2], "garbage": b"\x08" * 99, "empty": b""}[damage])
    with pytest.raises(
        ModelLoadError, match=r"SavedModel '.*net' (cannot be read|must have a signature)"
    ):
        adaptor.load(tmp_path / "net")


def test_a_saved_model_without_weights(adaptor, net, tmp_path):
    net.export(tmp_path / "net", verbose=False)
    for file in (tmp_path / "net" / "variables").iterdir():
        file.unlink()
    with pytest.raises(ModelLoadError, match="cannot be read"):
        adaptor.load(tmp_path / "net")


def test_a_saved_model_without_signature(adaptor, tmp_path):
    tf.saved_model.save(tf.Module(), str(tmp_path))
    with pytest.raises(ModelLoadError, match="must have a signature, got none"):
        adaptor.load(tmp_path)


def test_several_signatures_and_none_by_default(adaptor, tmp_path):
    module = tf.Module()
    specs = [tf.TensorSpec([None], name="x")]
    module.one = tf.function(lambda x: x * 2.0, input_signature=specs)
    module.other = tf.function(lambda x: x * 3.0, input_signature=specs)
    signatures = {"one": module.one, "other": module.other}
    tf.saved_model.save(module, str(tmp_path), signatures=signatures)
    with pytest.raises(ModelLoadError, match="several signatures, but none named"):
        adaptor.load(tmp_path)
    chosen = adaptor.load(tf.saved_model.load(str(tmp_path)).signatures["other"])
    result = adaptor.predict(chosen, np.ones(2, np.float32))
    np.testing.assert_array_equal(next(iter(result.values())), [3, 3])


def test_an_op_nobody_knows(adaptor, graph):
    graph.node[-1].op = "MyOwnOp"
    with pytest.raises(ModelLoadError, match=r"(?s)cannot run.*MyOwnOp"):
        adaptor.load(graph)


def test_variables_that_were_not_frozen(adaptor):
    with tf.Graph().as_default() as graph:
        x = tf.compat.v1.placeholder(tf.float32, [None, 3], name="x")
        weight = tf.compat.v1.get_variable("w", [3, 2], use_resource=True)
        tf.identity(tf.matmul(x, weight), name="y")
    with pytest.raises(ModelLoadError, match="keeps them outside of the graph"):
        adaptor.load(graph)


def test_a_resource_that_is_not_frozen(adaptor):
    queue = tf.queue.FIFOQueue(3, [tf.float32], [[]])

    @tf.function(input_signature=[tf.TensorSpec([None], name="x")])
    def run(x):
        return x + queue.dequeue()

    with pytest.raises(ModelLoadError, match="queue or other resource"):
        adaptor.load(run)


def test_string_inputs_stay_as_they_are(adaptor, all_machine):
    weight = np.random.default_rng(0).standard_normal((4, 8)).astype(np.float32)

    @tf.function(input_signature=[tf.TensorSpec([None], tf.string, name="rows")])
    def run(rows):
        numbers = tf.strings.to_number(tf.strings.split(rows, ",").to_tensor())
        return tf.matmul(tf.reshape(numbers, [-1, 4]), weight)

    rows = np.array([b"1,2,3,4", b"5,6,7,8.5"], object)
    model = adaptor.load(run, example=rows)
    space = adaptor.space(model, all_machine)
    assert all(
        space.capabilities[op.name].configs == space.capabilities[op.name].configs[-1:]
        for op in space.graph
        if "String" in op.type
    )
    converted = adaptor.convert(
        model, space.resolve(uniform(space, INT8)), adaptor.observe(model, [rows], space), space
    )
    assert signal_to_noise(run(rows).numpy(), adaptor.predict(converted, rows)) > 30


def looping(x, weight):
    """A loop of two products around a condition."""
    state = x
    for _ in tf.range(3):
        state = tf.tanh(tf.matmul(state, weight))
    if tf.reduce_sum(state) > 0:
        state = tf.nn.relu(tf.matmul(state, weight))
    return tf.matmul(state, weight)


@pytest.mark.parametrize("lowered", [False, True])
def test_control_flow_is_converted_in_either_form(adaptor, all_machine, lowered):
    """As functions (While, If), and as dataflow (Enter, Switch, Merge, NextIteration)."""
    draw = np.random.default_rng(0)
    weight = draw.standard_normal((6, 6)).astype(np.float32)
    data = draw.standard_normal((5, 6)).astype(np.float32)
    whole = tf.function(lambda x: looping(x, weight))
    graph = frozen(
        lambda x: looping(x, weight), tf.TensorSpec([None, 6], name="x"), lower_control_flow=lowered
    )
    model = adaptor.load(graph, outputs="Identity")
    assert {"Merge", "NextIteration"} <= {op.type for op in adaptor.graph(model)}
    expected = whole(data).numpy()
    np.testing.assert_allclose(adaptor.predict(model, data), expected, atol=1e-5)
    space = adaptor.space(model, all_machine)
    assert sum(space.graph[op].type == "MatMul" for op in space.tunable_ops) == 3
    observations = adaptor.observe(model, [data, -data], space)
    for precision in (INT8, BF16):
        converted = adaptor.convert(
            model, space.resolve(uniform(space, precision)), observations, space
        )
        for values in (data, -data):
            reference = whole(values).numpy()
            assert signal_to_noise(reference, adaptor.predict(converted, values)) > 20


def test_sizes_that_are_known_late(adaptor, all_machine):
    """Height, width and batch open; a residual sum of which no size is known stays right."""
    x = inputs = Input((None, None, 3))
    x = layers.Conv2D(8, 3, padding="same", activation="relu")(x)
    y = layers.Conv2D(8, 3, padding="same")(x)
    pooled = layers.GlobalAveragePooling2D(keepdims=True)(x)
    x = layers.ReLU()(y + x)
    net = Model(inputs, layers.Conv2D(4, 3)(x + pooled))
    data = np.random.default_rng(0).standard_normal((2, 14, 11, 3)).astype(np.float32)
    model = adaptor.load(net)
    space = adaptor.space(model, all_machine)
    observations = adaptor.observe(model, [data], space)
    for precision, decibels in ((INT8, 20), (BF16, 30)):
        converted = adaptor.convert(
            model, space.resolve(uniform(space, precision)), observations, space
        )
        for shape in ((1, 14, 11, 3), (3, 9, 20, 3)):
            values = np.random.default_rng(1).standard_normal(shape).astype(np.float32)
            reference = np.asarray(net(values))
            assert signal_to_noise(reference, adaptor.predict(converted, values)) > decibels


def test_a_model_of_one_op_that_nothing_can_be_done_with(adaptor, all_machine):
    model = adaptor.load(tf.function(tf.exp, input_signature=[tf.TensorSpec([None], name="x")]))
    space = adaptor.space(model, all_machine)
    assert not space.tunable_ops
    values = np.array([0.0, 1.0], np.float32)
    np.testing.assert_allclose(adaptor.predict(model, values), np.exp(values), rtol=1e-6)


def test_weights_that_are_not_numbers_are_not_quantized(adaptor, all_machine):
    inputs = Input((4,))
    net = Model(inputs, layers.Dense(3)(inputs))
    net.layers[-1].set_weights([np.full((4, 3), np.nan, np.float32), np.zeros(3, np.float32)])
    space = adaptor.space(adaptor.load(net), all_machine)
    (product,) = [op.name for op in space.graph if op.type == "MatMul"]
    assert "NaN or Inf" in space.capabilities[product].reasons[INT8]


def test_integer_and_double_models_keep_their_types(adaptor, all_machine):
    weight = np.arange(12, dtype=np.float64).reshape(4, 3)
    run = tf.function(
        lambda x: tf.matmul(x, weight), input_signature=[tf.TensorSpec([None, 4], tf.float64)]
    )
    model = adaptor.load(run)
    assert not adaptor.space(model, all_machine).tunable_ops
    values = np.random.default_rng(0).random((2, 4))
    np.testing.assert_array_equal(adaptor.predict(model, values), run(values).numpy())


@pytest.mark.parametrize("batches", [[], iter(())])
def test_no_calibration_data(net, batches):
    converter = MixedPrecision()
    converter.model = net
    converter.precisions = "int8"
    converter.calib_dataloader = batches
    with pytest.raises(DataError):
        converter()


def test_calibration_data_of_another_shape(net):
    converter = MixedPrecision()
    converter.model = net
    converter.precisions = "int8"
    converter.calib_dataloader = [np.zeros((2, 1, 8, 8), np.float32)]
    with pytest.raises(DataError, match=r"shape \[2, 1, 8, 8\] for the input image"):
        converter()


def test_keras_on_another_backend_is_named(adaptor, net, tmp_path, monkeypatch):
    net.save(tmp_path / "net.keras")
    monkeypatch.setattr(keras.config, "backend", lambda: "torch")
    with pytest.raises(ModelLoadError, match="KERAS_BACKEND=tensorflow"):
        adaptor.load(tmp_path / "net.keras")


def test_weights_alone_are_no_model(adaptor, net, tmp_path):
    net.save_weights(tmp_path / "net.weights.h5")
    with pytest.raises(NeuralMPError, match="cannot be read as a Keras model"):
        adaptor.load(tmp_path / "net.weights.h5")


def without_shape(build):
    """A frozen graph whose input says nothing of its shape."""
    graph = tf.Graph()
    with graph.as_default():
        build(tf.compat.v1.placeholder(tf.float32, name="image"))
    return graph.as_graph_def()


def weight(*sizes):
    return tf.constant(np.random.default_rng(0).normal(size=sizes), tf.float32)


TOLD = {
    "convolution": (lambda x: tf.nn.conv2d(x, weight(3, 3, 3, 4), 1, "SAME"), [1, 1, 1, 3]),
    "depthwise": (
        lambda x: tf.nn.depthwise_conv2d(tf.nn.relu(x), weight(3, 3, 5, 1), [1] * 4, "SAME"),
        [1, 1, 1, 5],
    ),
    "product": (lambda x: tf.raw_ops.MatMul(a=tf.identity(x), b=weight(6, 2)), [1, 6]),
    "scalar": (lambda x: x * weight(7), []),
}


@pytest.mark.parametrize("told", TOLD)
def test_an_input_without_a_shape_has_that_which_a_layer_asks_for(adaptor, told):
    build, sizes = TOLD[told]
    model = adaptor.load(without_shape(build))
    (example,) = adaptor.example_inputs(model)
    assert list(example.shape) == sizes
    assert np.isfinite(adaptor.predict(model, example)).all()


def test_data_of_another_rank_than_a_layer_asks_for_are_refused(adaptor):
    model = adaptor.load(without_shape(TOLD["convolution"][0]))
    with pytest.raises(DataError, match=r"shape \[8\] for the input image: float32\[\?, \?"):
        adaptor.predict(model, np.zeros(8, np.float32))


def test_a_convolution_in_groups_takes_more_channels_than_its_weight_has(adaptor):
    graph = without_shape(lambda x: tf.nn.conv2d(x, weight(3, 3, 2, 4), 1, "SAME"))
    images = np.ones((2, 5, 5, 4), np.float32)
    model = adaptor.load(graph, inputs=images)
    assert adaptor.predict(model, images).shape == (2, 5, 5, 4)


def test_an_input_of_which_nothing_is_known_has_to_be_shown(adaptor, tmp_path):
    def build(x):
        padded = tf.pad(x, [[0, 0], [1, 1], [1, 1], [0, 0]])
        tf.nn.conv2d(padded, weight(3, 3, 3, 4), 1, "VALID")

    graph = without_shape(build)
    (tmp_path / "net.pb").write_bytes(graph.SerializeToString())
    with pytest.raises(DataError, match=r"shape of input 'image' must.*--input-shape 1,224,224,3"):
        adaptor.load(tmp_path / "net.pb")
    images = np.ones((2, 6, 6, 3), np.float32)
    model = adaptor.load(tmp_path / "net.pb", inputs=images)
    assert adaptor.predict(model, images).shape == (2, 6, 6, 4)


def test_a_graph_without_shapes_is_converted_without_data(monkeypatch):
    monkeypatch.setenv("FORCE_BF16", "1")
    converter = MixedPrecision()
    converter.model = without_shape(TOLD["convolution"][0])
    converter.precisions = "bf16"
    result = converter()
    assert result.plan.counts()["bf16"] >= 1
    assert result(np.ones((2, 5, 5, 3), np.float32)).shape == (2, 5, 5, 4)
