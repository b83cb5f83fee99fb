"""Plans for an accelerator, applied again: the result is the tuned one."""

import json
from dataclasses import replace

import numpy as np
import pytest
from command_here import run_main
from onnx_nets import as_onnx

from neural_mp import MixedPrecision, convert_with_plan
from neural_mp.errors import ConfigurationError, PlanError

pytestmark = pytest.mark.usefixtures("quick_runs")


@pytest.fixture
def tuned(net, digits):
    """A result for QNN, all in 8 bits, of the net as ONNX."""
    data = [(digits[0].images[:64], None)]
    return MixedPrecision(model=as_onnx(net), target="qnn", calib_dataloader=data)()


def check_same(replayed, tuned, images):
    np.testing.assert_array_equal(np.asarray(replayed(images)), np.asarray(tuned(images)))
    assert replayed.plan == tuned.plan
    assert replayed.report.accelerator == tuned.report.accelerator
    assert replayed.report.accelerator.shares["w8a8"] > 0.8
    assert replayed.report.latency is None  # times of this CPU are not the target's
    assert replayed.report.baseline_latency is None
    assert replayed.report.speedup is None


def test_replayed_plan_gives_the_file_of_the_tuned_result(net, digits, tuned, tmp_path):
    tuned.save_plan(tmp_path / "plan.yaml")
    replayed = convert_with_plan(as_onnx(net), tmp_path / "plan.yaml", target="qnn")
    check_same(replayed, tuned, digits[1].images[:50])
    tuned.save(tmp_path / "tuned.onnx")
    replayed.save(tmp_path / "replayed.onnx")
    assert (tmp_path / "replayed.onnx").read_bytes() == (tmp_path / "tuned.onnx").read_bytes()


def test_module_of_torch_is_replayed_as_onnx(net, digits, tmp_path):
    data = [(digits[0].images[:64], None)]
    tuned = MixedPrecision(model=net, target="qnn", calib_dataloader=data)()
    tuned.save_plan(tmp_path / "plan.yaml")
    images = digits[1].images[:50]
    replayed = convert_with_plan(net, tmp_path / "plan.yaml", target="qnn", inputs=images)
    assert replayed.framework == "onnxrt"
    check_same(replayed, tuned, images)


@pytest.mark.parametrize("name", ["result", "result.onnx"])
def test_command_shows_estimates_and_no_times(net, tuned, tmp_path, monkeypatch, name):
    tuned.save_plan(tmp_path / "plan.yaml")
    (tmp_path / "net.onnx").write_bytes(as_onnx(net).SerializeToString())
    monkeypatch.chdir(tmp_path)
    arguments = ("convert", "net.onnx", "--plan", "plan.yaml", "--target", "qnn", "-o", name)
    code, output, errors = run_main(*arguments, "--json")
    assert code == 0, errors
    report = json.loads(output)["report"]
    assert report["accelerator"]["name"] == "qnn"
    assert report["accelerator"]["relative_cost"] < 0.5
    assert report["latency"] is None
    assert report["speedup"] is None
    assert (tmp_path / name).exists()


def test_plan_for_a_cpu_is_refused_by_an_accelerator(net, digits):
    data = [(digits[0].images[:64], None)]
    plan = MixedPrecision(model=as_onnx(net), precisions="int8", calib_dataloader=data)().plan
    with pytest.raises(PlanError):
        convert_with_plan(as_onnx(net), plan, target="vitisai-a16w8")


def test_misspelt_accelerator_is_named_with_the_nearest(net, tuned):
    with pytest.raises(ConfigurationError, match=r"got 'qnm'.*did you mean 'qnn'"):
        convert_with_plan(as_onnx(net), tuned.plan, target="qnm")


def test_plan_without_a_named_target_is_applied_for_its_own(net, digits, tuned, tmp_path):
    """An in-memory plan, and a file, name the accelerator that they are for."""
    tuned.save_plan(tmp_path / "plan.yaml")
    assert tuned.plan.target == "qnn"
    assert "\ntarget: qnn\n" in (tmp_path / "plan.yaml").read_text()
    replayed = convert_with_plan(as_onnx(net), tmp_path / "plan.yaml")
    check_same(replayed, tuned, digits[1].images[:50])


@pytest.mark.parametrize("target", ["this", "qdq"])
def test_plan_of_an_accelerator_is_refused_by_other_targets(net, tuned, target):
    with pytest.raises(PlanError, match=f"must be 'qnn', the accelerator .* got '{target}'"):
        convert_with_plan(as_onnx(net), tuned.plan, observations=tuned.observations, target=target)


def test_plan_file_without_a_target_is_still_applied(net, digits, tuned, tmp_path):
    tuned.save_plan(tmp_path / "plan.yaml")
    old = (tmp_path / "plan.yaml").read_text().replace("\ntarget: qnn\n", "\n")
    (tmp_path / "old.yaml").write_text(old)
    replayed = convert_with_plan(as_onnx(net), tmp_path / "old.yaml", target="qnn")
    check_same(replayed, tuned, digits[1].images[:50])


def test_plan_for_a_profile_of_the_users_asks_for_its_path(net, tuned):
    plan = replace(tuned.plan, target="board")
    with pytest.raises(PlanError, match="the plan is for 'board', whose profile is a file"):
        convert_with_plan(as_onnx(net), plan, observations=tuned.observations)
