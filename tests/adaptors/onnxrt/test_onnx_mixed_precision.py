"""The object a user drives, as the README shows it, on ONNX models in three forms."""

import numpy as np
import onnx
import pytest
import torch
from nets import small_net
from onnx_nets import kernels, run

import neural_mp
from neural_mp import MixedPrecision, PrecisionPlan, common
from neural_mp.errors import UnsupportedPrecisionError
from neural_mp.hardware import Hardware


@pytest.fixture(params=["file", "message", "bytes"])
def model(request, net, net_file):
    return {"file": net_file, "message": net, "bytes": net.SerializeToString()}[request.param]


@pytest.fixture
def reference(net, digits):
    return run(net, image=digits[1].images)[0]


@pytest.mark.parametrize("precisions", ["bf16", "int8,bf16", ["int8", "bf16"], "fp16"])
def test_a_model_alone(monkeypatch, model, reference, digits, precisions):
    monkeypatch.setenv("FORCE_BF16", "1")
    monkeypatch.setenv("FORCE_FP16", "1")

    converter = MixedPrecision()
    converter.precisions = precisions
    converter.model = model
    optimized_model = converter()

    lowest = "fp16" if precisions == "fp16" else "bf16"
    assert {config.precision for config in optimized_model.plan.values()} == {lowest}
    assert optimized_model.met is None
    given = optimized_model(digits[1].images)
    assert (given.argmax(1) == reference.argmax(1)).mean() > 0.97
    assert given.dtype == np.float32
    assert isinstance(optimized_model.model, onnx.ModelProto)


def test_a_yaml_file(monkeypatch, tmp_path, model, digits):
    monkeypatch.setenv("FORCE_BF16", "1")
    for name, split in zip(("train", "test"), digits, strict=True):
        np.savez(tmp_path / f"{name}.npz", inputs=split.images, labels=split.labels)
    (tmp_path / "conf.yaml").write_text(
        """
model: {name: digits, framework: onnxrt}
mixed_precision: {precisions: "int8,bf16"}
quantization:
  calibration:
    sampling_size: 200
    dataloader: {batch_size: 50, dataset: {numpy: {path: train.npz}}}
evaluation:
  accuracy:
    metric: {topk: 1}
    dataloader: {batch_size: 100, dataset: {numpy: {path: test.npz}}}
tuning:
  accuracy_criterion: {absolute: 0.02, higher_is_better: true}
  exit_policy: {max_trials: 20}
"""
    )
    converter = MixedPrecision("./conf.yaml")
    converter.model = model
    output_model = converter()

    assert output_model.met
    assert output_model.report.target == pytest.approx(output_model.report.baseline_accuracy - 0.02)
    assert output_model.observations.samples == 200
    assert output_model.report.op_counts["Conv"] == {"int8": 6}


def test_a_metric_and_data(monkeypatch, model, reference, digits, accuracy):
    monkeypatch.setenv("FORCE_BF16", "1")
    dataset = digits[1]

    converter = MixedPrecision()
    converter.metric = accuracy
    converter.precisions = "bf16"
    converter.eval_dataloader = common.DataLoader(dataset)
    converter.model = model
    output_model = converter()

    assert output_model.met
    report = output_model.report
    expected = (reference.argmax(1) == dataset.labels).mean()
    assert report.baseline_accuracy == pytest.approx(expected)
    assert report.evaluations == accuracy.evaluations == 2
    assert report.op_counts["Conv"] == {"bf16": 6}


def test_bf16_alone_without_hardware_is_refused(net, plain_machine):
    converter = MixedPrecision()
    converter.hardware = plain_machine
    converter.precisions = "bf16"
    converter.model = net
    with pytest.raises(UnsupportedPrecisionError, match=r"avx512_bf16.*FORCE_BF16=1"):
        converter()


def test_one_bad_channel_does_not_cost_the_rest(hostile_net, deep, digits, plain_machine, accuracy):
    """The INT8-hostile net: all-INT8 misses, and yet most of the layers stay in INT8."""
    images = digits[1].images
    (hostile_logits,), (logits,) = run(hostile_net, image=images), run(deep, image=images)
    np.testing.assert_allclose(hostile_logits, logits, rtol=1e-2, atol=2e-2)
    converter = MixedPrecision()
    converter.hardware = plain_machine
    converter.precisions = "int8"
    converter.metric = accuracy
    converter.calib_dataloader = digits[0].loader()
    converter.eval_dataloader = digits[1].loader()
    converter.model = hostile_net
    result = converter()
    assert result.met
    assert not result.trials[0].met  # all INT8
    kept = [op for op, config in result.plan.items() if config.precision == "int8"]
    assert len(kept) >= 7
    found = kernels(result.model)
    assert found["QLinearConv"] + found["MatMulIntegerToFloat"] == len(kept)


@pytest.fixture
def quantized(net, digits, plain_machine):
    converter = MixedPrecision()
    converter.hardware = plain_machine
    converter.precisions = "int8"
    converter.calib_dataloader = digits[0].loader()
    converter.model = net
    return converter()


def test_a_saved_file_runs_in_plain_onnx_runtime_and_says_its_plan(quantized, digits, tmp_path):
    path = tmp_path / "int8.onnx"
    quantized.save(path)
    images = digits[1].images
    np.testing.assert_array_equal(run(str(path), image=images)[0], quantized(images))
    stored = onnx.load(path)
    onnx.checker.check_model(stored, full_check=True)
    properties = {item.key: item.value for item in stored.metadata_props}
    assert PrecisionPlan.from_yaml(properties["neural_mp.plan"]) == quantized.plan
    assert [value.name for value in stored.graph.output] == ["logits"]
    assert all(node.name for node in stored.graph.node)


def test_a_saved_folder_is_loaded_and_a_saved_plan_replayed(quantized, net, digits, tmp_path):
    from neural_mp.conversion import convert_with_plan

    images = digits[1].images
    quantized.save(tmp_path / "saved")
    np.testing.assert_array_equal(neural_mp.load(tmp_path / "saved")(images), quantized(images))
    quantized.save_plan(tmp_path / "plan.yaml")
    replayed = convert_with_plan(net, tmp_path / "plan.yaml")
    np.testing.assert_array_equal(replayed(images), quantized(images))


def test_dynamic_int8_needs_no_data(digits):
    torch.manual_seed(0)
    net = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(64, 64), torch.nn.ReLU())
    from onnx_nets import as_onnx

    model = as_onnx(net)
    converter = MixedPrecision()
    converter.model = model
    converter.precisions = "int8"
    converter.approach = "dynamic"
    result = converter.fit()
    assert {config.approach for config in result.plan.values()} == {"dynamic"}
    images = digits[1].images[:20]
    (expected,) = run(model, image=images)
    assert np.abs(result(images) - expected).max() < 0.02 * np.abs(expected).max()
    assert {"DynamicQuantizeMatMul", "MatMulIntegerToFloat"} & set(kernels(result.model))


def test_a_torch_model_goes_on_to_onnx_runtime(digits, plain_machine, tmp_path):
    """Tuned as a torch model, written as ONNX, and run there in integers."""
    converter = MixedPrecision()
    converter.hardware = plain_machine
    converter.precisions = "int8"
    converter.calib_dataloader = digits[0].loader()
    converter.model = small_net()
    result = converter()
    result.export_onnx(tmp_path / "exported.onnx")
    images = digits[1].images[:50]
    (given,) = run(str(tmp_path / "exported.onnx"), **{_input(tmp_path / "exported.onnx"): images})
    assert np.abs(given - result(images)).max() < 0.1 * np.abs(given).max()


def _input(path) -> str:
    return onnx.load(path).graph.input[0].name


def test_16_bits_that_only_the_machine_has_come_with_a_warning(net):
    """A machine with BF16, and ONNX Runtime without kernels for it on the CPU."""
    converter = MixedPrecision()
    converter.hardware = Hardware("with BF16", frozenset({"avx512_vnni", "avx512_bf16"}), 2)
    converter.precisions = "bf16"
    converter.model = net
    result = converter()
    assert any("onnxrt has no bf16 kernels" in warning for warning in result.report.warnings)
