"""ResNet-50, small images: all of it in INT8, all of it in BF16."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest
import torch
from kernel_trace import kernels_by_op, ops_in_integers
from machine import machine
from resnet50 import resnet50
from torch.fx import Interpreter

from neural_mp.adaptors.pytorch.adaptor import PyTorchAdaptor
from neural_mp.core.precision import Precision
from neural_mp.testing import signal_to_noise, uniform

pytestmark = pytest.mark.slow

INT8, BF16 = Precision.INT8, Precision.BF16


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
    call = converted.convention.call(images)
    assert ops_in_integers(converted, call) == dict.fromkeys(plan, 1)
    floats = [name for kernels in kernels_by_op(converted, call).values() for name in kernels]
    assert not [name for name in floats if name in ("aten::convolution", "aten::linear")]
    counts = adaptor.conversion_counts(converted)
    assert counts.quantize == 2  # the images, and the means before the dense layer
    assert counts.dequantize <= 1


def test_all_in_bf16_takes_two_casts_and_every_layer(resnet):
    adaptor, model, space, observed, images, reference = resnet
    converted = adaptor.convert(model, space.resolve(uniform(space, BF16)), observed, space)
    assert adaptor.conversion_counts(converted).casts == 2
    result = adaptor.predict(converted, images)
    assert result.dtype == reference.dtype == np.float32
    assert signal_to_noise(reference, result) > 40
    computed: Counter[tuple[str, torch.dtype]] = Counter()

    class Spy(Interpreter):
        def run_node(self, n):
            if n.op == "call_function" and ("conv2d" in str(n.target) or "linear" in str(n.target)):
                args, _ = self.fetch_args_kwargs_from_env(n)
                kinds = {value.dtype for value in args if isinstance(value, torch.Tensor)}
                assert len(kinds) == 1
                computed[str(n.target), kinds.pop()] += 1
            return super().run_node(n)

    with torch.no_grad():
        Spy(converted.runnable).run(torch.from_numpy(images))
    assert computed == {
        ("aten.conv2d.default", torch.bfloat16): 53,
        ("aten.linear.default", torch.bfloat16): 1,
    }
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
