"""Layers whose weights are computed from parameters only are converted like any other."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.utils import parametrizations

from neural_mp import MixedPrecision
from neural_mp.adaptors.pytorch.adaptor import PyTorchAdaptor
from neural_mp.core.hardware import detect
from neural_mp.core.precision import Precision


class Standardized(nn.Conv2d):
    """A convolution whose weight is standardized, as in BiT: an op with several results."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        rows = self.weight.reshape(1, self.out_channels, -1)
        weight = F.batch_norm(rows, None, None, training=True, momentum=0.0)
        return self._conv_forward(x, weight.reshape_as(self.weight), self.bias)


class Chosen(nn.Conv2d):
    """A convolution with a sorted weight: the first of two results."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        values, _ = torch.sort(self.weight, dim=0, descending=True)
        return self._conv_forward(x, values, self.bias)


_COMPUTED = {
    "standardized": Standardized(3, 8, 3),
    "sorted": Chosen(3, 8, 3),
    "weight norm": parametrizations.weight_norm(nn.Conv2d(3, 8, 3)),
    "spectral norm": parametrizations.spectral_norm(nn.Conv2d(3, 8, 3)),
}


@pytest.mark.parametrize("kind", _COMPUTED)
def test_a_layer_with_a_computed_weight_can_run_in_int8(kind):
    layer, x = _COMPUTED[kind].eval(), torch.randn(2, 3, 8, 8)
    adaptor = PyTorchAdaptor()
    space = adaptor.space(adaptor.load(layer, example=x), detect({}))
    assert [op.refusal_reason(Precision.INT8) for op in space.capabilities.values()] == [None]


class Branching(nn.Module):
    """A branch on a value between layers with a computed weight."""

    def __init__(self) -> None:
        super().__init__()
        self.first = parametrizations.weight_norm(nn.Linear(8, 8))
        self.last = parametrizations.orthogonal(nn.Linear(8, 8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        return self.last(torch.relu(x) if x.sum() > 1e6 else x)


@pytest.mark.slow
@pytest.mark.usefixtures("quick_runs")
def test_layers_with_a_computed_weight_are_converted_one_by_one(tmp_path):
    torch.manual_seed(0)
    net, batches = Branching().eval(), [torch.randn(4, 8) for _ in range(2)]
    with torch.no_grad():
        expected = net(batches[0])
    converter = MixedPrecision(
        model=net,
        precisions="int8",
        capture="modules",
        objective="modelsize",
        calib_dataloader=[(batch, None) for batch in batches],
        workspace=tmp_path / "workspace",
    )
    result = converter()
    assert [str(config.precision) for config in result.plan.values()] == ["int8", "int8"]
    assert (result(batches[0]) - expected).norm() <= 0.1 * expected.norm()  # 20 dB
    with torch.no_grad():
        assert torch.equal(net(batches[0]), expected)
