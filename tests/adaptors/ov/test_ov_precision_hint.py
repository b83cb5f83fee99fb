"""Plans of INT8 and BF16: INT8 kernels that write BF16 themselves, and FP32 that stays FP32."""

import pickle

import ml_dtypes
import numpy as np
import pytest
import torch
from ov_nets import as_openvino
from torch import nn

from neural_mp.adaptors.openvino.runtime import Runner, choose_precision_hint, ops, ov
from neural_mp.adaptors.registry import get_adaptor_named
from neural_mp.core.hardware import detect
from neural_mp.core.precision import Precision
from neural_mp.testing import signal_to_noise

INT8, BF16, FP32 = Precision.INT8, Precision.BF16, Precision.FP32
ADAPTOR = get_adaptor_named("openvino")


@pytest.fixture(autouse=True)
def _native_bf16():
    if not detect().support(BF16).native:
        pytest.skip("the CPU does not compute in BF16")


@pytest.fixture(scope="module")
def taken_in():
    """Convolutions over channels, by channel, and over channels twice; with what is observed."""
    torch.manual_seed(0)
    net = nn.Sequential(
        nn.Conv2d(1, 32, 1),
        nn.ReLU(),
        nn.Conv2d(32, 32, 3, padding=1, groups=32),
        nn.ReLU(),
        nn.Conv2d(32, 16, 1),
        nn.ReLU(),
        nn.Conv2d(16, 8, 1),
    )
    batch = np.random.default_rng(0).standard_normal((4, 1, 8, 8), dtype=np.float32)
    model = ADAPTOR.load(as_openvino(net.eval()))
    space = ADAPTOR.space(model, detect())
    return model, space, ADAPTOR.observe(model, [batch], space), batch


def converted(taken_in, *precisions):
    """Return the model with its four convolutions in some precisions, and its kernels by layer."""
    model, space, observations, batch = taken_in
    layers = [op.name for op in space.graph if "Convolution" in op.type]
    chosen = {o: space.choice(o, p) for o, p in zip(layers, precisions, strict=True) if p != FP32}
    plan = space.resolve(space.fp32_plan().replacing(chosen))
    assert [plan.effective[layer] for layer in layers] == list(precisions)
    result = ADAPTOR.convert(model, plan, observations, space)
    runner = Runner(result.program)
    runner(result.order_feeds(result.signature.bind_inputs(batch)))
    kernels = [kernel for kernel in runner.executed_kernels() if kernel.type == "Convolution"]
    return result, [kernel.precision for kernel in kernels]


def test_bf16_behind_int8_needs_no_casts(taken_in):
    model, _, _, batch = taken_in
    result, kernels = converted(taken_in, INT8, BF16, INT8, INT8)
    assert kernels == ["u8", "bf16", "u8", "u8"]
    assert result.counts.casts == 0
    assert signal_to_noise(ADAPTOR.predict(model, batch), ADAPTOR.predict(result, batch)) > 25


@pytest.mark.parametrize(
    ("precisions", "kernels"),
    [
        ((INT8, BF16, FP32, FP32), ["u8", "bf16", "f32", "f32"]),
        ((FP32, INT8, BF16, INT8), ["f32", "u8", "bf16", "u8"]),
        ((INT8, FP32, INT8, INT8), ["u8", "f32", "u8", "u8"]),
    ],
)
def test_an_op_in_fp32_runs_in_fp32_beside_int8_and_bf16(taken_in, precisions, kernels):
    assert converted(taken_in, *precisions)[1] == kernels


def test_a_saved_and_a_pickled_model_compute_the_same(taken_in, tmp_path):
    result, _ = converted(taken_in, INT8, BF16, INT8, INT8)
    ADAPTOR.save(result, tmp_path)
    expected = ADAPTOR.predict(result, taken_in[-1])
    for restored in (ADAPTOR.restore(tmp_path), pickle.loads(pickle.dumps(result))):
        assert (
            choose_precision_hint(restored.program)
            == choose_precision_hint(result.program)
            == "bf16"
        )
        np.testing.assert_array_equal(ADAPTOR.predict(restored, taken_in[-1]), expected)


def test_weights_in_bf16_take_two_bytes(taken_in):
    by_hint, _ = converted(taken_in, INT8, BF16, INT8, INT8)
    in_fp32, _ = converted(taken_in, INT8, FP32, INT8, INT8)
    values = 32 * 3 * 3 + 32
    saved = ADAPTOR.weight_bytes(in_fp32) - ADAPTOR.weight_bytes(by_hint)
    assert 2 * values - 64 <= saved <= 2 * values + 64


@pytest.mark.parametrize("precisions", [(INT8, BF16, INT8, BF16), (FP32, BF16, FP32, BF16)])
def test_weights_in_bf16_are_stored_by_their_bits_and_rounded_to_nearest(
    taken_in, precisions, monkeypatch
):
    """Promise: no constant is filled from an array of BF16, which takes 40 times as long."""
    given, make_constant = [], ops.constant

    def noted(value, *args, **options):
        given.append(np.asarray(value).dtype if isinstance(value, np.ndarray) else None)
        return make_constant(value, *args, **options)

    monkeypatch.setattr(ops, "constant", noted)
    result, _ = converted(taken_in, *precisions)
    assert given
    assert ml_dtypes.bfloat16 not in given
    stored = [
        np.asarray(node.data).view(np.uint16)
        for node in result.program.get_ops()
        if node.get_type_name() == "Constant" and node.get_element_type() == ov.Type.bf16
    ]
    weights = [
        np.asarray(node.data)
        for node in taken_in[0].program.get_ops()
        if node.get_type_name() == "Constant" and node.get_element_type() == ov.Type.f32
    ]
    rounded = [w.astype(ml_dtypes.bfloat16).view(np.uint16).tobytes() for w in weights]
    assert len(stored) >= 2
    assert all(bits.tobytes() in rounded for bits in stored)
