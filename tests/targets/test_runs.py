"""Runs with an accelerator as the target: from a model of any framework to a file for it."""

from importlib import resources

import numpy as np
import onnx
import pytest
import torch
from onnx_nets import as_onnx

import neural_mp
from neural_mp import MixedPrecision
from neural_mp.core.plan import PrecisionPlan
from neural_mp.errors import ConfigurationError, HistoryError
from neural_mp.targets import Widths

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("quick_runs")]

PROFILE = """
schema: 1
name: board
title: Board
evidence: documents
opset: [21, 21]
shapes: static
activation: {types: [int8], scheme: symmetric, scale: power_of_two}
weight: {types: [int8], granularity: per_tensor, scale: power_of_two}
ops: {Conv: [w8a8], Gemm: [w8a8]}
others: [{types: [Relu, Add], widths: [a8]}]
same_scale: [MaxPool, Flatten, Reshape]
cost: {macs: {w8a8: 1, a8: 1}, float_mac: 8}
"""


def batches_of(split, size=100, most=500):
    starts = range(0, most, size)
    return [(split.images[s : s + size], split.labels[s : s + size]) for s in starts]


def run_for(target, model, data, **options):
    options = {"metric": "accuracy", "accuracy_criterion": {"relative": 0.02}, **options}
    return MixedPrecision(model=model, eval_dataloader=data, target=target, **options)()


def test_module_of_torch_becomes_a_file_of_onnx_alone(net, digits, tmp_path):
    data = batches_of(digits[1])
    result = run_for("qnn", net, data)
    assert result.met
    figures = result.report.accelerator
    assert figures.name == "qnn"
    assert figures.relative_cost < 0.5
    assert sum(figures.shares.values()) == pytest.approx(1)
    assert figures.shares["w8a8"] > 0.8
    assert result.report.latency is None  # times of this CPU are not the target's
    assert result.report.speedup is None
    assert result.report.op_counts["MaxPool"] == {"int8": 1}  # moves integers
    result.save(tmp_path / "model.onnx")
    model = onnx.load(tmp_path / "model.onnx")
    assert {node.domain for node in model.graph.node} == {""}
    agree = [
        (
            np.asarray(result(images)).argmax(1)
            == np.asarray(net(torch.as_tensor(images)).detach()).argmax(1)
        )
        for images, _ in data
    ]
    assert np.mean(agree) > 0.95


def test_file_of_onnx_is_planned_for_a_board_of_ones_own(net, digits, tmp_path):
    (tmp_path / "board.yaml").write_text(PROFILE)
    result = run_for(str(tmp_path / "board.yaml"), as_onnx(net), batches_of(digits[1]))
    assert result.report.accelerator.title == "Board"
    scales = [
        np.log2(onnx.numpy_helper.to_array(tensor))
        for tensor in result.model.graph.initializer
        if tensor.name.endswith("/scale") and "int32" not in tensor.name
    ]
    assert scales
    for scale in scales:
        np.testing.assert_array_equal(scale, np.round(scale))


def test_target_out_of_reach_of_8_bits_is_met_by_wider_ops(hostile_net, digits):
    """One channel of activations is 1024 times larger than the others."""
    data = batches_of(digits[1])
    result = run_for("qnn", hostile_net, data, accuracy_criterion={"relative": 0.002})
    assert result.met
    assert not result.trials[0].meets_accuracy
    assert len(result.trials) <= 6
    words = {
        str(Widths.from_config(config)) for config in result.plan.values() if config.activation
    }
    assert words & {"w8a16", "w16a16"}
    assert words & {"w8a8", "a8"}
    assert result.report.accelerator.relative_cost < 1


def test_outlier_in_calibration_is_clipped_before_any_op_is_widened(net, digits):
    """One pixel of one picture is 200 times brighter, which makes the steps of min/max coarse."""
    data = batches_of(digits[1])
    images = data[0][0].copy()
    images[0, 0, 0, 0] = 200 * images.max()
    calibration = [(images, data[0][1]), *data[1:]]
    result = run_for("qnn", net, data, calib_dataloader=calibration)
    assert result.met
    assert [trial.meets_accuracy for trial in result.trials] == [False, True]
    assert {str(Widths.from_config(config)) for config in result.plan.values()} <= {"w8a8", "a8"}
    algorithms = {str(config.activation.algorithm) for config in result.plan.values()}
    assert algorithms - {"minmax"}
    text = result.plan.to_yaml()
    assert all(algorithm in text for algorithm in algorithms)
    assert PrecisionPlan.from_yaml(text, "the plan") == result.plan


def is_like(net, images):
    """Return a metric: whether a model computes what a module does."""
    expected = net(torch.as_tensor(images)).detach().numpy()
    return lambda model: float(np.allclose(np.asarray(model(images)), expected, atol=1e-5))


def test_target_that_no_width_meets_leaves_the_float_model(net, digits):
    data = batches_of(digits[1])
    is_float = is_like(net, data[0][0])
    result = MixedPrecision(model=net, eval_func=is_float, calib_dataloader=data, target="qnn")()
    assert result.met is False
    assert set(result.plan.counts()) <= {"fp32"}
    assert 0 < len(result.trials) <= 6
    assert any("no plan met the target" in warning for warning in result.report.warnings)


def test_target_without_float_is_given_integers_alone(net, digits, tmp_path):
    """By a profile of one's own: the widest integers are the last resort."""
    shipped = resources.files("neural_mp.targets") / "qnn.yaml"
    own, data = tmp_path / "own.yaml", batches_of(digits[1])
    own.write_text(shipped.read_text().replace("float_type: fp16", ""))
    result = MixedPrecision(
        model=net, eval_func=is_like(net, data[0][0]), calib_dataloader=data, target=str(own)
    )()
    plans = [trial.plan for trial in result.trials]
    assert len(plans) > 2
    assert all(plan[op].activation is not None for plan in plans for op in plans[0])


def test_folder_of_a_result_is_loaded_as_onnx(net, digits, tmp_path):
    data = batches_of(digits[1])
    result = run_for("qnn", net, data)
    result.save(tmp_path / "saved")
    loaded = neural_mp.load(tmp_path / "saved")
    images = data[0][0][:1]
    np.testing.assert_allclose(
        np.asarray(loaded(images)), np.asarray(result(images)), rtol=0.1, atol=0.3
    )


def test_unknown_target_is_one_error_that_names_all(net):
    with pytest.raises(ConfigurationError, match=r"qnn.*got 'qnm'.*did you mean 'qnn'"):
        MixedPrecision(model=net, target="qnm")()


def test_precisions_of_floats_are_refused(net, digits):
    with pytest.raises(ConfigurationError, match="int8 or int16, got bf16"):
        run_for("qnn", net, batches_of(digits[1]), precisions="bf16")


def test_run_for_other_rules_is_not_resumed(net, digits, tmp_path):
    data, options = batches_of(digits[1]), {"workspace": str(tmp_path)}
    run_for("vitisai-xint8", net, data, **options)
    with pytest.raises(HistoryError, match="the target of this run differs"):
        run_for("vitisai-a8w8", net, data, **options, resume=True)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"runtime": "openvino"}, "runtime must be 'source' or 'auto'"),
        ({"objective": "modelsize"}, "objective must be latency"),
    ],
)
def test_options_that_an_accelerator_cannot_heed_are_refused(net, digits, options, message):
    with pytest.raises(ConfigurationError, match=message):
        run_for("qnn", net, batches_of(digits[1]), **options)
