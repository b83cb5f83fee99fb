"""Kernels with folded scales compute what they did with scales of their own."""

from __future__ import annotations

import pytest
import torch
from machine import machine
from torch import nn

from neural_mp.adaptors.pytorch.adaptor import PyTorchAdaptor
from neural_mp.adaptors.pytorch.graph.graph_edit import get_arguments
from neural_mp.adaptors.pytorch.kernels import lowering
from neural_mp.adaptors.pytorch.kernels.lowering import fold_scales
from neural_mp.core.precision import Precision
from neural_mp.testing import uniform


class Layers(nn.Module):
    """Convolutions with and without bias, activation and sum, and a dense layer."""

    def __init__(self, bias: bool = True) -> None:
        super().__init__()
        self.first = nn.Conv2d(3, 16, 3, padding=1, bias=bias)
        self.deep = nn.Conv2d(16, 16, 3, padding=1, groups=16, bias=bias)
        self.flat = nn.Conv2d(16, 16, 1, bias=bias)
        self.wide = nn.Linear(16, 24, bias=bias)
        self.last = nn.Linear(24, 5, bias=bias)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = nn.functional.silu(self.first(x))
        x = x + self.flat(self.deep(x))
        return self.last(self.wide(x.mean((2, 3))))


def converted(net):
    torch.manual_seed(0)
    adaptor, x = PyTorchAdaptor(), torch.randn(4, 3, 9, 7) * 3
    model = adaptor.load(net.eval(), example=x)
    space = adaptor.space(model, machine())
    plan = space.resolve(uniform(space, Precision.INT8))
    return adaptor.convert(model, plan, adaptor.observe(model, [x], space), space).runnable_graph


def kernels_of(graph):
    calls = [node for node in graph.graph.nodes if "onednn" in str(node.target)]
    return [(call, get_arguments(call)) for call in calls]


@pytest.mark.parametrize("bias", [True, False])
def test_results_stay_the_same(bias, monkeypatch):
    net = Layers(bias)
    with monkeypatch.context() as patched:
        patched.setattr(lowering, "fold_scales", lambda module: None)
        reference = converted(net)
    folded, x = converted(net), torch.randn(4, 3, 9, 7) * 3
    with torch.no_grad():
        expected, outputs = reference(x), folded(x)
    # A value between two integers may be rounded to the other one.
    assert (outputs - expected).norm() < 5e-3 * expected.norm()
    assert {options["x_scale"] for _, options in kernels_of(folded)} == {1.0}
    assert 1.0 not in {options["x_scale"] for _, options in kernels_of(reference)}


def test_the_scale_of_an_output_is_folded_unless_an_activation_precedes():
    folded = {
        options.get("attr", options.get("unary_attr", options.get("post_op_name"))): (
            options["output_scale"] == 1.0
        )
        for _, options in kernels_of(converted(Layers()))
        if options["output_dtype"] is torch.uint8
    }
    assert folded == {"none": True, "swish": False}


@pytest.mark.parametrize(
    "layer", [nn.Conv2d(3, 8, 3), nn.Conv2d(3, 8, 3, bias=False), nn.Conv2d(3, 6, 3, groups=3)]
)
def test_floats_differ_by_no_more_than_rounding(layer, monkeypatch):
    with monkeypatch.context() as patched:
        patched.setattr(lowering, "fold_scales", lambda module: None)
        reference = converted(layer)
    folded, x = converted(layer), torch.randn(4, 3, 9, 7)
    with torch.no_grad():
        torch.testing.assert_close(folded(x), reference(x), rtol=1e-5, atol=1e-6)


def test_folding_twice_changes_nothing_more():
    graph, x = converted(Layers()), torch.randn(4, 3, 9, 7)
    with torch.no_grad():
        expected = graph(x)
        fold_scales(graph)
        graph.recompile()
        assert torch.equal(graph(x), expected)
