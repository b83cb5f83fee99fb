"""Small stumbles of users: what a message, a file or a result must say."""

from __future__ import annotations

import json
import logging
import math
import time

import numpy as np
import onnx
import pytest
import torch
from onnx_nets import as_onnx

import neural_mp
from neural_mp import MixedPrecision, Precision
from neural_mp.adaptors.pytorch.training import autocast as autocasting
from neural_mp.api.optimized_model import EXACT_ON_KEY, OptimizedModel
from neural_mp.core.criterion import AccuracyCriterion, ExitPolicy
from neural_mp.core.plan import PrecisionPlan
from neural_mp.errors import ConfigurationError
from neural_mp.io.measurement_cache import RunCache
from neural_mp.runs.report import Report
from neural_mp.training import autocast
from neural_mp.tuning.listener import Listener
from neural_mp.tuning.measurement.probe import MeasuringProbe


@pytest.fixture(autouse=True)
def _quick(quick_runs):
    pass


class Fading:
    """A metric whose result falls from pass to pass, so that no plan meets the target."""

    def __init__(self) -> None:
        self.passes = 0

    def reset(self) -> None:
        self.passes += 1

    def update(self, preds, labels) -> None:
        pass

    def result(self) -> float:
        return 1.0 / self.passes


@pytest.fixture
def missing(net, digits, tmp_path):
    """A converter whose target is missed."""
    return MixedPrecision(
        model=net,
        precisions="int8",
        metric=Fading(),
        eval_dataloader=digits[1].loader(),
        exit_policy=ExitPolicy(max_trials=2),
        workspace=tmp_path / "workspace",
    )


@pytest.mark.slow
def test_after_a_missed_target_the_model_is_the_users_own(missing, net, monkeypatch):
    """Also where other FP32 kernels would be faster."""
    from neural_mp.adaptors.pytorch.adaptor import PyTorchAdaptor

    kernels = staticmethod(lambda model, inputs, ops: dict.fromkeys(ops, "onednn"))
    monkeypatch.setattr(PyTorchAdaptor, "faster_kernels", kernels)
    result = missing()
    assert result.met is False
    assert result.model is net
    assert not any(config.kernel for config in result.plan.values())


@pytest.mark.slow
def test_a_loaded_result_has_the_trials_of_its_run(missing, tmp_path):
    result = missing()
    result.save(tmp_path / "saved")
    trials = neural_mp.load(tmp_path / "saved").trials
    assert [trial.number for trial in trials] == [trial.number for trial in result.trials]
    assert trials


@pytest.mark.slow
def test_the_choice_of_a_runtime_has_a_text_of_its_own(missing):
    phases = []

    class Phases(Listener):
        def phase(self, title, total=None):
            phases.append(title)

    missing.listener, missing.runtime = Phases(), "onnxrt"
    missing()
    assert phases[:2] == ["Loading the model", "Choosing the runtime"]


@pytest.mark.slow
def test_explain_says_what_the_run_measured_of_an_op_in_fp32(missing, run, tmp_path):
    missing()
    arguments = ["explain", "nets:small_net", "stem", "--precision", "int8", "--json"]
    arguments += ["--workspace", str(tmp_path / "workspace"), "--input-shape", "2,1,8,8"]
    code, out, err = run(*arguments)
    assert code == 0, err
    reason = json.loads(out)["precisions"]["int8"]["reason"]
    assert "with the op in int8: missed, loss" in reason


@pytest.mark.slow
def test_the_file_in_the_folder_of_a_result_names_the_cpus(net, digits, tmp_path):
    converter = MixedPrecision(model=as_onnx(net), precisions="int8")
    converter.calib_dataloader = digits[0].loader()
    result = converter()
    result.save(tmp_path / "saved")
    metadata = {p.key: p.value for p in onnx.load(tmp_path / "saved" / "model.onnx").metadata_props}
    assert metadata[EXACT_ON_KEY] == result.exact_on
    again = neural_mp.load(tmp_path / "saved")
    images = digits[1].images[:4]
    np.testing.assert_array_equal(np.asarray(again(images)), np.asarray(result(images)))


def test_python_takes_a_percentage_as_a_tuning_file_does():
    converter = MixedPrecision(accuracy_criterion="2%")
    assert converter.accuracy_criterion == AccuracyCriterion(0.02)
    with pytest.raises(ConfigurationError, match="or '1%'"):
        MixedPrecision(accuracy_criterion="little")


def test_a_result_as_the_model_is_told_what_to_set(missing):
    result = OptimizedModel(None, PrecisionPlan(), Report())
    missing.model = result
    with pytest.raises(ConfigurationError, match="set the model that you gave that run"):
        missing()


def test_a_wrong_name_of_a_model_has_its_line(tmp_path, run, monkeypatch):
    monkeypatch.chdir(tmp_path)
    np.savez(tmp_path / "t.npz", inputs=np.zeros((2, 1, 8, 8), np.float32), labels=np.zeros(2))
    (tmp_path / "conf.yml").write_text(
        "model:\n  name: missing.pt2\nevaluation:\n  accuracy:\n    metric: accuracy\n"
        "    dataloader: {dataset: {numpy: {path: t.npz}}}\n"
    )
    code, _, err = run("tune", "conf.yml")
    assert code == 2
    assert "conf.yml, line 2: model.name: " in err
    code, _, err = run("tune", "conf.yaml")
    assert code == 2
    assert "did you mean 'conf.yml'?" in err


@pytest.mark.parametrize(
    ("arguments", "kind"),
    [(["tune", "nothing.yaml"], "ConfigurationError"), (["inspect"], "UsageError")],
)
def test_errors_are_json_with_json(run, arguments, kind):
    code, out, err = run(*arguments, "--json")
    assert code == 2
    error = json.loads(out)["error"]
    assert error["type"] == kind
    assert error["message"] in err


def test_autocast_without_kernels_warns_with_the_reason(monkeypatch, caplog):
    from machine import machine

    monkeypatch.setattr(autocasting, "detect", machine)
    autocasting._warn_of_emulation.cache_clear()
    with caplog.at_level(logging.WARNING):
        for _ in range(2):
            autocast("fp16")
    (message,) = [text for text in caplog.messages if "slower than float32" in text]
    assert machine().support(Precision.FP16).reason in message
    assert torch.accelerator.is_available() is False
    autocasting._warn_of_emulation.cache_clear()


@pytest.mark.slow
def test_scripts_of_inc_2_log_fp32_the_result_and_the_trials(net, digits, caplog, monkeypatch):
    from neural_mp.compat.inc import quantization, utils

    monkeypatch.setattr(utils.logger, "propagate", True)
    with caplog.at_level(logging.INFO, utils.logger.name):
        quantization.fit(net, eval_func=lambda model: 1.0, calib_dataloader=digits[0].loader())
    logged = "\n".join(caplog.messages)
    for text in ("FP32", "result", "size of weights", "Trials", "int8"):
        assert text in logged


@pytest.mark.parametrize(("left", "affordable"), [(-1.0, False), (60.0, True)])
def test_no_measurement_for_the_search_begins_after_the_time_limit(left, affordable):
    """Also if nothing was measured before: the allowance in CPU seconds says nothing of waiting."""
    end = time.monotonic() + left
    probe = MeasuringProbe(None, None, RunCache(), allowance=math.inf, end_time=end)
    assert probe._has_time(time.process_time()) is affordable
