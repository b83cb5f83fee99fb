"""Squeeze-and-excitation runs as products, with the results of the convolutions."""

from __future__ import annotations

import pytest
import torch
from machine import machine
from torch import nn

from neural_mp.adaptors.pytorch.adaptor import PyTorchAdaptor
from neural_mp.adaptors.pytorch.graph import kernel_ops as kernels
from neural_mp.adaptors.pytorch.graph import quantizable_ops as layers
from neural_mp.adaptors.pytorch.graph.graph_edit import copy_graph_shallowly
from neural_mp.adaptors.pytorch.kernels import lowering
from neural_mp.adaptors.pytorch.kernels.direct_calls import DirectGraph
from neural_mp.adaptors.pytorch.kernels.programs import inline_kernels
from neural_mp.core.plan import PrecisionPlan
from neural_mp.core.precision import FP32, Precision

aten = torch.ops.aten


class Block(nn.Module):
    """A gated convolution between two others; `form` names what differs from EfficientNet's."""

    def __init__(self, form: str = "") -> None:
        super().__init__()
        self.form = form
        self.first = nn.Conv2d(3, 22, 3, padding=1)
        self.squeeze = nn.Conv2d(22, 5, 1, bias=form != "no bias")
        self.excite = nn.Conv2d(5, 22, 1, stride=2 if form == "stride" else 1)
        self.last = nn.Conv2d(22, 7, 1)
        self.pool = nn.AdaptiveAvgPool2d(1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = nn.functional.silu(self.first(x))
        mean = self.pool(x) if self.form == "pool" else x.mean((2, 3), keepdim=True)
        gate = torch.sigmoid(self.excite(nn.functional.silu(self.squeeze(mean))))
        if self.form == "mean twice":
            return self.last(x * gate) + mean[:, :7]
        if self.form == "gate twice":
            return self.last(x * gate) * gate[:, :7]
        return self.last(gate * x if self.form == "gate first" else x * gate)


FORMS = ["", "no bias", "stride", "pool", "mean twice", "gate twice", "gate first"]


def converted(net, precisions, size=(9, 7)):
    """Return the graph of a net with ops in given precisions, by a part of the name, or FP32."""
    torch.manual_seed(0)
    adaptor, x = PyTorchAdaptor(), torch.randn(3, 3, *size) * 3
    model = adaptor.load(net.eval(), example=x)
    space = adaptor.space(model, machine(Precision.BF16))
    configs = {}
    for op in space.tunable_ops:
        matches = [kind for part, kind in precisions.items() if part in op]
        configs[op] = space.capabilities[op].config(matches[0]) or FP32 if matches else FP32
    observations = adaptor.observe(model, [x], space)
    return adaptor.convert(
        model, space.resolve(PrecisionPlan(configs)), observations, space
    ).runnable_graph


def without_products(monkeypatch, net, precisions):
    """Return the graph with the convolutions and products that the net has."""
    with monkeypatch.context() as patched:
        patched.setattr(lowering, "call_pixel_products", lambda module: None)
        patched.setattr(lowering, "_match_gated_operands", lambda product: None)
        return converted(net, precisions)


def targets(graph):
    return [node.target for node in graph.graph.nodes if node.op == "call_function"]


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("shape", [(1, 9, 7), (3, 5, 5), (2, 13, 6)])
def test_results_are_those_of_the_convolutions(form, shape, monkeypatch):
    net, precisions = Block(form), {"first": Precision.INT8}
    reference, rewritten = (
        without_products(monkeypatch, net, precisions),
        converted(net, precisions),
    )
    batch, height, width = shape
    x = torch.randn(batch, 3, height, width) * 3
    with torch.no_grad():
        expected, outputs, direct = reference(x), rewritten(x), DirectGraph(rewritten)
        torch.testing.assert_close(outputs, expected, rtol=1e-5, atol=1e-5)
        assert torch.equal(direct(x), outputs)
        assert torch.equal(direct(x), outputs)
    assert targets(reference).count(layers.CONVOLUTION) == 3
    assert targets(rewritten).count(layers.CONVOLUTION) == 1


@pytest.mark.parametrize("form", FORMS)
def test_a_gate_is_part_of_the_quantization(form, monkeypatch):
    net = Block(form)
    precisions = {"first": Precision.INT8, "last": Precision.INT8}
    reference, rewritten = (
        without_products(monkeypatch, net, precisions),
        converted(net, precisions),
    )
    assert kernels.quantize_gated in targets(rewritten)
    assert (
        aten.mul.Tensor
        not in targets(rewritten)[: targets(rewritten).index(kernels.quantize_gated)]
    )
    x = torch.randn(3, 3, 9, 7) * 3
    with torch.no_grad():
        expected, outputs, direct = reference(x), rewritten(x), DirectGraph(rewritten)
        # A value between two integers may be rounded to the other one.
        assert (outputs - expected).norm() < 1e-3 * expected.norm()
        assert torch.equal(direct(x), outputs)
        assert torch.equal(direct(x), outputs)


def test_few_ops_remain_of_a_block(monkeypatch):
    precisions = {"first": Precision.INT8, "last": Precision.INT8}
    module = copy_graph_shallowly(converted(Block(), precisions))
    inline_kernels(module)
    called = targets(module)
    start = called.index(aten.mean.dim)
    assert called[start : called.index(aten.addcmul.default)] == [
        aten.mean.dim,
        aten.reshape.default,
        aten.addmm.default,
        aten.silu.default,
        aten.addmm.default,
        aten.sigmoid.default,
        aten.view.default,
    ]
    reference = copy_graph_shallowly(without_products(monkeypatch, Block(), precisions))
    inline_kernels(reference)
    assert aten.addcmul.default not in targets(reference)


def test_layers_in_bfloat16_stay_convolutions(monkeypatch):
    net = Block()
    precisions = {"first": Precision.INT8, "squeeze": Precision.BF16, "excite": Precision.BF16}
    reference = without_products(monkeypatch, net, precisions)
    rewritten = converted(net, precisions)
    x = torch.randn(2, 3, 9, 7)
    with torch.no_grad():
        assert torch.equal(rewritten(x), reference(x))
    assert targets(rewritten) == targets(reference)


@pytest.mark.parametrize(
    "layer", [nn.Conv2d(22, 22, 1, groups=2), nn.Conv2d(22, 22, 1, padding=1), nn.Conv2d(22, 22, 3)]
)
def test_other_convolutions_stay(layer):
    size = 3 if layer.kernel_size == (3, 3) else 1
    net = nn.Sequential(nn.Conv2d(3, 22, 1), nn.AdaptiveAvgPool2d(size), layer)
    graph = converted(net, {"0": Precision.INT8})
    assert kernels.run_pixel_product not in targets(graph)
    assert layers.CONVOLUTION in targets(graph)


def test_a_graph_in_fp32_keeps_every_bit():
    net = Block()
    graph, x = converted(net, {}), torch.randn(2, 3, 9, 7)
    assert kernels.run_pixel_product not in targets(graph)
    with torch.no_grad():
        assert torch.equal(graph(x), net(x))


def test_a_spatial_gate_is_multiplied_alone():
    class Spatial(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.last = nn.Conv2d(3, 8, 3, padding=1), nn.Conv2d(8, 4, 1)

        def forward(self, x):
            x = self.first(x)
            return self.last(x * torch.sigmoid(x.mean(1, keepdim=True)))

    graph = converted(Spatial(), {"first": Precision.INT8, "last": Precision.INT8})
    assert kernels.quantize_gated not in targets(graph)
    assert aten.mul.Tensor in targets(graph)
