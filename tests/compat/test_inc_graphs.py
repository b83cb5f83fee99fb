"""Names of ports, and functions on graphs, in scripts of Intel Neural Compressor."""

import logging

import numpy as np
import pytest
from onnx_nets import as_onnx

from neural_mp.compat.inc import PostTrainingQuantConfig, benchmark, quantization
from neural_mp.compat.inc.experimental import Quantization, common

tf = pytest.importorskip("tensorflow")

pytestmark = pytest.mark.slow
SAMPLES = np.random.default_rng(1).normal(size=(8, 16)).astype(np.float32)


@pytest.fixture(scope="module")
def graph():
    weight = np.random.default_rng(0).normal(size=(16, 10)).astype(np.float32)
    with tf.Graph().as_default() as tf_graph:
        x = tf.compat.v1.placeholder(tf.float32, (None, 16), "x")
        tf.identity(tf.matmul(x, weight), "scores")
    return tf_graph


@pytest.fixture
def file(graph, tmp_path):
    path = tmp_path / "net.pb"
    path.write_bytes(graph.as_graph_def().SerializeToString())
    return str(path)


@pytest.fixture
def loader():
    return common.DataLoader([(sample, 1) for sample in SAMPLES], batch_size=4)


@pytest.mark.parametrize("output", ["scores", "softmax_tensor"])
def test_names_that_a_graph_file_lacks_are_ignored_in_version_2(file, loader, output, caplog):
    result = quantization.fit(
        file,
        PostTrainingQuantConfig(inputs=["x"], outputs=[output]),
        calib_dataloader=loader,
    )
    assert result(SAMPLES[:2]).shape == (2, 10)
    assert ("no such tensor" in caplog.text) == (output != "scores")


def test_names_that_an_onnx_model_lacks_leave_all_its_outputs(net, digits, tmp_path, caplog):
    """INC reads no names for ONNX models, so its files contain names of other exports."""
    (tmp_path / "conf.yaml").write_text(
        "version: 1.0\nmodel: {framework: onnxrt_qlinearops, inputs: image, outputs: other}\n"
        "quantization: {calibration: {sampling_size: 8}}\n"
    )
    quantizer = Quantization(str(tmp_path / "conf.yaml"))
    quantizer.model = as_onnx(net)
    quantizer.calib_dataloader = digits[1].loader()
    with caplog.at_level(logging.WARNING):
        result = quantizer.fit()
    assert result.optimized(digits[1].images[:3]).shape == (3, 10)
    assert "output 'other' is ignored: the model has no such tensor" in caplog.text


def scores_of(graph):
    """Run a graph as scripts of TensorFlow 1 do."""
    with tf.compat.v1.Session(graph=graph) as session:
        tensors = [graph.get_tensor_by_name(name) for name in ("x:0", "scores:0")]
        return session.run(tensors[1], {tensors[0]: SAMPLES})


@pytest.mark.parametrize("form", ["file", "graph"])
def test_a_function_gets_the_graph_of_every_plan(file, graph, loader, form):
    """As in INC, where sessions are made of this graph."""
    expected = scores_of(graph).argmax(1)
    outputs = []

    def evaluate(model):
        assert isinstance(model, tf.Graph)
        scores = scores_of(model)
        outputs.append(scores)
        return float((scores.argmax(1) == expected).mean())

    quantization.fit(
        file if form == "file" else graph,
        PostTrainingQuantConfig(),
        calib_dataloader=loader,
        eval_func=evaluate,
    )
    np.testing.assert_allclose(outputs[0], scores_of(graph), atol=1e-4)
    assert len(outputs) >= 2


def test_a_function_in_place_of_the_measurement_gets_the_graph_of_a_file(file, graph):
    outputs = benchmark.fit(file, b_func=scores_of)
    np.testing.assert_allclose(outputs, scores_of(graph), atol=1e-4)


def test_loaders_of_question_records_are_loaders_like_any():
    from neural_mp.compat.inc import data

    loader = data.TensorflowModelZooBertDataLoader([(np.zeros(3), 1)] * 4, batch_size=2)
    assert [inputs.shape for inputs, _ in loader] == [(2, 3)] * 2
