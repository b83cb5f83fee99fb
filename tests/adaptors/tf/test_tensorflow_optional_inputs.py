"""Inputs with defaults stay optional: in the data, in results, and in saved models."""

import numpy as np
import pytest
import tensorflow as tf

import neural_mp
from neural_mp import ExitPolicy, MixedPrecision
from neural_mp.adaptors.loaded_model import LoadedModel
from neural_mp.adaptors.tensorflow.adaptor import TensorFlowAdaptor
from neural_mp.adaptors.transfer import transfer_model
from neural_mp.errors import DataError

v1 = tf.compat.v1
RNG = np.random.default_rng(0)
FIRST, SECOND = (RNG.normal(size=size).astype(np.float32) for size in ((8, 16), (16, 3)))
ROWS = RNG.normal(size=(8, 8)).astype(np.float32)
ONE, HALF = tf.constant(1.0), np.float32(0.5)


def dropout_net():
    """A net as TensorFlow 1 nets are written, with two inputs that are only set in training."""
    rows = v1.placeholder(tf.float32, [None, 8], "rows")
    trains = v1.placeholder_with_default(False, [], "trains")
    keep = v1.placeholder_with_default(tf.constant(2.0) / 2, [], "keep")
    hidden = tf.nn.relu(tf.matmul(rows, FIRST))
    hidden = v1.cond(trains, lambda: hidden * 2.0, lambda: hidden) * keep
    result = tf.identity(tf.matmul(hidden, SECOND), name="result")
    return {"rows": rows, "trains": trains, "keep": keep}, {"result": result}


def as_graph(folder):
    with tf.Graph().as_default() as graph:
        dropout_net()
    return graph.as_graph_def()


def as_saved_model(folder):
    with tf.Graph().as_default(), v1.Session() as session:
        v1.saved_model.simple_save(session, str(folder / "source"), *dropout_net())
    return folder / "source"


def as_function_with_defaults(folder):
    """A SavedModel of TensorFlow 2, whose signature declares a default."""
    module = tf.Module()

    @tf.function(input_signature=[tf.TensorSpec([None, 8], name="rows")])
    def run(rows, keep=ONE):
        return {"result": tf.matmul(tf.nn.relu(tf.matmul(rows, FIRST)) * keep, SECOND)}

    tf.saved_model.save(module, str(folder / "source"), signatures=run)
    return folder / "source"


def reference(keep=1.0):
    return np.maximum(ROWS @ FIRST, 0) * keep @ SECOND


def assert_close(actual, expected):
    noise = np.linalg.norm(np.asarray(actual) - expected)
    assert 20 * np.log10(np.linalg.norm(expected) / noise) > 25


@pytest.mark.slow
@pytest.mark.parametrize("source", [as_graph, as_saved_model, as_function_with_defaults])
def test_an_input_with_a_default_may_be_left_out_everywhere(tmp_path, source):
    result = MixedPrecision(
        model=source(tmp_path),
        precisions="int8",
        calib_dataloader=[ROWS],
        exit_policy=ExitPolicy(performance_only=True),
        workspace=tmp_path / "workspace",
    )()
    assert result.plan.counts() == {"int8": 2}
    folder, file = tmp_path / "saved", tmp_path / "saved.pb"
    result.save(folder)
    result.save(file)
    for run in (result, result.model, neural_mp.load(folder)):
        assert_close(run(ROWS), reference())
        assert_close(run({"rows": ROWS}), reference())
        assert_close(run({"rows": ROWS, "keep": HALF}), reference(HALF))
    many = np.concatenate([ROWS] * 5)
    assert_close(result.model.predict(many), np.concatenate([reference()] * 5))
    with tf.Graph().as_default(), v1.Session() as session:
        stored = v1.saved_model.loader.load(session, ["serve"], str(folder))
        served = stored.signature_def["serving_default"]
        fetched = served.outputs["result"].name
        assert_close(session.run(fetched, {served.inputs["rows"].name: ROWS}), reference())
        assert tf.make_ndarray(served.defaults["keep"]) == 1
        assert "rows" not in served.defaults
    graph = v1.GraphDef.FromString(file.read_bytes())
    with tf.Graph().as_default(), v1.Session() as session:
        tf.import_graph_def(graph, name="")
        assert_close(session.run(fetched, {served.inputs["rows"].name: ROWS}), reference())


def test_an_input_that_the_options_leave_out_is_a_constant(tmp_path):
    adaptor = TensorFlowAdaptor()
    model = adaptor.load(as_graph(tmp_path), inputs="rows")
    assert [port.name for port in model.signature.inputs] == ["rows"]
    assert {node.op for node in model.graph.nodes.values()} <= {
        "Placeholder",
        "Const",
        "MatMul",
        "Relu",
        "Identity",
        "BiasAdd",
        "Mul",
    }
    np.testing.assert_allclose(adaptor.predict(model, ROWS), reference(), rtol=1e-4, atol=1e-4)


def test_an_input_whose_default_is_computed_is_left_out_with_a_warning():
    with tf.Graph().as_default() as graph:
        rows = v1.placeholder(tf.float32, [None, 8], "rows")
        state = v1.placeholder_with_default(tf.zeros_like(rows), [None, 8], "state")
        tf.identity(tf.matmul(rows + state, FIRST), name="result")
    adaptor = TensorFlowAdaptor()
    model = adaptor.load(graph, example=ROWS)
    assert [port.name for port in model.signature.inputs] == ["rows"]
    (warning,) = model.warnings
    assert "'state' is left out, because the graph computes its default" in warning
    np.testing.assert_allclose(adaptor.predict(model, ROWS), ROWS @ FIRST, rtol=1e-4, atol=1e-4)
    batch = {"rows": ROWS, "state": ROWS}
    for named in ({"example": batch}, {"inputs": "rows, state"}):
        model = adaptor.load(graph, **named)
        assert [port.name for port in model.signature.inputs] == ["rows", "state"]
        outputs = adaptor.predict(model, batch)
        np.testing.assert_allclose(outputs, 2 * ROWS @ FIRST, rtol=1e-4, atol=1e-4)


@pytest.mark.slow
def test_an_input_with_a_default_stays_optional_in_another_runtime():
    with tf.Graph().as_default() as graph:
        rows = v1.placeholder(tf.float32, [None, 8], "rows")
        keep = v1.placeholder_with_default(1.0, [], "keep")
        tf.identity(tf.matmul(tf.nn.relu(tf.matmul(rows, FIRST)) * keep, SECOND), name="result")
    adaptor = TensorFlowAdaptor()
    source = LoadedModel(adaptor, adaptor.load(graph, example=ROWS))
    model = transfer_model(source, "openvino")
    np.testing.assert_allclose(model(ROWS), reference(), rtol=1e-3, atol=1e-3)
    outputs = model({"rows": ROWS, "keep": HALF})
    np.testing.assert_allclose(outputs, reference(HALF), rtol=1e-3, atol=1e-3)


def test_an_error_about_a_missing_input_names_the_option():
    with tf.Graph().as_default() as graph:
        rows = v1.placeholder(tf.float32, [None, 8], "rows")
        keep = v1.placeholder(tf.float32, [], "keep")
        tf.identity(tf.matmul(rows * keep, FIRST), name="result")
    with pytest.raises(DataError, match="must hold 2 inputs .* got 1; .*inputs="):
        TensorFlowAdaptor().load(graph, example=ROWS)
