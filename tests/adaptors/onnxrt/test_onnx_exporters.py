"""What exporters write: sizes of -1, weights in nodes, whole nets within an `If`."""

import numpy as np
import onnx
from onnx import TensorProto, helper
from onnx_nets import Converted, graph, op, run

from neural_mp.adaptors.onnxrt.adaptor import OnnxRuntimeAdaptor
from neural_mp.core.precision import Precision
from neural_mp.testing import signal_to_noise


def draw(*shape, seed=0):
    return np.random.default_rng(seed).normal(size=shape).astype(np.float32)


def convolution(shape=("n", 3, 8, 8), **constants):
    return graph([op("Conv", "x w", "y")], {"x": list(shape)}, ["y"], constants)


def test_a_size_of_minus_one_is_free():
    model = convolution((-1, 3, -1, 8), w=draw(4, 3, 3, 3))
    model.graph.output[0].type.tensor_type.shape.dim.add().dim_value = -1
    for size in (1, 5):
        x = draw(size, 3, 8, 8)
        converted = Converted(model, {"x": x})
        assert converted.kernels["QLinearConv"] == 1
        assert signal_to_noise(run(model, x=x)[0], converted.result) > 30
        assert converted.float.signature.inputs[0].shape == (None, 3, None, 8)
    assert converted.float.signature.count_samples({"x": x}) == 5


def test_weights_in_nodes_count_as_weights():
    weight = draw(16, 3, 3, 3)
    model = convolution()
    stored = helper.make_node("Constant", [], ["w"], value=onnx.numpy_helper.from_array(weight))
    model.graph.node.insert(0, stored)
    converted = Converted(model, {"x": draw(2, 3, 8, 8)})
    adaptor = OnnxRuntimeAdaptor()
    assert adaptor.weight_bytes(converted.float) == weight.nbytes
    assert adaptor.weight_bytes(converted.model) < 0.5 * weight.nbytes


def in_branches(*bodies):
    """A model whose nodes all lie in the branches of an `If`."""
    names = ("then_branch", "else_branch")
    result = helper.make_tensor_value_info("result", TensorProto.FLOAT, None)
    graphs = {
        name: helper.make_graph(nodes, name, [], [result])
        for name, nodes in zip(names, bodies, strict=True)
    }
    model = graph(
        [op("If", "chosen", "y", **graphs)],
        {"x": ["n", 3, 8, 8]},
        ["y"],
        {"w": draw(4, 3, 3, 3), "chosen": np.array(True)},
    )
    chosen = helper.make_tensor_value_info("chosen", TensorProto.BOOL, [])
    model.graph.input.append(chosen)
    del model.graph.initializer[1:]
    return model


def test_what_lies_in_branches_is_decided_like_the_rest():
    model = in_branches(
        [op("Conv", "x w", "result")], [op("Conv", "x w", "a"), op("Relu", "a", "result")]
    )
    feeds = {"x": draw(2, 3, 8, 8), "chosen": np.array(True)}
    converted = Converted(model, feeds)
    assert not converted.float.warnings
    assert "graph" in converted.space.capabilities["y"].reasons[Precision.INT8]
    assert signal_to_noise(run(model, **feeds)[0], converted.result) > 30
