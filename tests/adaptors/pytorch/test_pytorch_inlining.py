"""Kernels are replaced by their ops, and results overwritten, without changing a bit."""

from __future__ import annotations

import pytest
import torch
from machine import machine
from torch import nn

from neural_mp.adaptors.pytorch.adaptor import PyTorchAdaptor
from neural_mp.adaptors.pytorch.graph import kernel_ops as kernels
from neural_mp.adaptors.pytorch.graph import qdq_ops as ops
from neural_mp.adaptors.pytorch.graph.graph_edit import copy_graph_shallowly
from neural_mp.adaptors.pytorch.kernels import lowering
from neural_mp.adaptors.pytorch.kernels.direct_calls import DirectGraph
from neural_mp.adaptors.pytorch.kernels.programs import inline_kernels, overwrite_dead_inputs
from neural_mp.core.precision import Precision
from neural_mp.testing import uniform

aten = torch.ops.aten


class Gated(nn.Module):
    """Channels multiplied by gates, as in squeeze-and-excitation."""

    def __init__(self, keeps: bool = False, twice: bool = False) -> None:
        super().__init__()
        self.first, self.squeeze = nn.Conv2d(3, 16, 3, padding=1), nn.Conv2d(16, 4, 1)
        self.excite, self.last = nn.Conv2d(4, 16, 1), nn.Conv2d(16, 8, 1)
        self.keeps, self.twice = keeps, twice

    def forward(self, x: torch.Tensor) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
        x = nn.functional.silu(self.first(x))
        gates = self.excite(nn.functional.silu(self.squeeze(x.mean((2, 3), keepdim=True))))
        gated = x * torch.sigmoid(gates)
        features = self.last(gated * gates if self.twice else gated)
        return (features, x.sum((2, 3))) if self.keeps else features


def converted(net):
    torch.manual_seed(0)
    adaptor, x = PyTorchAdaptor(), torch.randn(4, 3, 12, 12) * 3
    model = adaptor.load(net.eval(), example=x)
    space = adaptor.space(model, machine())
    plan = space.resolve(uniform(space, Precision.INT8))
    return adaptor.convert(model, plan, adaptor.observe(model, [x], space), space).runnable_graph


def targets_of(graph):
    return [node.target for node in graph.graph.nodes]


def rewritten(graph):
    module = copy_graph_shallowly(graph)
    inline_kernels(module)
    overwrite_dead_inputs(module)
    return module, targets_of(module)


@pytest.mark.parametrize("keeps", [False, True])
@pytest.mark.parametrize("twice", [False, True])
@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last])
def test_every_bit_is_that_of_the_kernels(keeps, twice, layout):
    graph = converted(Gated(keeps, twice))
    module, _ = rewritten(graph)
    x = (torch.randn(4, 3, 12, 12) * 3).contiguous(memory_format=layout)
    original, direct = x.clone(), DirectGraph(graph)
    with torch.no_grad():
        expected, result, *again = graph(x), module(x), direct(x), direct(x)
    pairs = zip(*map(torch.utils._pytree.tree_leaves, (expected, result, *again)), strict=True)
    assert all(torch.equal(first, value) for first, *rest in pairs for value in rest)
    assert torch.equal(x, original)


def test_no_python_kernel_is_left_of_conversions():
    _, targets = rewritten(converted(Gated()))
    assert not kernels.COMPOSED.intersection(targets)


def test_products_and_activations_overwrite_what_no_op_reads_any_more():
    _, targets = rewritten(converted(Gated()))
    assert {aten.addcmul.out, aten.sigmoid_.default} <= set(targets)
    _, targets = rewritten(converted(Gated(twice=True)))
    assert {aten.mul_.Tensor, aten.add.out} <= set(targets)


def test_a_product_keeps_what_is_read_later():
    _, targets = rewritten(converted(Gated(keeps=True)))
    assert aten.addcmul.default in targets


def test_inputs_are_never_overwritten():
    class Scaled(nn.Module):
        def __init__(self):
            super().__init__()
            self.last = nn.Linear(8, 8)

        def forward(self, x):
            return self.last(x * x.sum(1, keepdim=True))

    torch.manual_seed(0)
    adaptor, x = PyTorchAdaptor(), torch.randn(4, 8)
    direct = DirectGraph(adaptor.load(Scaled().eval(), example=x).runnable_graph)
    original = x.clone()
    for _ in range(3):
        direct(x)
    assert torch.equal(x, original)


def test_a_product_of_another_shape_overwrites_nothing():
    class Widened(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(8, 8)
            self.offset = nn.Parameter(torch.tensor(0.5))

        def forward(self, x):
            gates = torch.sigmoid(self.layer(x))
            return torch.addcmul(self.offset, gates, gates.unsqueeze(1))

    torch.manual_seed(0)
    net, x = Widened().eval(), torch.randn(4, 8)
    direct = DirectGraph(PyTorchAdaptor().load(net, example=x).runnable_graph)
    with torch.no_grad():
        assert all(torch.equal(direct(x), net(x)) for _ in range(3))


@pytest.mark.parametrize("guard", [torch.no_grad, torch.enable_grad, torch.inference_mode])
def test_a_graph_runs_in_every_mode_of_gradients(guard):
    graph, x = converted(Gated()), torch.randn(4, 3, 12, 12)
    direct, expected = DirectGraph(graph), graph(x)
    with guard():
        assert torch.equal(graph(x), expected)
        assert all(torch.equal(direct(x), expected) for _ in range(3))


@pytest.mark.parametrize("step", [1, 2])
@pytest.mark.parametrize("dtype", [ops._BYTES, torch.int16])
def test_floats_are_truncated_to_bytes(step, dtype, monkeypatch):
    monkeypatch.setattr(ops, "_BYTES", dtype)
    values = torch.arange(0, 256, 0.125)[::step]
    assert torch.equal(ops.to_uint8(values).int(), values.int())


@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last])
def test_images_are_quantized_into_channels_last_memory(layout):
    x = (torch.randn(2, 3, 5, 4) * 3).contiguous(memory_format=layout)
    offset = torch.tensor(117.5)
    quantized = kernels.quantize_rgb(x, offset, 30.0)
    assert torch.equal(quantized[:, :3], kernels.quantize_uint8(x, offset, 30.0))
    assert not quantized[:, 3].any()
    assert quantized.is_contiguous(memory_format=torch.channels_last)


def test_only_images_that_convolutions_alone_read_are_reordered():
    def kernels_of(net):
        targets = set(targets_of(converted(net)))
        return targets & {kernels.quantize_rgb, kernels.quantize_uint8}

    assert kernels_of(nn.Conv2d(3, 8, 3)) == {kernels.quantize_rgb}
    pooled = nn.Sequential(nn.MaxPool2d(2), nn.Conv2d(3, 8, 3))
    assert kernels_of(pooled) == {kernels.quantize_uint8}
    # Each output of these reads one of the channels.
    assert kernels_of(nn.Conv2d(3, 9, 3, groups=3)) == {kernels.quantize_uint8}


@pytest.mark.parametrize("batch", [1, 3])
def test_the_channel_that_is_added_to_an_image_changes_no_result(batch, monkeypatch):
    class Branches(nn.Module):
        def __init__(self):
            super().__init__()
            self.one, self.other = nn.Conv2d(3, 8, 3, padding=1), nn.Conv2d(3, 8, 1, bias=False)

        def forward(self, x):
            return self.one(x) - self.other(x)

    net = Branches()
    with monkeypatch.context() as patched:
        patched.setattr(lowering, "_quantizes_rgb", lambda node: False)
        reference = converted(net)
    padded, x = converted(net), torch.randn(batch, 3, 11, 6) * 3
    assert kernels.quantize_rgb in targets_of(padded)
    with torch.no_grad():
        assert torch.equal(padded(x), reference(x))
