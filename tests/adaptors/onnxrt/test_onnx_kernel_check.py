"""ONNX Runtime computes what was converted, or the op stays in floats, with the reason."""

import numpy as np
import pytest
from onnx_nets import Converted, graph, op, run

from neural_mp import MixedPrecision
from neural_mp.adaptors.onnxrt import kernel_check
from neural_mp.adaptors.onnxrt.graph.sessions import PLAIN, Runner
from neural_mp.adaptors.onnxrt.kernel_check import KernelCheck
from neural_mp.core.precision import Precision
from neural_mp.core.trial import Outcome
from neural_mp.testing import signal_to_noise
from neural_mp.testing.graphs.graph_check import Verdict
from neural_mp.testing.graphs.onnx_graphs import OnnxGraph, check_graph, drawn_graph

INT8 = Precision.INT8


def draw(*shape, seed=0):
    return np.random.default_rng(seed).normal(size=shape).astype(np.float32)


X = {"x": draw(4, 3, 16, 16)}
WEIGHTS = {"w": draw(8, 3, 3, 3) / 5, "v": draw(8, 8, 3, 3, seed=1) / 8}
HALVES = {"s": np.array([1, 1, 0.5, 0.5], np.float32)}
_WINDOW = {"kernel_shape": [3, 3], "strides": [2, 2], "ceil_mode": 1, "count_include_pad": 1}
_SMALL = {"kernel_shape": [2, 2]}
#: Op between two convolutions, its constants, opset, words of the reason.
MISCOMPILED = {
    "ceil and counted pads": (op("AveragePool", "r", "m", **_WINDOW), {}, 17, "other results"),
    "padded": (op("AveragePool", "r", "m", pads=[1] * 4, **_WINDOW), {}, 17, "other results"),
    "default dilations": (
        op("AveragePool", "r", "m", dilations=[1, 1], **_SMALL),
        {},
        19,
        "cannot load",
    ),
    "dilations": (op("AveragePool", "r", "m", dilations=[2, 2], **_SMALL), {}, 19, "cannot load"),
    "cubic": (op("Resize", "r - s", "m", mode="cubic"), HALVES, 17, "cannot load"),
    "center": (
        op("CenterCropPad", "r s", "m", axes=[2, 3]),
        {"s": np.array([12, 18])},
        18,
        "fails to run",
    ),
}


def between_convolutions(node, constants=None, opset=17):
    """x → Conv, Relu (r) → node (m) → Conv (y)."""
    nodes = [op("Conv", "x w", "c"), op("Relu", "c", "r"), node, op("Conv", "m v", "y")]
    return graph(
        nodes, {"x": ["n", 3, 16, 16]}, ["y"], {**WEIGHTS, **(constants or {})}, opset=opset
    )


def as_written(converted: Converted) -> np.ndarray:
    """The output of the converted file without optimizations."""
    return Runner(converted.model.program, None, level=PLAIN)(X, ["y"])[0]


@pytest.mark.parametrize("case", MISCOMPILED)
def test_an_op_that_the_runtime_miscompiles_stays_in_floats_alone(case):
    node, constants, opset, reason = MISCOMPILED[case]
    converted = Converted(between_convolutions(node, constants, opset), X)
    assert reason in converted.space.capabilities["m"].reasons[INT8]
    assert converted.kernels["QLinearConv"] == 2
    (expected,) = run(between_convolutions(node, constants, opset), **X)
    assert signal_to_noise(expected, converted.result) > 25
    assert signal_to_noise(as_written(converted), converted.result) > 40


@pytest.mark.parametrize(
    "node",
    [
        op("AveragePool", "r", "m", kernel_shape=[3, 3], strides=[2, 2], ceil_mode=1),
        op("AveragePool", "r", "m", kernel_shape=[3, 3], pads=[1] * 4, count_include_pad=1),
        op("MaxPool", "r", "m", kernel_shape=[3, 3], strides=[2, 2], ceil_mode=1),
        op("Sigmoid", "r", "m"),
    ],
    ids=lambda node: node.op_type,
)
def test_an_op_that_the_runtime_compiles_right_is_not_held_back(node):
    converted = Converted(between_convolutions(node), X)
    assert "m" not in converted.float.rejected_ops
    assert converted.kernels["DequantizeLinear"] <= 1
    assert signal_to_noise(as_written(converted), converted.result) > 40


def test_an_op_is_compared_once_per_machine(monkeypatch):
    node = op("AveragePool", "r", "m", kernel_shape=[5, 4], ceil_mode=1)
    first = Converted(between_convolutions(node), X)
    monkeypatch.setattr(kernel_check, "find_deviation", lambda path: pytest.fail(str(path)))
    second = Converted(between_convolutions(node), X)
    assert first.float.rejected_ops == second.float.rejected_ops


@pytest.fixture
def unchecked_ops(monkeypatch):
    """No op is compared, as if the probe had missed a case."""
    monkeypatch.setattr(KernelCheck, "rejected_ops", {})


WAYS = {
    "performance only": {"exit_policy": {"performance_only": True}},
    "no metric": {},
    "any runtime": {"runtime": "auto"},
    "metric": {"metric": "accuracy"},
}


def tuned(case, mode):
    node, constants, opset, _ = MISCOMPILED[case]
    model = between_convolutions(node, constants, opset)
    tuner = MixedPrecision(model=model, precisions="int8", cache=False, **WAYS[mode])
    if mode == "metric":
        labels = run(model, **X)[0].reshape(4, -1).argmax(1)
        tuner.eval_func = lambda candidate: float(
            (candidate.run(None, X)[0].reshape(4, -1).argmax(1) == labels).mean()
        )
    tuner.calib_dataloader = [X]
    return tuner()


@pytest.mark.slow
@pytest.mark.parametrize("way", ["performance only", "no metric", "any runtime"])
@pytest.mark.parametrize("case", ["default dilations", "cubic", "center"])
@pytest.mark.usefixtures("unchecked_ops")
def test_a_plan_that_does_not_load_is_a_failed_candidate(case, way):
    result = tuned(case, way)
    if result.framework != "onnxrt":
        return  # another runtime may be faster, and loads the plan
    assert not any(config.precision is INT8 for config in result.plan.values())
    (trial,) = result.trials
    assert trial.outcome is Outcome.FAILED
    assert "ONNX Runtime" in trial.error
    assert any(trial.error in warning for warning in result.report.warnings)


@pytest.mark.slow
@pytest.mark.usefixtures("unchecked_ops")
def test_a_plan_with_a_wrong_fusion_is_a_failed_candidate():
    result = tuned("ceil and counted pads", "performance only")
    (trial,) = result.trials
    assert trial.outcome is Outcome.FAILED
    assert "first at op 'm'" in trial.error
    assert not any(config.precision is INT8 for config in result.plan.values())


@pytest.mark.slow
def test_drawn_graphs_compute_the_same_fused_unfused_and_in_floats():
    outcomes = [(graph, check_graph(graph)) for graph in map(drawn_graph, range(40))]
    assert [f"{graph}: {outcome}" for graph, outcome in outcomes if outcome.is_failure] == []
    kinds = [graph.kind for graph, outcome in outcomes if outcome.verdict is Verdict.RIGHT]
    assert len(kinds) > 30
    assert len(set(kinds)) > 20


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["AveragePool", "MaxPool", "Resize", "Pad", "CenterCropPad"])
def test_drawn_graphs_of_images_compute_the_same(kind):
    graphs = [drawn_graph(seed, kind) for seed in range(1000, 1008)]
    outcomes = [(graph, check_graph(graph)) for graph in graphs]
    assert [f"{graph}: {outcome}" for graph, outcome in outcomes if outcome.is_failure] == []


@pytest.mark.slow
@pytest.mark.usefixtures("unchecked_ops")
def test_the_check_of_drawn_graphs_finds_wrong_fusions():
    for case, verdict in (
        ("ceil and counted pads", Verdict.WRONG_FUSION),
        ("default dilations", Verdict.NOT_LOADED),
    ):
        node, constants, opset, _ = MISCOMPILED[case]
        drawn = OnnxGraph("AveragePool", between_convolutions(node, constants, opset), X)
        assert check_graph(drawn).verdict is verdict
