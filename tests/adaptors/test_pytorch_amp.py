import pytest
import torch
from amp_contract import AmpContract
from nets import train
from torch import nn

from neural_mp import MixedPrecision


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


class Drowned(nn.Module):
    """Adding 4096 leaves BF16 steps of 32: nothing of the features comes through."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Conv2d(1, 16, 3, padding=1), nn.Conv2d(16, 16, 3, padding=1)
        self.head = nn.Linear(256, 10)

    def forward(self, image: torch.Tensor) -> torch.Tensor:
        found = nn.functional.avg_pool2d(torch.relu(self.first(image)), 2)
        found = torch.relu(self.second(found)) + 4096.0 - 4096.0
        return self.head(found.flatten(1))


def test_tuning_moves_off_16_bits_what_harms_and_no_product(digits, accuracy, bf16_machine):
    torch.manual_seed(0)
    net = Drowned()
    train(net, digits[0], epochs=8)
    converter = MixedPrecision()
    converter.model, converter.hardware, converter.precisions = net.eval(), bf16_machine, "bf16"
    converter.metric, converter.eval_dataloader = accuracy, digits[1].loader()
    result = converter()
    assert not result.trials[0].met
    assert result.met
    assert len(result.trials) <= 8
    left = {op for op, config in result.plan.items() if config.precision == "fp32"}
    assert left == {"add", "sub"}
