"""ResNet-50, small images: all of it in INT8, all of it in BF16."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest
import torch
from machine import machine
from torch import nn

from neural_mp.adaptors.pytorch.adaptor import PyTorchAdaptor
from neural_mp.core.precision import Precision
from neural_mp.testing import signal_to_noise, uniform

pytestmark = pytest.mark.slow

INT8, BF16, FP32 = Precision.INT8, Precision.BF16, Precision.FP32


class Bottleneck(nn.Module):
    """Three normed convolutions and a shortcut, which the first of a stage projects."""

    def __init__(self, channels: int, width: int, stride: int) -> None:
        super().__init__()
        self.relu, self.shortcut = nn.ReLU(inplace=True), nn.Identity()
        if channels != 4 * width:
            self.shortcut = self._normed(channels, 4 * width, 1, stride)
        self.narrow = self._normed(channels, width, 1)
        self.spatial = self._normed(width, width, 3, stride)
        self.wide = self._normed(width, 4 * width, 1)

    @staticmethod
    def _normed(before: int, after: int, kernel: int, stride: int = 1) -> nn.Module:
        padding = kernel // 2
        conv = nn.Conv2d(before, after, kernel, stride, padding, bias=False)
        nn.init.kaiming_normal_(conv.weight, mode="fan_out", nonlinearity="relu")
        norm = nn.BatchNorm2d(after)
        norm.running_mean.normal_(0, 0.1)
        norm.running_var.uniform_(0.8, 1.2)
        nn.init.uniform_(norm.weight, 0.3, 0.7)
        nn.init.normal_(norm.bias, 0, 0.1)
        return nn.Sequential(conv, norm)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.wide(self.relu(self.spatial(self.relu(self.narrow(x)))))
        y += self.shortcut(x)
        return self.relu(y)


class ResNet50(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        stem = Bottleneck._normed(3, 64, 7, 2)
        stages: list[nn.Module] = [*stem, nn.ReLU(inplace=True), nn.MaxPool2d(3, 2, 1)]
        channels = 64
        for width, blocks in ((64, 3), (128, 4), (256, 6), (512, 3)):
            for index in range(blocks):
                stride = 2 if index == 0 and width > 64 else 1
                stages.append(Bottleneck(channels, width, stride))
                channels = 4 * width
        self.stages, self.head = nn.Sequential(*stages), nn.Linear(channels, 1000)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.stages(x).mean((2, 3)))


@pytest.fixture(scope="module")
def resnet():
    module, adaptor = ResNet50().eval(), PyTorchAdaptor()
    images = np.random.default_rng(0).normal(size=(8, 3, 64, 64)).astype(np.float32)
    model = adaptor.load(module, example=images[:2])
    space = adaptor.space(model, machine(BF16))
    observed = adaptor.observe(model, np.split(images, 2), space)
    with torch.no_grad():
        reference = module(torch.from_numpy(images)).numpy()
    return adaptor, model, space, observed, images, reference


@pytest.fixture(scope="module")
def in_int8(resnet):
    adaptor, model, space, observed, *_ = resnet
    return adaptor.convert(model, space.resolve(uniform(space, INT8)), observed, space)


def test_all_in_int8_every_layer_is_one_kernel_and_the_logits_hold_25_decibels(resnet, in_int8):
    adaptor, _, space, _, images, reference = resnet
    plan, converted = uniform(space, INT8), in_int8
    assert signal_to_noise(reference, adaptor.predict(converted, images)) > 25
    assert len(plan) == 54
    ran = adaptor.trace_kernels(converted, images)
    # One kernel each, and of other ops none but what moves integers and the mean before the end.
    assert {op: len(ran[op].kernels) for op in plan} == dict.fromkeys(plan, 1)
    assert {op: ran[op].precision for op in plan} == dict.fromkeys(plan, INT8)
    assert {trace.effective_precision for op, trace in ran.items() if op not in plan} == {
        INT8,
        FP32,
    }
    assert [op for op, trace in ran.items() if trace.effective_precision is FP32] == ["mean"]
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
    ran = adaptor.trace_kernels(converted, images)
    layers = Counter((op.type, ran[op.name].precision) for op in space.graph if op.weights)
    assert layers == {("conv2d", BF16): 53, ("linear", BF16): 1}
    assert adaptor.weight_bytes(converted) < 0.51 * adaptor.weight_bytes(model)


def test_the_saved_int8_model_takes_under_30_percent_of_the_float_weights(
    resnet, in_int8, tmp_path
):
    adaptor, model, _, _, images, _ = resnet
    adaptor.save(in_int8, tmp_path)
    saved = sum(file.stat().st_size for file in tmp_path.iterdir())
    assert saved < 0.3 * adaptor.weight_bytes(model)
    restored = adaptor.restore(tmp_path)
    np.testing.assert_array_equal(
        adaptor.predict(restored, images), adaptor.predict(in_int8, images)
    )
