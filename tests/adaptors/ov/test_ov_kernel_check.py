"""OpenVINO computes what was converted, or the op stays apart from integer kernels."""

from __future__ import annotations

import numpy as np
import pytest
from onnx_nets import graph, op
from ov_nets import read

from neural_mp import MixedPrecision
from neural_mp.adaptors.openvino.adaptor import OpenVinoAdaptor
from neural_mp.adaptors.openvino.kernel_check import KernelCheck
from neural_mp.adaptors.openvino.runtime import Runner
from neural_mp.core.hardware import detect
from neural_mp.core.precision import Precision
from neural_mp.core.trial import Outcome
from neural_mp.errors import ConversionError
from neural_mp.testing import signal_to_noise
from neural_mp.testing.onnx_graphs import OnnxGraph, drawn_graph

ADAPTOR = OpenVinoAdaptor()
INT8 = Precision.INT8
#: Seeds of drawn graphs: with a scalar index between layers, and with a maximum.
SCALAR_INDEX, MAXIMUM = 2, 1
#: SQNR in dB that INT8 reaches in these graphs.
LEAST_SQNR = 18


def converted(drawn: OnnxGraph):
    """Return a graph in OpenVINO, its space, and the graph with all ops in INT8."""
    model = ADAPTOR.load(read(drawn.model))
    space = ADAPTOR.space(model, detect()).restricted_to([INT8])
    plan = space.resolve(space.fastest_plan())
    seen = ADAPTOR.observe(model, [drawn.feeds], space)
    return model, space, ADAPTOR.convert(model, plan, seen, space)


def check(drawn: OnnxGraph):
    """Check the outputs of a graph in INT8; return its space."""
    model, space, result = converted(drawn)
    for expected, found in zip(model.run(drawn.feeds), result.run(drawn.feeds), strict=True):
        assert (expected.shape, expected.dtype) == (found.shape, found.dtype), str(drawn)
        assert signal_to_noise(expected, found) > LEAST_SQNR, str(drawn)
    return space


@pytest.mark.parametrize(
    ("seed", "kind", "words"),
    [(SCALAR_INDEX, "Gather", "another shape"), (MAXIMUM, "ReduceMax", "other values")],
)
def test_an_op_that_the_plugin_miscompiles_is_kept_apart_and_its_neighbours_are_not(
    seed, kind, words
):
    space = check(drawn_graph(seed))
    (rejected,) = (op.name for op in space.graph if op.type == kind)
    assert words in space.capabilities[rejected].reasons[INT8]
    in_int8 = [op.type for op in space.graph if INT8 in space.capabilities[op.name].precisions]
    assert len(in_int8) == 2


@pytest.mark.parametrize("kind", ["ReduceMax", "ReduceMin"])
@pytest.mark.parametrize("keepdims", [0, 1])
def test_extremes_between_layers_are_those_of_floats(kind, keepdims):
    random = np.random.default_rng(0)
    weights = {
        "w": random.normal(size=(8, 8)).astype(np.float32),
        "v": random.normal(size=(8, 8)).astype(np.float32),
    }
    nodes = [
        op("MatMul", "x w", "a"),
        op(kind, "a", "r", axes=[1], keepdims=keepdims),
        op("MatMul", "r v", "y"),
    ]
    model = graph(nodes, {"x": ["n", 6, 8]}, ["y"], weights, opset=13)
    feeds = {"x": random.normal(size=(4, 6, 8)).astype(np.float32)}
    check(OnnxGraph(kind, model, feeds))


@pytest.fixture
def unchecked_ops(monkeypatch):
    """No op is compared, as if the probe had missed a case."""
    monkeypatch.setattr(KernelCheck, "rejected", {})


@pytest.mark.usefixtures("unchecked_ops")
def test_a_model_compiled_to_another_shape_is_refused_before_it_runs():
    with pytest.raises(ConversionError, match=r"output of shape .* instead of"):
        Runner(converted(drawn_graph(SCALAR_INDEX))[2].program)


@pytest.mark.slow
@pytest.mark.usefixtures("unchecked_ops")
@pytest.mark.parametrize(
    ("seed", "words"),
    [(SCALAR_INDEX, "output of shape"), (MAXIMUM, "by more than rounding")],
)
def test_a_plan_with_wrong_outputs_is_a_failed_candidate(seed, words):
    drawn = drawn_graph(seed)
    tuner = MixedPrecision(
        model=read(drawn.model), precisions="int8", framework="openvino", cache=False
    )
    tuner.exit_policy = {"performance_only": True}
    tuner.calib_dataloader = [drawn.feeds]
    result = tuner()
    assert not any(config.precision is INT8 for config in result.plan.values())
    (trial,) = result.trials
    assert trial.outcome is Outcome.FAILED
    assert words in trial.error


@pytest.mark.slow
def test_drawn_graphs_compute_the_same_in_int8():
    for seed in range(20):
        check(drawn_graph(seed))
