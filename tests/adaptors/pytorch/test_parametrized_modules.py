"""Modules whose weights torch computes are converted one by one."""

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrizations

from neural_mp import MixedPrecision


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
