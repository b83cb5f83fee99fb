"""ResNet-50, small images: all of it in INT8, all of it in BF16."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest
import torch
from machine import machine
from resnet50 import resnet50

from neural_mp.adaptors.pytorch.adaptor import PyTorchAdaptor
from neural_mp.core.precision import Precision
from neural_mp.testing import signal_to_noise, uniform

pytestmark = pytest.mark.slow

INT8, BF16, FP32 = Precision.INT8, Precision.BF16, Precision.FP32


@pytest.fixture(scope="module")
def resnet():
    module, adaptor = resnet50(), PyTorchAdaptor()
    images = np.random.default_rng(0).normal(size=(8, 3, 64, 64)).astype(np.float32)
    model = adaptor.load(module, example=images[:2])
    space = adaptor.space(model, machine(BF16))
    observed = adaptor.observe(model, np.split(images, 2), space)
    with torch.no_grad():
        reference = module(torch.from_numpy(images)).numpy()
    return adaptor, model, space, observed, images, reference


def test_all_in_int8_every_layer_is_one_kernel_and_the_logits_hold_25_decibels(resnet):
    adaptor, model, space, observed, images, reference = resnet
    plan = uniform(space, INT8)
    converted = adaptor.convert(model, space.resolve(plan), observed, space)
    assert signal_to_noise(reference, adaptor.predict(converted, images)) > 25
    assert len(plan) == 54
    ran = adaptor.kernel_trace.trace(converted, images)
    # One kernel each, and of other ops none but what moves integers and the mean before the end.
    assert {op: len(ran[op].kernels) for op in plan} == dict.fromkeys(plan, 1)
    assert {op: ran[op].precision for op in plan} == dict.fromkeys(plan, INT8)
    assert {found.runs_in for op, found in ran.items() if op not in plan} == {INT8, FP32}
    assert [op for op, found in ran.items() if found.runs_in is FP32] == ["mean"]
    counts = converted.counts
    assert counts.quantize == 2  # the images, and the means before the dense layer
    assert counts.dequantize <= 1


def test_all_in_bf16_takes_two_casts_and_every_layer(resnet):
    adaptor, model, space, observed, images, reference = resnet
    converted = adaptor.convert(model, space.resolve(uniform(space, BF16)), observed, space)
    assert converted.counts.casts == 2
    result = adaptor.predict(converted, images)
    assert result.dtype == reference.dtype == np.float32
    assert signal_to_noise(reference, result) > 40
    ran = adaptor.kernel_trace.trace(converted, images)
    layers = Counter((op.type, ran[op.name].precision) for op in space.graph if op.weights)
    assert layers == {("conv2d", BF16): 53, ("linear", BF16): 1}
    assert adaptor.size(converted) < 0.51 * adaptor.size(model)


def test_the_saved_int8_model_takes_under_30_percent_of_the_float_weights(resnet, tmp_path):
    adaptor, model, space, observed, images, _ = resnet
    converted = adaptor.convert(model, space.resolve(uniform(space, INT8)), observed, space)
    adaptor.save(converted, tmp_path)
    saved = sum(file.stat().st_size for file in tmp_path.iterdir())
    assert saved < 0.3 * adaptor.size(model)
    restored = adaptor.restore(tmp_path)
    np.testing.assert_array_equal(
        adaptor.predict(restored, images), adaptor.predict(converted, images)
    )
