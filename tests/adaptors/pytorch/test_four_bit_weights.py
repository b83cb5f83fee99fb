"""4-bit weights in PyTorch: numbers, kernels, refusals, storage and ONNX export."""

from __future__ import annotations

import numpy as np
import onnxruntime
import pytest
import torch
from torch import nn

import neural_mp
from neural_mp import PrecisionPlan, convert_with_plan
from neural_mp.adaptors.common.weights.grouped_weight import Quantizer
from neural_mp.adaptors.pytorch.adaptor import PyTorchAdaptor
from neural_mp.core.hardware import detect
from neural_mp.core.precision import OpConfig, Precision
from neural_mp.core.quant_spec import QuantSpec
from neural_mp.errors import PlanError

SPEC = QuantSpec.parse("uint4 asymmetric per_group 64")
INT4 = OpConfig(Precision.INT4, SPEC)


class Words(nn.Module):
    """An embedding and two dense layers, the last of which has too few outputs for the kernel."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(50, 64)
        self.hidden = nn.Linear(64, 128)
        self.odd = nn.Linear(128, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.odd(torch.relu(self.hidden(self.table(x))))


@pytest.fixture(scope="module")
def net() -> Words:
    torch.manual_seed(0)
    return Words().eval()


@pytest.fixture(scope="module")
def converted(net):
    plan = PrecisionPlan({"table": INT4, "hidden": INT4})
    return convert_with_plan(net, plan, inputs=torch.zeros(2, 7, dtype=torch.long))


def _rounded(weight: torch.Tensor) -> torch.Tensor:
    return torch.from_numpy(Quantizer(SPEC).round_to_nearest(weight.detach().numpy()).to_floats())


@pytest.mark.parametrize("rows", [1, 60, 200])
def test_results_are_those_of_the_rounded_weights(net, converted, rows):
    x = torch.randint(0, 50, (rows, 1))
    with torch.no_grad():
        hidden = nn.functional.linear(
            _rounded(net.table.weight)[x], _rounded(net.hidden.weight), net.hidden.bias
        )
        expected = net.odd(torch.relu(hidden))
    noise = (converted(x) - expected).norm() / expected.norm()
    assert noise < 2**-7  # inputs of the kernel are rounded to bfloat16


def test_4_bits_take_an_eighth_of_the_memory_and_two_parameters_a_group(net, converted):
    weights = net.table.weight.numel() + net.hidden.weight.numel()
    groups = weights // 64
    rest = sum(v.nbytes for v in (net.hidden.bias, net.odd.weight, net.odd.bias))
    size = converted.adaptor.weight_bytes(converted.held)
    assert size == weights // 2 + 2 * 2 * groups + rest


def test_the_audit_confirms_the_kernel(converted):
    ops = {op.name: op for op in converted.audit().ops}
    assert ops["hidden"].verdict == "as planned"
    assert "aten::_weight_int4pack_mm_for_cpu" in ops["hidden"].ran.kernels
    assert ops["table"].verdict == "as planned"


def test_saved_and_loaded_results_are_identical(converted, tmp_path):
    x = torch.randint(0, 50, (3, 5))
    converted.save(tmp_path / "saved")
    again = neural_mp.load(tmp_path / "saved")
    assert torch.equal(again(x), converted(x))
    assert again.plan == converted.plan


@pytest.mark.slow
def test_the_onnx_file_computes_with_the_same_weights(converted, tmp_path):
    x = np.random.default_rng(0).integers(50, size=(3, 7))
    converted.export_onnx(tmp_path / "net.onnx")
    session = onnxruntime.InferenceSession(
        tmp_path / "net.onnx", providers=["CPUExecutionProvider"]
    )
    (outputs,) = session.run(None, {session.get_inputs()[0].name: x})
    np.testing.assert_allclose(outputs, converted(x), rtol=0, atol=2e-2)


def test_ops_without_a_4_bit_kernel_name_the_reason(net):
    adaptor = PyTorchAdaptor()
    model = adaptor.load(net, example=torch.zeros(2, 7, dtype=torch.long))
    space = adaptor.space(model, detect({}))
    reason = "the kernel for weights below 8 bits requires a multiple of 16 outputs, got 10"
    assert space.capabilities["odd"].refusal_reason(Precision.INT4) == reason
    odd = nn.Sequential(nn.Linear(20, 16)).eval()
    space = adaptor.space(adaptor.load(odd, example=torch.zeros(2, 20)), detect({}))
    assert "a group size divides (128, 64, 32), got 20" in str(
        space.capabilities["0"].refusal_reason(Precision.INT4)
    )


def test_a_plan_with_another_group_size_is_refused_with_the_sizes_that_fit(net):
    spec = QuantSpec.parse("uint4 asymmetric per_group 48")
    plan = PrecisionPlan({"hidden": OpConfig(Precision.INT4, spec)})
    with pytest.raises(PlanError, match=r"does not support INT4 .*per_group 48.*per_group 64"):
        convert_with_plan(net, plan, inputs=torch.zeros(2, 7, dtype=torch.long))
