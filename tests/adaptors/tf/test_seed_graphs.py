"""Programs of TensorFlow 1 that users start from, word for word: a session, variables, a config."""

import logging
import re

import numpy as np
import pytest
import tensorflow as tf
from google.protobuf import text_format
from machine import has_rewrite_pass
from tensorflow.core.framework.graph_pb2 import GraphDef
from tensorflow.core.protobuf import rewriter_config_pb2

from neural_mp import MixedPrecision

v1 = tf.compat.v1


@pytest.fixture(params=["resource", "reference"])
def variables(request):
    """Both kinds of variable that TensorFlow 1 has."""
    was = v1.resource_variables_enabled()
    (
        v1.enable_resource_variables
        if request.param == "resource"
        else v1.disable_resource_variables
    )()
    yield request.param
    (v1.enable_resource_variables if was else v1.disable_resource_variables)()


def conv2d(x, w, b, strides=1):
    x = tf.nn.conv2d(x, w, strides=[1, strides, strides, 1], padding="SAME")
    x = tf.nn.bias_add(x, b)
    return tf.nn.relu(x)


def five_lines():
    """The graph: the variable that stands for an image, its value reshaped, and the result."""
    X = v1.Variable(v1.random_normal([784], seed=0))  # noqa: N806, as users write it
    W = v1.Variable(v1.random_normal([5, 5, 1, 32], seed=1))  # noqa: N806
    B = v1.Variable(v1.random_normal([32], seed=2))  # noqa: N806
    x = tf.reshape(X, shape=[-1, 28, 28, 1])
    return X, x, tf.nn.max_pool2d(conv2d(x, W, B), 2, 2, "SAME")


def bf16_config():
    options = rewriter_config_pb2.RewriterConfig(
        auto_mixed_precision_onednn_bfloat16=rewriter_config_pb2.RewriterConfig.ON
    )
    return v1.ConfigProto(graph_options=v1.GraphOptions(rewrite_options=options))


def ran(config):
    """The result in a session, and the nodes of the graph that ran."""
    with tf.Graph().as_default(), v1.Session(config=config) as session:
        _, _, y = five_lines()
        session.run(v1.global_variables_initializer())
        metadata = v1.RunMetadata()
        options = v1.RunOptions(output_partition_graphs=True)
        values = session.run(tf.identity(y), options=options, run_metadata=metadata)
    return values, [node for graph in metadata.partition_graphs for node in graph.node]


def types(nodes, what):
    return {tf.as_dtype(node.attr["T"].type).name for node in nodes if what in node.op}


@pytest.mark.skipif(
    not has_rewrite_pass(), reason="TensorFlow's pass for BF16 does nothing on this machine"
)
def test_a_config_made_on_the_fly_runs_the_convolution_in_bf16(variables):
    plain, nodes = ran(None)
    assert types(nodes, "Conv2D") == {"float32"}
    low, nodes = ran(bf16_config())
    assert types(nodes, "Conv2D") == {"bfloat16"}
    casts = [tf.as_dtype(n.attr["DstT"].type).name for n in nodes if n.op == "Cast"]
    assert sorted(casts) == ["bfloat16"] * 3 + ["float32"]  # of X, W and B, and of the result
    assert 0 < np.abs(low - plain).max() < 0.02 * np.abs(plain).max()


#: What a signature may name as its input, made of the variable and of what is read of it.
INPUTS = {
    "the variable": lambda variable, x: variable,
    "a read of its own": lambda variable, x: variable.value(),
    "the read that is used": lambda variable, x: x.op.inputs[0],
    "what is computed of it": lambda variable, x: x,
}


@pytest.fixture(params=INPUTS)
def seed(request, tmp_path, variables):
    """The SavedModel; an image as its input wants it, and what FP32 makes of that."""
    folder = tmp_path / "saved"
    builder = v1.saved_model.Builder(str(folder))
    with tf.Graph().as_default(), v1.Session() as session:
        image, x, y = five_lines()
        session.run(v1.global_variables_initializer())
        info = v1.saved_model.build_tensor_info
        signature = v1.saved_model.build_signature_def(
            inputs={"input": info(INPUTS[request.param](image, x))},
            outputs={"output": info(y)},
            method_name="tensorflow/serving/predict",
        )
        builder.add_meta_graph_and_variables(
            session, ["myTag"], signature_def_map={"predict": signature}
        )
        pixels = np.random.default_rng(0).normal(size=(28, 28)).astype(np.float32)
        expected = session.run(y, {x: pixels[None, ..., None]})
    builder.save()
    shape = (1, 28, 28, 1) if request.param == "what is computed of it" else (784,)
    return folder, pixels.reshape(shape), expected


@pytest.mark.slow
def test_what_its_signature_names_is_an_input_and_it_is_saved_in_bf16_in_both_forms(
    seed, tmp_path, monkeypatch, caplog
):
    folder, image, expected = seed
    monkeypatch.setenv("FORCE_BF16", "1")
    caplog.set_level(logging.INFO, "neural_mp")
    converter = MixedPrecision()
    converter.model = folder
    converter.precisions = "bf16"
    converted = converter()
    (line,) = converted.report.converted
    assert re.fullmatch(r"Converted (\d+)/\1 nodes to bfloat16 using 2 casts", line)
    assert line in caplog.messages
    assert not [warning for warning in converted.report.warnings if "fold" in warning]

    for suffix in (".pb", ".pbtxt"):
        path = tmp_path / f"converted{suffix}"
        converted.save(path)
        graph = GraphDef()
        if suffix == ".pb":
            graph.ParseFromString(path.read_bytes())
        else:
            text_format.Parse(path.read_text(encoding="utf-8"), graph)
        assert types(graph.node, "Conv2D") == {"bfloat16"}
        assert sum(node.op == "Cast" for node in graph.node) == 2
        (fed,) = (node.name for node in graph.node if node.op == "Placeholder")
        last = graph.node[-1].name
        with tf.Graph().as_default(), v1.Session() as session:
            tf.import_graph_def(graph, name="")
            for factor in (1, 2):
                low = session.run(f"{last}:0", {f"{fed}:0": factor * image})
                assert low.dtype == np.float32
                if factor == 1:
                    within = 0.02 * np.abs(expected).max()
                    np.testing.assert_allclose(low, expected, rtol=0, atol=within)
        assert np.abs(low - expected).max() > within  # another image, another result
