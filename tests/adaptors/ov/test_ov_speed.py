"""Speed of converted models: fused sums, and layers that stay in float."""

import numpy as np
import pytest
import torch
from ov_nets import as_openvino
from torch import nn

from neural_mp.adaptors.openvino.runtime import Runner
from neural_mp.adaptors.registry import get_adaptor_named
from neural_mp.core.hardware import detect
from neural_mp.core.precision import Precision


class Branched(nn.Module):
    """Two convolutions beside a shortcut, and a layer that reads the sum."""

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Conv2d(1, 16, 3, padding=1), nn.Conv2d(16, 16, 3, padding=1)
        self.after = nn.Conv2d(16, 16, 1)

    def forward(self, x):
        x = self.first(x).relu()
        return self.after((self.second(x) + x).relu())


@pytest.fixture
def batch():
    return np.random.default_rng(0).standard_normal((4, 1, 8, 8), dtype=np.float32)


@pytest.fixture
def net():
    torch.manual_seed(0)
    return as_openvino(Branched())


@pytest.mark.slow
def test_both_terms_of_a_residual_sum_are_written_in_int8(net, batch):
    adaptor = get_adaptor_named("openvino")
    model = adaptor.load(net)
    space = adaptor.space(model, detect()).restricted_to([Precision.INT8])
    plan = space.resolve(space.fastest_plan())
    converted = adaptor.convert(model, plan, adaptor.observe(model, [batch], space), space)
    # The plugin fuses a sum into a convolution only if it can write both terms in INT8.
    kernels = [
        kernel for kernel in Runner(converted.program).executed_kernels() if kernel.is_integer
    ]
    terms = {"node_conv2d_1", "node_conv2d_1/quantize"}
    assert any(terms <= set(kernel.ops) for kernel in kernels)
    assert converted.counts.quantize == 1  # only the input: the rest is within kernels
    expected = adaptor.predict(model, batch)
    noise = np.linalg.norm(adaptor.predict(converted, batch) - expected) / np.linalg.norm(expected)
    assert noise < 0.02


class Gated(nn.Module):
    """A convolution whose channels are weighted by what two layers find in their means."""

    def __init__(self, channels=8):
        super().__init__()
        self.first, self.after = nn.Conv2d(1, channels, 3), nn.Conv2d(channels, 4, 1)
        self.squeeze, self.excite = nn.Conv2d(channels, 4, 1), nn.Conv2d(4, channels, 1)

    def forward(self, x):
        x = self.first(x).relu()
        return self.after(
            x * self.excite(self.squeeze(x.mean((2, 3), keepdim=True)).relu()).sigmoid()
        )


@pytest.mark.slow
def test_small_layers_over_one_position_gain_nothing_from_int8(plain_machine):
    adaptor = get_adaptor_named("openvino")
    space = adaptor.space(adaptor.load(as_openvino(Gated())), plain_machine)
    layers = [op.name for op in space.graph if op.type == "Convolution"]
    ineligible = [name for name in layers if name not in space.int8_ops]
    assert len(layers) == 4
    assert len(ineligible) == 2
    for name in ineligible:
        assert "one position" in space.capabilities[name].reasons[Precision.INT8]
