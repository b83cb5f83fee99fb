import pytest
import torch
from amp_contract import AmpContract
from torch import nn


class Net(nn.Module):
    """See the contract."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(1, 8, 3, padding=1, bias=False)
        self.dense = nn.Linear(8 * 16, 10, bias=False)

    def forward(self, image: torch.Tensor) -> torch.Tensor:
        found = torch.relu(self.conv(nn.functional.avg_pool2d(image, 2)))
        logits = self.dense(found.reshape(found.shape[0], -1))
        share = torch.softmax(logits + -torch.exp(logits), 1)
        return torch.cat([share, torch.tanh(found.mean((2, 3)))], 1)


class TestAmp(AmpContract):
    average, softmax = "avg_pool2d", "softmax"
    example = (torch.zeros(2, 1, 8, 8),)

    @pytest.fixture
    def net(self):
        torch.manual_seed(0)
        return Net().eval()
