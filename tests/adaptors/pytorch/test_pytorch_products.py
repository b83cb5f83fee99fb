"""See `AccumulationContract`."""

import pytest
import torch
from torch import nn

from neural_mp.testing.products_contract import AccumulationContract

pytestmark = pytest.mark.slow


class Net(nn.Module):
    def __init__(self, case, weight):
        super().__init__()
        self.case = case
        if case.dense:
            self.layer = nn.Linear(case.inputs, case.outputs, bias=False)
        else:
            self.layer = nn.Conv2d(
                case.inputs, case.outputs, 3, padding=1, groups=case.groups, bias=False
            )
        self.layer.weight.data = torch.from_numpy(weight)

    def forward(self, x):
        y = self.layer(x)
        y = y + x if self.case.residual else y
        return torch.relu(y) if self.case.relu else y


class TestPyTorchProducts(AccumulationContract):
    framework = "pytorch"
    approaches = ("static", "dynamic", "weight_only")

    def source(self, case, weight):
        return Net(case, weight).eval()
