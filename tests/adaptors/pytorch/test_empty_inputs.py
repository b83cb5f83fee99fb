"""Inputs without samples, and selections without rows, have results of the right shape."""

from __future__ import annotations

import copy

import pytest
import torch
from integers import MACHINE
from torch import nn

from neural_mp.adaptors.pytorch.adaptor import PyTorchAdaptor
from neural_mp.core.precision import Precision
from neural_mp.testing import signal_to_noise, uniform

pytestmark = pytest.mark.slow


class Layers(nn.Module):
    """Two layers, of all samples or of those that a mask selects."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer, self.last = layer, copy.deepcopy(layer)

    def forward(self, x: torch.Tensor, mask: torch.Tensor | None = None) -> torch.Tensor:
        return self.last(self.layer(x if mask is None else x[mask]).relu())


#: Function that builds a layer, and size of its inputs without the batch.
LAYERS = {
    "rows": (lambda: nn.Linear(8, 8), (8,)),
    "sequences": (lambda: nn.Linear(8, 8), (5, 8)),
    "windows": (lambda: nn.Linear(8, 8), (2, 5, 8)),
    "signals": (lambda: nn.Conv1d(8, 8, 3, padding=1), (8, 9)),
    "images": (lambda: nn.Conv2d(8, 8, 3, padding=1), (8, 9, 9)),
    "attention": (lambda: nn.TransformerEncoderLayer(8, 2, 16, batch_first=True), (5, 8)),
    "volumes": (lambda: nn.Conv3d(8, 8, 3, padding=1), (8, 4, 4, 4)),
}


def forms(net, inputs, batch):
    """Return the converted net with checked calls and with calls as a module."""
    adaptor = PyTorchAdaptor()
    model = adaptor.load(net, example=inputs)
    space = adaptor.space(model, MACHINE)
    observed = adaptor.observe(model, [inputs, batch], space)
    model = adaptor.convert(model, space.resolve(uniform(space, Precision.INT8)), observed, space)
    assert any("onednn" in str(node.target) for node in model.runnable_graph.graph.nodes)
    return lambda *call: adaptor.predict(model, call), adaptor.native(model)


@pytest.mark.parametrize("name", LAYERS)
@pytest.mark.parametrize("selects", [False, True], ids=["batch", "selection"])
def test_empty_inputs_and_selections_keep_all_axes(name, selects):
    torch.manual_seed(0)
    build_layer, sizes = LAYERS[name]
    net = Layers(build_layer()).eval()
    x = torch.randn(6, *sizes)
    mask = torch.arange(6) % 2 == 0
    example = (x, mask) if selects else (x,)
    second, empty = ((x, ~mask), (x, torch.zeros_like(mask))) if selects else ((x[:2],), (x[:0],))
    for form in forms(net, example, second):
        for call in (example, second, empty, second):
            with torch.no_grad():
                expected, result = net(*call), form(*call)
            assert result.shape == expected.shape
            if result.numel():
                assert signal_to_noise(expected.numpy(), result.numpy()) > 20
