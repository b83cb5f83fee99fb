"""Corrected weights in PyTorch: from the plan to a saved model, and errors on the way."""

from __future__ import annotations

import numpy as np
import onnxruntime
import pytest
import torch
from torch import nn

import neural_mp
from neural_mp import PrecisionPlan, convert_with_plan
from neural_mp.adaptors.pytorch.adaptor import PyTorchAdaptor
from neural_mp.adaptors.pytorch.decoders import decoder_blocks
from neural_mp.core.enums import Capture
from neural_mp.core.precision import OpConfig, Precision
from neural_mp.core.quant_spec import QuantSpec
from neural_mp.errors import PlanError

DENSE = ("hidden", "last")


class Words(nn.Module):
    """An embedding with two channels of outliers and two dense layers."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(50, 64)
        self.hidden = nn.Linear(64, 128)
        self.last = nn.Linear(128, 32)
        with torch.no_grad():
            self.table.weight[:, :2] *= 30
            self.hidden.weight[:, :2] /= 10

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(torch.relu(self.hidden(self.table(x))))


@pytest.fixture(scope="module")
def net() -> Words:
    torch.manual_seed(0)
    return Words().eval()


@pytest.fixture(scope="module")
def batches() -> list[torch.Tensor]:
    torch.manual_seed(1)
    return [torch.randint(50, (16, 7)) for _ in range(4)]


def _plan(corrections: str, ops: tuple[str, ...] = DENSE) -> PrecisionPlan:
    spec = QuantSpec.parse(f"uint4 asymmetric per_group 64 {corrections}")
    return PrecisionPlan(dict.fromkeys(ops, OpConfig(Precision.INT4, spec)))


def _converted(net, corrections, batches, capture=Capture.WHOLE):
    return convert_with_plan(
        net, _plan(corrections), inputs=batches[0], calibration=batches, capture=capture
    )


def _noise(net, converted, batches) -> float:
    with torch.no_grad():
        return sum(float((converted(x) - net(x)).square().mean()) for x in batches)


@pytest.mark.slow
@pytest.mark.parametrize("capture", [Capture.WHOLE, Capture.LAYERS])
def test_each_correction_reduces_the_error_of_the_outputs(net, batches, capture):
    noise = {
        method: _noise(net, _converted(net, method, batches, capture), batches)
        for method in ("rtn", "awq", "gptq", "awq gptq")
    }
    assert noise["awq"] < noise["rtn"]
    assert noise["gptq"] < noise["rtn"]
    assert noise["awq gptq"] < 0.7 * noise["rtn"]


def test_few_and_many_rows_run_with_the_same_corrected_weight(net, batches):
    converted = _converted(net, "awq gptq", batches)
    many = torch.cat(batches)
    together, single = converted(many), torch.cat([converted(row[None]) for row in many])
    assert (together - single).norm() < 2**-6 * together.norm()


@pytest.mark.slow
def test_saved_and_exported_models_have_the_corrected_weights(net, batches, tmp_path):
    converted = _converted(net, "awq gptq", batches)
    converted.save(tmp_path / "saved")
    again = neural_mp.load(tmp_path / "saved")
    assert torch.equal(again(batches[0]), converted(batches[0]))
    assert again.plan == converted.plan
    assert "awq gptq" in str(again.plan["hidden"].weight)
    converted.export_onnx(tmp_path / "net.onnx")
    session = onnxruntime.InferenceSession(
        tmp_path / "net.onnx", providers=["CPUExecutionProvider"]
    )
    (outputs,) = session.run(None, {session.get_inputs()[0].name: batches[0].numpy()})
    np.testing.assert_allclose(outputs, converted(batches[0]), rtol=0, atol=0.1)


@pytest.mark.slow
def test_conversion_is_repeatable(net, batches):
    first, second = (_converted(net, "awq gptq", batches) for _ in range(2))
    assert torch.equal(first(batches[0]), second(batches[0]))


def test_moments_are_those_of_the_rows_a_layer_reads(net, batches):
    adaptor = PyTorchAdaptor()
    model = adaptor.load(net, example=batches[0])
    moments = decoder_blocks.collect_input_moments(model, batches, ["hidden"])["hidden"]
    with torch.no_grad():
        rows = net.table(torch.cat(batches)).reshape(-1, 64)
    np.testing.assert_allclose(moments.products, rows.T @ rows / len(rows), rtol=1e-4, atol=1e-4)
    np.testing.assert_allclose(moments.magnitudes, rows.abs().mean(0), rtol=1e-4)


def test_corrections_with_data_ask_for_calibration(net, batches):
    with pytest.raises(PlanError, match="'gptq' of op 'hidden' requires calibration data"):
        convert_with_plan(net, _plan("gptq"), inputs=batches[0])
    assert convert_with_plan(net, _plan("hqq"), inputs=batches[0])(batches[0]).shape == (16, 7, 32)


def test_a_table_takes_no_correction_with_data(net, batches):
    plan = _plan("gptq", ("table",))
    with pytest.raises(PlanError, match=r"'table' .*does not support INT4.*gptq"):
        convert_with_plan(net, plan, inputs=batches[0], calibration=batches)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("uint4 asymmetric per_group 64 hqq gptq", "hqq excludes"),
        ("uint4 asymmetric per_group 64 rtn gptq", "rtn .* excludes"),
        ("int8 symmetric per_channel gptq", "require granularity per_group"),
        ("uint4 asymmetric per_group 64 gtpq", "did you mean 'gptq'"),
    ],
)
def test_corrections_that_do_not_fit_are_refused(words, message):
    with pytest.raises(PlanError, match=message):
        QuantSpec.parse(words)


def test_a_plan_names_its_corrections():
    spec = QuantSpec.parse("uint4 asymmetric per_group 128 gptq awq")
    assert str(spec) == "uint4 asymmetric per_group 128 minmax awq gptq"
    assert QuantSpec.parse(str(spec)) == spec
    assert QuantSpec.parse("uint4 asymmetric per_group 128 rtn").corrections == ()
    assert str(OpConfig(Precision.INT4, spec)) == "int4 (weight only, awq, gptq)"


class Normed(nn.Module):
    """Two dense layers that read one normalization with channels of outliers."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(64)
        self.first, self.second = nn.Linear(64, 32), nn.Linear(64, 32)
        with torch.no_grad():
            self.norm.weight[:3] *= 30

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        normed = self.norm(x)
        return self.first(normed) + self.second(normed)


def test_a_normalization_holds_the_factors_of_the_layers_behind():
    torch.manual_seed(0)
    net, data = Normed().eval(), [torch.randn(32, 64) for _ in range(4)]
    plan = _plan("awq", ("first", "second"))
    nearest = convert_with_plan(net, _plan("rtn", ("first", "second")), inputs=data[0])
    converted = convert_with_plan(net, plan, inputs=data[0], calibration=data)
    targets = [str(node.target) for node in converted.loaded.held.parts[""].portable.graph.nodes]
    assert "aten.mul.Tensor" not in targets
    assert _noise(net, converted, data) < 0.5 * _noise(net, nearest, data)
