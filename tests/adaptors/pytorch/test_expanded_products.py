"""Products of many rows, for which stored weights are expanded some outputs at a time."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from neural_mp.adaptors.common.weights.grouped_weight import Quantizer
from neural_mp.adaptors.pytorch.graph import kernel_ops, qdq_ops
from neural_mp.core.quant_spec import QuantSpec

OUTPUTS, INPUTS = 1200, 1024  # three parts
DRAW = np.random.default_rng(0)
WEIGHT = DRAW.normal(size=(OUTPUTS, INPUTS)).astype(np.float32)
BIAS = torch.from_numpy(DRAW.normal(size=OUTPUTS).astype(np.float32))
#: Largest relative error of a bfloat16 number.
STEP = 2**-8


def _rows(count: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.from_numpy(DRAW.normal(size=(count, INPUTS)).astype(np.float32)).to(dtype)


def _assert_close(outputs: torch.Tensor, x: torch.Tensor, weight: np.ndarray, limit: float) -> None:
    expected = x.double().numpy() @ weight.astype(np.float64).T + BIAS.double().numpy()
    assert outputs.dtype is x.dtype
    error = np.linalg.norm(outputs.double().numpy() - expected)
    assert error < limit * np.linalg.norm(expected)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("rows", [1, 40, 150])
def test_int8_weights_give_the_product_of_the_rounded_weight(rows, dtype):
    q, scales = qdq_ops.quantize_weight(torch.from_numpy(WEIGHT), 127)
    x = _rows(rows, dtype)
    outputs = kernel_ops.weight_only_linear(x, q, scales, BIAS.to(dtype))
    _assert_close(outputs, x, q.numpy() * scales.numpy()[:, None], STEP)


@pytest.mark.parametrize("rows", [1, 64, 65, 150])
@pytest.mark.parametrize("words", ["uint4 asymmetric per_group 128", "int4 symmetric per_group 32"])
def test_4_bits_give_the_product_of_the_rounded_weight(rows, words):
    weight = Quantizer(QuantSpec.parse(words)).round_to_nearest(WEIGHT)
    stored = qdq_ops.pack_stored_parts(weight)
    x = _rows(rows)
    outputs = kernel_ops.four_bit_linear(x, kernel_ops.KernelWeight(), *stored, BIAS)
    _assert_close(outputs, x, weight.to_floats(), STEP)


@pytest.mark.parametrize("bits", [2, 3])
def test_few_bits_give_the_product_of_the_rounded_weight(bits):
    weight = Quantizer(QuantSpec.parse(f"uint{bits} asymmetric per_group 64")).round_to_nearest(
        WEIGHT
    )
    x = _rows(5)
    outputs = kernel_ops.low_bit_linear(x, *qdq_ops.pack_stored_parts(weight), bits, BIAS)
    _assert_close(outputs, x, weight.to_floats(), STEP)


def test_float16_inputs_do_not_overflow():
    q = torch.full((16, 64), 127, dtype=torch.int8)
    x = torch.full((50, 64), 100, dtype=torch.float16)
    outputs = kernel_ops.weight_only_linear(x, q, torch.full((16,), 1e-3), None)
    torch.testing.assert_close(outputs, torch.full((50, 16), 812.8, dtype=torch.float16))


def test_the_zero_point_stays_zero_for_many_rows():
    weight = np.array(WEIGHT[:32, :256])
    weight[:, ::2] = 0
    stored = qdq_ops.pack_stored_parts(
        Quantizer(QuantSpec.parse("uint4 asymmetric per_group 32")).round_to_nearest(weight)
    )
    x = torch.zeros(120, 256)
    x[:, ::2] = 1
    outputs = kernel_ops.four_bit_linear(x, kernel_ops.KernelWeight(), *stored, None)
    # Weights in float32 keep the error of offsets in bfloat16; in bfloat16, the errors cancel.
    exact = torch.ops.mkldnn._is_mkldnn_bf16_supported()
    assert outputs.abs().max() <= (0 if exact else 0.01 * weight.max() * 128)
