"""Backends of ONNX Runtime in configurations of Intel Neural Compressor are targets here."""

import logging
import warnings

import onnx
import onnxruntime
import pytest
from onnx_nets import as_onnx

from neural_mp.compat.inc.config import (
    MixedPrecisionConfig,
    PostTrainingQuantConfig,
    QuantizationAwareTrainingConfig,
    TuningCriterion,
)
from neural_mp.compat.inc.quantization import fit
from neural_mp.config import IgnoredSettingWarning, parse_settings
from neural_mp.core.enums import Dialect
from neural_mp.errors import ConfigurationError

#: Backend → our target, and whether the backend is named as one without effect.
TARGETS = {
    "default": ("this", False),
    "onnxrt_dnnl_ep": ("this", False),
    "onnxrt_trt_ep": ("tensorrt", False),
    "ipex": ("this", True),
}
FILE = "model: {{name: net, framework: onnxrt_qdq, backend: {}}}"


@pytest.mark.parametrize(("backend", "target", "idle"), [(k, *v) for k, v in TARGETS.items()])
def test_backend_in_python_is_a_target(caplog, backend, target, idle):
    with caplog.at_level(logging.WARNING):
        options = PostTrainingQuantConfig(backend=backend).settings().options
    assert options.target == target
    assert ("has no effect" in caplog.text) == idle


@pytest.mark.parametrize(("backend", "target", "idle"), [(k, *v) for k, v in TARGETS.items()])
def test_backend_in_a_file_is_a_target(backend, target, idle):
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", IgnoredSettingWarning)
        settings = parse_settings(FILE.format(backend), origin="conf.yaml")
    assert settings.dialect is Dialect.INC
    assert settings.options.target == target
    assert any("model.backend is ignored" in str(item.message) for item in caught) == idle


@pytest.mark.parametrize("backend", ["onnxrt_cuda_ep", "onnxrt_dml_ep"])
def test_kernels_of_a_gpu_are_refused_with_the_targets_instead(backend):
    message = f"got '{backend}'.*no plans for a GPU's own kernels.*onnxrt_trt_ep.*target='qdq'"
    for config in (PostTrainingQuantConfig, MixedPrecisionConfig):
        with pytest.raises(ConfigurationError, match=message):
            config(backend=backend).settings()
    with pytest.raises(
        ConfigurationError, match=rf"conf\.yaml, line 1: model\.backend: .*{message}"
    ):
        parse_settings(FILE.format(backend), origin="conf.yaml")


def test_target_in_the_file_has_priority():
    settings = parse_settings(f"target: qdq\n{FILE.format('onnxrt_trt_ep')}")
    assert settings.options.target == "qdq"


def test_default_strategy_of_inc_is_that_of_accelerators():
    options = PostTrainingQuantConfig(backend="onnxrt_trt_ep").settings().options
    assert not options.is_set("strategy")
    tuning = TuningCriterion(strategy="random")
    chosen = PostTrainingQuantConfig(backend="onnxrt_trt_ep", tuning_criterion=tuning)
    assert chosen.settings().options.strategy == "random"
    assert PostTrainingQuantConfig().settings().options.strategy == "basic"


def test_training_has_no_target(caplog):
    with caplog.at_level(logging.WARNING):
        QuantizationAwareTrainingConfig(backend="onnxrt_trt_ep").rules()
    assert "backend='onnxrt_trt_ep' has no effect" in caplog.text


@pytest.mark.slow
@pytest.mark.usefixtures("quick_runs")
def test_script_for_tensorrt_writes_a_file_with_pairs_of_q_and_dq(net, digits, tmp_path):
    images, labels = digits[1].images[:200], digits[1].labels[:200]
    data = [(images[s : s + 50], labels[s : s + 50]) for s in range(0, 200, 50)]
    config = PostTrainingQuantConfig(backend="onnxrt_trt_ep", device="gpu")

    def accuracy(model):
        session = onnxruntime.InferenceSession(model.SerializeToString())
        (outputs,) = session.run(None, {session.get_inputs()[0].name: images})
        return float((outputs.argmax(1) == labels).mean())

    q_model = fit(as_onnx(net), config, calib_dataloader=data, eval_func=accuracy)
    assert q_model.met
    assert q_model.report.accelerator.name == "tensorrt"
    q_model.save(str(tmp_path / "model.onnx"))
    graph = onnx.load(tmp_path / "model.onnx").graph
    kinds = {node.op_type for node in graph.node}
    assert {"QuantizeLinear", "DequantizeLinear"} <= kinds
    assert not {node.domain for node in graph.node} - {""}
