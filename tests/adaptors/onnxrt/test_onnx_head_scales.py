"""Boxes and scores that a detector concatenates keep their own scales; branches of its head."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

from neural_mp.adaptors.registry import get_adaptor_named
from neural_mp.core.hardware import detect
from neural_mp.core.precision import Precision
from neural_mp.core.trial import Outcome, Trial
from neural_mp.strategies.decisions import list_head_branches
from neural_mp.strategies.refinement import list_first_fallbacks

LEVELS, CHANNELS = 3, 16


def detector(reader):
    """Three levels of boxes and scores, joined; `reader` is the op that reads the scores."""
    random = np.random.default_rng(0)
    nodes, constants = [], []

    def conv(name, source, inputs, outputs, stride=1):
        shape = (outputs, inputs, 3, 3)
        weight = (random.normal(size=shape) / np.sqrt(9 * inputs)).astype(np.float32)
        constants.append(numpy_helper.from_array(weight, f"{name}.weight"))
        nodes.append(
            helper.make_node("Conv", [source, f"{name}.weight"], [name], name, pads=[1] * 4,
                             strides=[stride] * 2)
        )  # fmt: skip
        return name

    levels, source = [], "x"
    constants.append(numpy_helper.from_array(np.array([2, CHANNELS + 6, -1]), "shape"))
    for level in range(LEVELS):
        source = conv(f"a{level}", source, CHANNELS if level else 3, CHANNELS, 2)
        nodes.append(helper.make_node("Relu", [source], [f"r{level}"], f"r{level}"))
        source = f"r{level}"
        boxes = conv(f"b{level}", conv(f"u{level}", source, CHANNELS, CHANNELS), CHANNELS, 4)
        scores = conv(f"s{level}", conv(f"v{level}", source, CHANNELS, CHANNELS), CHANNELS, 2)
        nodes.append(
            helper.make_node("Concat", [boxes, scores], [f"c{level}"], f"c{level}", axis=1)
        )
        constants.append(numpy_helper.from_array(np.array([1, 6, -1]), f"shape{level}"))
        nodes.append(helper.make_node("Reshape", [f"c{level}", f"shape{level}"], [f"f{level}"],
                                      f"f{level}"))  # fmt: skip
        levels.append(f"f{level}")
    nodes.append(helper.make_node("Concat", levels, ["all"], "all", axis=2))
    constants.append(numpy_helper.from_array(np.array([4, 2]), "parts"))
    nodes.append(helper.make_node("Split", ["all", "parts"], ["box", "score"], "split", axis=1))
    constants.append(numpy_helper.from_array(np.full(1, 64, np.float32), "stride"))
    nodes.append(helper.make_node("Mul", ["box", "stride"], ["pixels"], "pixels"))
    nodes.append(helper.make_node(reader, ["score"], ["chance"], "chance"))
    nodes.append(helper.make_node("Concat", ["pixels", "chance"], ["y"], "y", axis=1))
    graph = helper.make_graph(
        nodes,
        "detector",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, [1, 3, 64, 64])],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, None)],
        constants,
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=10)
    return onnx.shape_inference.infer_shapes(model)


@pytest.fixture
def space_of(tmp_path):
    def load_space(model, framework):
        onnx.save(model, tmp_path / "detector.onnx")
        return _load_space(str(tmp_path / "detector.onnx"), framework)

    return load_space


def _load_space(file, framework):
    adaptor = get_adaptor_named(framework)
    loaded = adaptor.load(file)
    return adaptor.space(loaded, detect()).restricted_to([Precision.INT8])


@pytest.mark.parametrize("reader", ["Sigmoid", "Softmax", "LeakyRelu"])
@pytest.mark.parametrize("framework", ["onnxrt", "openvino"])
def test_boxes_and_scores_are_in_no_tensor_of_one_scale(space_of, framework, reader):
    space = space_of(detector(reader), framework)
    flow = space.resolve(space.fastest_plan()).flow
    convs = [op for op in space.graph if op.weights and "weight" not in op.name]
    assert sum(flow.effective[op.name] is Precision.INT8 for op in convs) >= 12
    joined = [op.name for op in space.graph if op.type.lower() == "concat"]
    assert len(joined) == LEVELS + 2
    assert not flow.int8_outputs.intersection(joined)
    assert all(len(members) == 1 for members in flow.scale_members.values())


@pytest.mark.parametrize("framework", ["onnxrt", "openvino"])
def test_the_branches_of_a_head_are_found_from_the_graph(space_of, framework):
    space = space_of(detector("Sigmoid"), framework)
    found = [
        {op.partition("/")[0] for op in branch if space.graph[op].weights}
        for branch in list_head_branches(space)
    ]
    branches = sorted(map(sorted, found))
    expected = [
        [f"{name}{level}" for name in pair for level in range(LEVELS)] for pair in ("bu", "sv")
    ]
    assert branches == expected


def test_the_noisiest_branch_of_a_head_falls_back_as_a_whole(space_of):
    space = space_of(detector("Sigmoid"), "onnxrt")
    missed = Trial(space.fastest_plan(), Outcome.MISSED, loss=0.5)
    noise = {tensor.name: 1e-3 for tensor in space.tensors}
    noise |= {name: 0.04 for name in ("u0", "u1", "u2") if name in noise}  # read by boxes
    problem = SimpleNamespace(space=space, tolerance=0.01)
    plans = list_first_fallbacks(problem, None, missed, list(space.tensors), noise)
    layers = {op.name: op for op in space.graph if op.type == "Conv"}
    lowered = [
        {name for name in layers if plan[name].precision is not Precision.INT8} for plan in plans
    ]
    boxes = {"b0", "b1", "b2"}
    assert any(names >= boxes and not names & {"s0", "s1", "s2"} for names in lowered)


def test_a_concatenation_that_a_layer_reads_still_joins_integers(space_of):
    model = detector("Sigmoid")
    space = space_of(_with_layer(model), "onnxrt")
    assert "all" in space.resolve(space.fastest_plan()).flow.int8_outputs


def _with_layer(model):
    """The detector with a convolution over what is joined."""
    weight = np.random.default_rng(1).normal(size=(8, 6, 3)).astype(np.float32)
    model.graph.initializer.append(numpy_helper.from_array(weight, "w"))
    del model.graph.node[-4:]
    model.graph.node.append(helper.make_node("Conv", ["all", "w"], ["y"], "y", pads=[1, 1]))
    return model
