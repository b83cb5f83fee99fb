"""Weights in 2 and 3 bits in PyTorch: grid, packing, expansion, storage and the ONNX file."""

from __future__ import annotations

import numpy as np
import onnxruntime
import pytest
import torch
from torch import nn

import neural_mp
from neural_mp import PrecisionPlan, convert_with_plan
from neural_mp.adaptors.common.weights.grouped_weight import BitOrder, Quantizer, pack_codes
from neural_mp.adaptors.pytorch.graph.qdq_ops import unpack_stored_codes
from neural_mp.core.precision import OpConfig, Precision
from neural_mp.core.quant_spec import QuantSpec
from neural_mp.errors import PlanError


@pytest.fixture(scope="module", params=[2, 3])
def bits(request) -> int:
    return request.param


@pytest.fixture(scope="module")
def spec(bits) -> QuantSpec:
    return QuantSpec.parse(f"uint{bits} asymmetric per_group 32")


@pytest.fixture(scope="module")
def net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Embedding(50, 64), nn.Linear(64, 48), nn.ReLU(), nn.Linear(48, 10))


@pytest.fixture(scope="module")
def converted(net, bits, spec):
    plan = PrecisionPlan(dict.fromkeys(("0", "1"), OpConfig(Precision(f"int{bits}"), spec)))
    return convert_with_plan(net.eval(), plan, inputs=torch.zeros(2, 7, dtype=torch.long))


def test_all_codes_cover_the_range_of_a_group(bits, spec):
    weight = np.random.default_rng(0).normal(0.2, 1, (5, 64)).astype(np.float32)
    quantized = Quantizer(spec).round_to_nearest(weight)
    assert set(np.unique(quantized.codes)) == set(range(2**bits))
    steps = np.repeat(quantized.scales, 32, axis=1)
    assert (np.abs(quantized.to_floats() - weight) <= steps * (0.5 + 2**bits / 256)).all()


def test_packed_codes_are_read_back(bits):
    codes = np.random.default_rng(0).integers(2**bits, size=(3, 16)).astype(np.uint8)
    stored = pack_codes(codes, bits, BitOrder.UPPER_FIRST)
    assert stored.shape == (3, 2 * bits)
    assert (unpack_stored_codes(torch.from_numpy(stored), bits).numpy() == codes).all()


def test_results_are_those_of_the_rounded_weights(net, converted, spec):
    def rounded(layer):
        return torch.from_numpy(
            Quantizer(spec).round_to_nearest(layer.weight.detach().numpy()).to_floats()
        )

    x = torch.randint(0, 50, (20, 1))
    with torch.no_grad():
        hidden = nn.functional.linear(rounded(net[0])[x], rounded(net[1]), net[1].bias)
        expected = net[3](torch.relu(hidden))
    assert (converted(x) - expected).norm() < 2**-7 * expected.norm()


def test_codes_take_their_bits_of_memory(net, converted, bits):
    weights = net[0].weight.numel() + net[1].weight.numel()
    rest = sum(v.nbytes for v in (net[1].bias, net[3].weight, net[3].bias))
    size = converted.adaptor.weight_bytes(converted.held)
    assert size == weights * bits // 8 + 2 * 2 * weights // 32 + rest


@pytest.mark.slow
def test_saved_and_exported_models_compute_the_same(converted, tmp_path):
    x = torch.randint(0, 50, (3, 5))
    converted.save(tmp_path / "saved")
    assert torch.equal(neural_mp.load(tmp_path / "saved")(x), converted(x))
    converted.export_onnx(tmp_path / "net.onnx")
    session = onnxruntime.InferenceSession(
        tmp_path / "net.onnx", providers=["CPUExecutionProvider"]
    )
    (outputs,) = session.run(None, {session.get_inputs()[0].name: x.numpy()})
    np.testing.assert_allclose(outputs, converted(x), rtol=0, atol=2e-2)


def test_a_precision_and_its_weight_have_the_same_bits():
    with pytest.raises(PlanError, match="int2 must have 2 bits, got 4"):
        OpConfig(Precision.INT2, QuantSpec.parse("uint4 asymmetric per_group 32"))
