"""The object a user drives, as the README shows it, on ONNX models in three forms."""

import numpy as np
import onnx
import pytest
import torch
from machine import INTEGER_FLAGS
from nets import small_net
from onnx_nets import kernels, run

import neural_mp
from neural_mp import MixedPrecision, PrecisionPlan
from neural_mp.amp import AutoMixedPrecisionOptions
from neural_mp.core.hardware import Hardware
from neural_mp.testing import ApiContract, ModelFormContract

pytestmark = pytest.mark.slow


class OnOnnx:
    framework = "onnxrt"
    native = onnx.ModelProto
    convolution = "Conv"
    casts = None

    @pytest.fixture
    def reference(self, net, digits):
        return run(net, image=digits[1].images)[0]


@pytest.mark.usefixtures("quick_runs")
class TestFace(OnOnnx, ApiContract):
    @pytest.fixture
    def model(self, net_file):
        return net_file

    @pytest.fixture
    def hostile_net(self, _exported):
        return _exported["hostile"]


@pytest.mark.usefixtures("quick_runs")
class TestObjects(OnOnnx, ModelFormContract):
    @pytest.fixture(params=["message", "bytes"])
    def model(self, request, net):
        return net if request.param == "message" else net.SerializeToString()


def test_the_hostile_net_computes_the_same(hostile_net, deep, digits):
    images = digits[1].images
    (hostile_logits,), (logits,) = run(hostile_net, image=images), run(deep, image=images)
    np.testing.assert_allclose(hostile_logits, logits, rtol=1e-2, atol=2e-2)


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


def test_the_file_a_model_came_from_may_be_written_over(tmp_path, net_file, digits, plain_machine):
    converter = MixedPrecision()
    converter.hardware = plain_machine
    converter.precisions = "int8"
    converter.calib_dataloader = digits[0].loader()
    converter.model = net_file
    result = converter()
    images = digits[1].images
    expected = result(images)
    for write in (result.export_onnx, result.save):
        write(tmp_path / "copy.onnx")
        np.testing.assert_array_equal(run(str(tmp_path / "copy.onnx"), image=images)[0], expected)
    result.export_onnx(net_file)
    np.testing.assert_array_equal(run(net_file, image=images)[0], expected)
    assert sorted(file.name for file in tmp_path.glob("*.onnx*")) == ["copy.onnx", "net.onnx"]


def test_a_saved_folder_is_loaded_and_a_saved_plan_replayed(quantized, net, digits, tmp_path):
    from neural_mp.api.replay import convert_with_plan

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
    (outputs,) = run(
        str(tmp_path / "exported.onnx"), **{_input(tmp_path / "exported.onnx"): images}
    )
    assert np.abs(outputs - result(images)).max() < 0.1 * np.abs(outputs).max()


def _input(path) -> str:
    return onnx.load(path).graph.input[0].name


def test_16_bits_that_only_the_machine_has_come_with_a_warning(net):
    """A machine with BF16, and ONNX Runtime without kernels for it on the CPU."""
    converter = MixedPrecision()
    converter.hardware = Hardware("with BF16", INTEGER_FLAGS | {"avx512_bf16"}, 2)
    converter.precisions = "bf16"
    converter.model = net
    result = converter()
    assert any("onnxrt has no bf16 kernels" in warning for warning in result.report.warnings)


@pytest.mark.parametrize(
    ("option", "value", "tried"),
    [
        ("objective", "performance", False),
        ("objective", "modelsize", True),
        ("strategy", "auto_mixed_precision", True),
        ("amp", {"data_type": "BFLOAT16"}, False),
        ("precisions", "int8,bf16", False),
    ],
)
def test_for_speed_nothing_is_tried_that_is_only_emulated(net, digits, option, value, tried):
    converter = MixedPrecision()
    converter.hardware = Hardware("with BF16", INTEGER_FLAGS | {"avx512_bf16"}, 2)
    converter.model, converter.calib_dataloader = net, digits[0].loader()
    if option == "amp":
        value = AutoMixedPrecisionOptions(**value)
    setattr(converter, option, value)
    report = converter().report
    message = "onnxrt has no bf16 kernels here: bf16 is emulated"
    assert any(message in warning for warning in report.warnings) == tried
    assert tried or not report.emulated
