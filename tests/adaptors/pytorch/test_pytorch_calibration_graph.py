"""Calibration runs a quicker form of the graph, and sees what the user's own code computes."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from neural_mp.adaptors.pytorch.adaptor import PyTorchAdaptor
from neural_mp.adaptors.pytorch.observe import make_calibration_graph
from neural_mp.core.hardware import detect

aten = torch.ops.aten
PACKED = torch.ops.mkldnn._convolution_pointwise.default


class Residual(nn.Module):
    """Every result is read once, but for the one that the shortcut reads, too."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.wide = nn.Conv2d(3, 8, 3, stride=2, padding=1), nn.Conv2d(8, 8, 1)
        self.deep = nn.Conv2d(8, 8, 3, padding=2, dilation=2, groups=8, bias=False)
        self.act, self.act1, self.act2 = nn.ReLU(), nn.Hardtanh(), nn.SiLU()
        self.head = nn.Linear(8, 4)

    def forward(self, x):
        x = self.act(self.stem(x))
        x = self.act2(self.deep(self.act1(self.wide(x))) + x)
        return self.head(x.mean((2, 3)))


class ReadTwice(nn.Module):
    """Results that are needed after an activation has read them: by an op, by the caller."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.last = nn.Conv2d(3, 4, 3), nn.Conv2d(4, 4, 3)

    def forward(self, x):
        y = self.conv(x)
        y = F.relu(y) * y + y
        z = self.last(y)
        return F.relu(z), z


class Grows(nn.Module):
    """Sums that are wider, or of another type, than what they add to."""

    def __init__(self) -> None:
        super().__init__()
        self.narrow, self.wide = nn.Conv2d(3, 4, 3), nn.Conv2d(3, 4, 3)
        self.shift = nn.Parameter(torch.randn(1, 4, 1, 1, dtype=torch.float64))

    def forward(self, x):
        pooled = self.narrow(x).mean((2, 3), keepdim=True)
        return F.relu(pooled) + self.wide(x), self.narrow(x) + self.shift


class Unbatched(nn.Module):
    """A convolution of one image, which the packed one does not take."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 4, 3)

    def forward(self, x):
        return F.relu(self.conv(x[0])) + F.relu(self.conv(x[1]))


def random(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(0))


def captured(net: nn.Module):
    return PyTorchAdaptor().load(net.eval(), example=(random(4, 3, 12, 12),))


@pytest.mark.parametrize("kind", [Residual, ReadTwice, Grows, Unbatched])
@pytest.mark.parametrize("size", [4, 2])
@torch.no_grad()
def test_the_form_computes_what_the_users_code_does(kind, size):
    torch.manual_seed(0)
    net = kind()
    model = captured(net)
    x = random(size, 3, 16, 12)
    original = x.clone()
    outputs = make_calibration_graph(model).portable_graph(x)
    # One output is in float64, computed from float32.
    torch.testing.assert_close(outputs, net(x), rtol=1.3e-6, atol=1e-5)
    assert torch.equal(x, original)


@torch.no_grad()
def test_convolutions_are_packed_once_and_what_nobody_reads_is_written_over():
    model = captured(Residual())
    original = [node.target for node in model.portable_graph.graph.nodes]
    targets = [node.target for node in make_calibration_graph(model).portable_graph.graph.nodes]
    assert targets.count(PACKED) == 3
    quick = {aten.relu_.default, aten.hardtanh_.default, aten.add_.Tensor, aten.silu_.default}
    assert quick <= set(targets)
    assert [node.target for node in model.portable_graph.graph.nodes] == original
    targets = [
        node.target
        for node in make_calibration_graph(captured(ReadTwice())).portable_graph.graph.nodes
    ]
    assert aten.relu.default in targets
    assert aten.relu_.default not in targets


@torch.no_grad()
def test_every_value_is_seen_before_it_is_written_over():
    torch.manual_seed(0)
    net, adaptor = Residual(), PyTorchAdaptor()
    model = captured(net)
    names = ("stem", "act", "wide", "act1", "deep", "act2")
    expected: dict[str, tuple[float, float]] = {}

    def note(name: str):
        def hook(module, inputs, output):
            expected[name] = (output.min().item(), output.max().item())

        return hook

    for name in names:
        getattr(net, name).register_forward_hook(note(name))
    x = random(4, 3, 12, 12)
    net(x)
    for name, ranges in adaptor.observe_tensors(model, [x], names):
        assert (ranges.low.min(), ranges.high.max()) == pytest.approx(expected.pop(name), rel=1e-5)
    assert not expected


@torch.no_grad()
def test_images_with_channels_last_give_the_same_observations():
    adaptor, x = PyTorchAdaptor(), random(4, 3, 12, 12)
    model = captured(Residual())
    space = adaptor.space(model, detect())
    contiguous = adaptor.observe(model, [x], space)
    channels_last = adaptor.observe(model, [x.contiguous(memory_format=torch.channels_last)], space)
    assert contiguous.nsr == pytest.approx(dict(channels_last.nsr), rel=1e-4)
    for tensor, ranges in contiguous.ranges.items():
        assert ranges["minmax"] == pytest.approx(channels_last.ranges[tensor]["minmax"], rel=1e-5)
