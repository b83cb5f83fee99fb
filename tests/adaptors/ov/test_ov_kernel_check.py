"""OpenVINO computes what was converted, or the op stays apart from integer kernels."""

from __future__ import annotations

import numpy as np
import pytest
from onnx_nets import graph, op
from ov_nets import read

from neural_mp import MixedPrecision
from neural_mp.adaptors.openvino.adaptor import OpenVinoAdaptor
from neural_mp.adaptors.openvino.convert import SEPARATED
from neural_mp.adaptors.openvino.kernel_check import build_op_cases, read_case
from neural_mp.adaptors.openvino.model import OpenVinoModel
from neural_mp.adaptors.openvino.runtime import Runner
from neural_mp.core.hardware import detect
from neural_mp.core.plan import PrecisionPlan
from neural_mp.core.precision import Precision
from neural_mp.core.trial import Outcome
from neural_mp.errors import ConversionError
from neural_mp.testing import signal_to_noise, uniform
from neural_mp.testing.graphs.graph_check import Verdict
from neural_mp.testing.graphs.onnx_graphs import OnnxGraph, check_graph, drawn_graph

ADAPTOR = OpenVinoAdaptor()
INT8 = Precision.INT8
#: Seeds of drawn graphs: with a scalar index between layers, and with a maximum.
SCALAR_INDEX, MAXIMUM = 2, 1
#: With scales per element of the last axis before a reshape.
MOVED = (36, 183)
#: SQNR in dB that INT8 reaches in these graphs.
LEAST_SQNR = 18


def converted(drawn: OnnxGraph):
    """Return a graph in OpenVINO, its space, and the graph with all ops in INT8."""
    model = ADAPTOR.load(read(drawn.model))
    space = ADAPTOR.space(model, detect()).restricted_to([INT8])
    plan = space.resolve(space.fastest_plan())
    observations = ADAPTOR.observe(model, [drawn.feeds], space)
    return model, space, ADAPTOR.convert(model, plan, observations, space)


def check(drawn: OnnxGraph):
    """Check the outputs of a graph in INT8; return its space."""
    model, space, result = converted(drawn)
    for expected, actual in zip(model.run(drawn.feeds), result.run(drawn.feeds), strict=True):
        assert (expected.shape, expected.dtype) == (actual.shape, actual.dtype), str(drawn)
        assert signal_to_noise(expected, actual) > LEAST_SQNR, str(drawn)
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


@pytest.mark.parametrize("precision", [Precision.BF16, Precision.FP16])
def test_barriers_have_the_type_of_their_tensor_and_stand_next_to_integer_kernels(
    precision, monkeypatch
):
    monkeypatch.setenv("FORCE_BF16", "1")
    drawn = drawn_graph(MAXIMUM)
    model = ADAPTOR.load(read(drawn.model))
    space = ADAPTOR.space(model, detect())
    expected, configs = model.run(drawn.feeds), uniform(space, precision)
    in_int8 = {op: space.capabilities[op].config(INT8) for op in space.tunable_ops}
    layers = [op for op, config in in_int8.items() if config is not None]
    for chosen in ([], layers[:1], layers[1:]):
        plan = space.resolve(PrecisionPlan({**configs, **{op: in_int8[op] for op in chosen}}))
        observations = ADAPTOR.observe(model, [drawn.feeds], space)
        result = ADAPTOR.convert(model, plan, observations, space)
        for reference, output in zip(expected, result.run(drawn.feeds), strict=True):
            assert signal_to_noise(reference, output) > LEAST_SQNR
        assert bool(barriers(result)) == bool(chosen)


def barriers(model):
    """Return the nodes that keep ops apart from integer kernels."""
    return [node for node in model.program.get_ops() if SEPARATED in node.get_friendly_name()]


def test_means_concatenations_and_poolings_stand_next_to_integer_kernels():
    random = np.random.default_rng(0)
    weights = {
        name: random.normal(size=(8, 8, 3, 3)).astype(np.float32) / 8 for name in ("k1", "k2", "k3")
    }
    nodes = [
        op("Conv", "x k1", "a", pads=[1] * 4),
        op("Relu", "a", "b"),
        op("MaxPool", "b", "p", kernel_shape=[2, 2], strides=[2, 2]),
        op("Conv", "p k2", "c", pads=[1] * 4),
        op("Add", "c p", "d"),
        op("Relu", "d", "e"),
        op("Concat", "e p", "f", axis=1),
        op("Conv", "f k3", "g", group=2),
        op("Relu", "g", "h"),
        op("ReduceMean", "h", "y", axes=[2, 3], keepdims=0),
    ]
    model = graph(nodes, {"x": ["n", 8, 16, 16]}, ["y"], weights, opset=13)
    feeds = {"x": random.normal(size=(2, 8, 16, 16)).astype(np.float32)}
    source, _, result = converted(OnnxGraph("net", model, feeds))
    assert source.rejected_ops == {}
    assert barriers(result) == []


@pytest.fixture
def unchecked_ops(monkeypatch):
    """No op is compared, as if the probe had missed a case."""
    monkeypatch.setattr(OpenVinoModel, "rejected_ops", {})


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
    assert any(words in warning for warning in result.report.warnings)


@pytest.mark.slow
@pytest.mark.parametrize(("channels", "outputs"), [(3, 2), (3, 3), (5, 2), (8, 2)])
@pytest.mark.parametrize("stride", [1, 2])
def test_channels_convolved_alone_in_one_dimension_compute_the_same(channels, outputs, stride):
    """OpenVINO's kernel for few channels with several outputs each writes other values."""
    random = np.random.default_rng(0)
    length = (8 - 1) // stride + 1
    constants = {
        "w": random.normal(size=(channels * outputs, 1, 3)).astype(np.float32),
        "m": random.normal(size=(length, 8)).astype(np.float32),
    }
    nodes = [
        op("Conv", "x w", "c", group=channels, pads=[1, 1], strides=[stride]),
        op("Relu", "c", "r"),
        op("MatMul", "r m", "y"),
    ]
    x = random.normal(size=(2, channels, 8)).astype(np.float32)
    model = graph(nodes, {"x": list(x.shape)}, ["y"], constants)
    drawn = OnnxGraph("Relu", model, {"x": x})
    outcome = check_graph(drawn, adaptor=ADAPTOR, source=read(model))
    assert not outcome.is_failure, outcome


@pytest.mark.slow
def test_drawn_graphs_compute_the_same_fused_unfused_and_in_floats():
    graphs = [*map(drawn_graph, range(20)), *map(drawn_graph, MOVED)]
    outcomes = [
        (drawn, check_graph(drawn, adaptor=ADAPTOR, source=read(drawn.model))) for drawn in graphs
    ]
    assert [f"{drawn}: {outcome}" for drawn, outcome in outcomes if outcome.is_failure] == []
    assert sum(outcome.verdict is Verdict.RIGHT for _, outcome in outcomes) > 15


@pytest.mark.usefixtures("unchecked_ops")
def test_the_check_of_drawn_graphs_finds_wrong_kernels():
    for seed, verdict in ((MAXIMUM, Verdict.WRONG_FUSION), (SCALAR_INDEX, Verdict.NOT_LOADED)):
        drawn = drawn_graph(seed)
        assert check_graph(drawn, adaptor=ADAPTOR, source=read(drawn.model)).verdict is verdict


def test_an_op_is_compared_with_each_of_its_sources():
    """Tensors of the same shape from two compared ops are two inputs of the case."""
    nodes = [
        op("MaxPool", "x", "a", kernel_shape=[2, 2]),
        op("AveragePool", "x", "b", kernel_shape=[2, 2]),
        op("Concat", "a b", "y", axis=1),
    ]
    model = graph(nodes, {"x": [1, 4, 6, 6]}, ["y"], {}, opset=13)
    case = read_case(build_op_cases(ADAPTOR.load(read(model)).program)["y"])
    assert [list(port.get_shape()) for port in case.get_parameters()] == [[1, 4, 5, 5]] * 2
