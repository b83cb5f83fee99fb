"""A path with the suffix of a model file is written as that file, or refused, never a folder."""

from __future__ import annotations

import sys

import dense_runs
import numpy as np
import onnxruntime as ort
import pytest
import torch
from examples_here import run_process
from torch import nn

from neural_mp import ExitPolicy, MixedPrecision, PrecisionPlan, convert_with_plan
from neural_mp.core.precision import OpConfig, Precision
from neural_mp.core.quant_spec import QuantSpec
from neural_mp.errors import ConversionError

pytestmark = pytest.mark.usefixtures("quick_runs")

DYNAMIC = (
    QuantSpec.parse("int8 symmetric per_channel"),
    QuantSpec.parse("uint8 asymmetric per_tensor dynamic"),
)


@pytest.fixture
def here(tmp_path, monkeypatch):
    """A workplace as the working directory."""
    monkeypatch.chdir(dense_runs.write_workplace(tmp_path))
    return tmp_path


@pytest.fixture(scope="module")
def result():
    """A PyTorch net in INT8."""
    torch.manual_seed(0)
    converter = MixedPrecision(precisions="int8", cache=False)
    converter.model = nn.Sequential(nn.Linear(6, 32), nn.ReLU(), nn.Linear(32, 4)).eval()
    converter.calib_dataloader = [(torch.randn(8, 6), torch.zeros(8))]
    converter.exit_policy = ExitPolicy(performance_only=True)
    return converter.fit()


@pytest.mark.slow
def test_a_pytorch_result_is_saved_as_an_onnx_file(result, tmp_path):
    batch = np.random.default_rng(0).normal(size=(8, 6)).astype(np.float32)
    result.save(tmp_path / "one.onnx")
    session = ort.InferenceSession(tmp_path / "one.onnx", providers=["CPUExecutionProvider"])
    (outputs,) = session.run(None, {session.get_inputs()[0].name: batch})
    scale = np.abs(outputs).max()
    np.testing.assert_allclose(outputs, result(batch), atol=0.05 * scale)


_PLAIN = """
import sys, torch
import torch.ao.quantization.fx  # registers torch's own quantized_decomposed ops
program = torch.export.load("one.pt2")
batch, expected = torch.load("io.pt")
for size in (1, 3, len(batch)):
    with torch.no_grad():
        found = program.module()(batch[:size])
    assert (found - expected[:size]).abs().max() < 1e-3 * expected.abs().max()
assert "neural_mp" not in sys.modules
calls = [str(node.target) for node in program.graph.nodes]
assert "quantized_decomposed.quantize_per_tensor.default" in calls
assert "quantized_decomposed.dequantize_per_channel.default" in calls
"""


@pytest.mark.slow
def test_a_pt2_file_runs_in_plain_torch(result, tmp_path):
    result.save(tmp_path / "one.pt2")
    batch = torch.randn(8, 6)
    torch.save((batch, result(batch)), tmp_path / "io.pt")
    run_process(tmp_path, sys.executable, "-c", _PLAIN)


_LOWERED = """
import torch
import torch.ao.quantization.fx
from torch._inductor import config
from torch._inductor.compile_fx import compile_fx

kernels = []

def inner_compile(graph, inputs, **options):  # takes the lowered graph in place of compiling it
    kernels.extend(str(node.target) for node in graph.graph.nodes if node.op == "call_function")
    def run(arguments):
        return graph(*arguments)
    run._boxed_call = True
    return run

def backend(graph, inputs):
    return compile_fx(graph, inputs, inner_compile=inner_compile)

program = torch.export.load("one.pt2").module()
batch, expected = torch.load("io.pt")
with config.patch(freezing=True), torch.no_grad():
    found = torch.compile(program, backend=backend)(batch)
assert kernels.count("onednn.qlinear_pointwise.default") == 2, kernels
assert "aten.addmm.default" not in kernels and "aten.mm.default" not in kernels, kernels
assert (found - expected).abs().max() < 1e-2 * expected.abs().max()
"""


@pytest.mark.slow
def test_inductor_lowers_a_pt2_file_to_integer_kernels(result, tmp_path):
    result.save(tmp_path / "one.pt2")
    batch = torch.randn(8, 6)
    torch.save((batch, result(batch)), tmp_path / "io.pt")
    run_process(tmp_path, sys.executable, "-c", _LOWERED)


@pytest.mark.slow
def test_a_result_with_dynamic_ranges_is_refused_as_a_pt2_file(result, tmp_path):
    plan = PrecisionPlan({"0": OpConfig(Precision.INT8, *DYNAMIC)})
    net = nn.Sequential(nn.Linear(64, 32)).eval()
    dynamic = convert_with_plan(net, plan, inputs=torch.zeros(2, 64))
    with pytest.raises(ConversionError, match=r"cannot be written to a .pt2 file.*save a folder"):
        dynamic.save(tmp_path / "one.pt2")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("name", ["one.PB", "one.keras"])
def test_a_file_that_the_framework_cannot_write_is_refused(result, tmp_path, name):
    with pytest.raises(ConversionError, match=r"that ends in .pt2 or .onnx, or to a folder"):
        result.save(tmp_path / name)
    assert list(tmp_path.iterdir()) == []


def test_a_folder_with_a_dot_in_its_name_stays_a_folder(result, tmp_path):
    result.save(tmp_path / "net.v2")
    assert (tmp_path / "net.v2" / "neural_mp.json").is_file()


def test_the_command_refuses_a_file_that_no_framework_writes_before_the_search(here, run):
    code, _, err = run("tune", "conf.yaml", "-o", "out.keras")
    assert code == 2
    assert "cannot be saved as a .keras file" in err
    assert not (here / "neural_mp_workspace").exists()


def test_the_command_writes_the_file_and_replaces_an_earlier_one(here, run):
    for _ in range(2):
        code, out, err = run("tune", "conf.yaml", "-o", "out.onnx")
        assert code == 0, err
        assert "saved to out.onnx" in out
        assert (here / "out.onnx").is_file()


def test_a_result_of_another_framework_than_the_file_is_not_lost(here, run):
    code, out, err = run("tune", "conf.yaml", "-o", "out.pb")
    assert code == 0, err
    assert "a model of onnxrt cannot be saved as a .pb file" in err
    assert "saved to out;" in out
    assert (here / "out" / "neural_mp.json").is_file()
