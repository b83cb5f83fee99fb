"""See `SimulationContract`."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from neural_mp.core.precision import Precision
from neural_mp.testing.training_contract import SimulatedCase, SimulationContract


class Sum(nn.Module):
    """A residual sum of two convolutions."""

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Conv2d(4, 4, 3, padding=1), nn.Conv2d(4, 4, 1)

    def forward(self, x):
        x = torch.relu(self.first(x))
        return torch.relu(x + self.second(x))


class Branches(nn.Module):
    """Concatenated results of two convolutions, read by a third."""

    def __init__(self):
        super().__init__()
        self.left, self.right = nn.Conv2d(4, 4, 1), nn.Conv2d(4, 2, 3, padding=1)
        self.last = nn.Conv2d(6, 4, 1)

    def forward(self, x):
        return self.last(torch.cat([self.left(x), torch.relu(self.right(x))], 1))


class Attention(nn.Module):
    """Dense projections around the product of attention."""

    def __init__(self):
        super().__init__()
        self.project, self.last = nn.Linear(8, 24), nn.Linear(8, 8)

    def forward(self, x):
        q, k, v = (
            part.unflatten(-1, (2, 4)).transpose(1, 2) for part in self.project(x).chunk(3, -1)
        )
        attended = F.scaled_dot_product_attention(q, k, v)
        return self.last(attended.transpose(1, 2).flatten(2))


class Recurrent(nn.Module):
    """An LSTM with a dense layer on its last output."""

    def __init__(self):
        super().__init__()
        self.lstm, self.last = nn.LSTM(8, 8, batch_first=True), nn.Linear(8, 4)

    def forward(self, x):
        return self.last(self.lstm(x)[0][:, -1])


def _conv(*between, channels=4, **options):
    return nn.Sequential(nn.Conv2d(4, channels, 3, **options), *between)


INT8 = Precision.INT8
#: Kernels that round more than the simulation does: the LSTM its inputs and states in every step,
#: the one of 4-bit weights its inputs to bfloat16.
ROUNDING = {"recurrent": 2.0, "dense in int4": 1.0}
IMAGE, ROW, SEQUENCE = (4, 6, 6), (16,), (5, 8)
NETS = {
    "convolution": (_conv(nn.ReLU(), nn.Conv2d(4, 4, 1)), IMAGE),
    "strided convolution": (_conv(stride=2, padding=1), IMAGE),
    "depthwise convolution": (_conv(nn.ReLU6(), nn.Conv2d(4, 4, 1), groups=4), IMAGE),
    "1-D convolution": (nn.Conv1d(5, 4, 3), SEQUENCE),
    "3-D convolution": (nn.Conv3d(2, 4, 3), (2, 4, 4, 4)),
    "transposed convolution": (_conv(nn.ConvTranspose2d(4, 4, 2, stride=2), _conv()), IMAGE),
    "batch norm": (_conv(nn.BatchNorm2d(4), nn.ReLU(), nn.Conv2d(4, 4, 1)), IMAGE),
    "dense": (nn.Sequential(nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 4)), ROW),
    "gelu": (nn.Sequential(nn.Linear(16, 16), nn.GELU(), nn.Linear(16, 4)), ROW),
    "hardswish": (_conv(nn.Hardswish(), nn.Conv2d(4, 4, 1)), IMAGE),
    "silu": (_conv(nn.SiLU(), nn.Conv2d(4, 4, 1)), IMAGE),
    "residual sum": (Sum(), IMAGE),
    "concatenation": (Branches(), IMAGE),
    "max pooling": (_conv(nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(4, 4, 1)), IMAGE),
    "average pooling": (_conv(nn.ReLU(), nn.AvgPool2d(2), nn.Conv2d(4, 4, 1)), IMAGE),
    "padding": (nn.Sequential(nn.ZeroPad2d((0, 1, 0, 1)), _conv(stride=2)), IMAGE),
    "layer norm": (nn.Sequential(nn.Linear(8, 8), nn.LayerNorm(8), nn.Linear(8, 8)), SEQUENCE),
    "attention": (Attention(), SEQUENCE),
    "recurrent": (Recurrent(), SEQUENCE),
    "dense in bf16": (nn.Sequential(nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 4)), ROW),
    "dense in int4": (nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 4)), (64,)),
}


@pytest.mark.parametrize("layer", NETS)
class TestTorchSimulation(SimulationContract):
    @pytest.fixture(scope="class")
    @classmethod
    def cases(cls):
        random = torch.Generator().manual_seed(0)
        return {
            name: SimulatedCase(
                net.eval(),
                [torch.randn(250, *shape, generator=random) for _ in range(4)],
                next((p for p in (Precision.BF16, Precision.INT4) if name.endswith(p.value)), INT8),
                steps=ROUNDING.get(name, 1.0),
                apart=1.0 if name in ROUNDING else 0.01,
            )
            for name, (net, shape) in NETS.items()
        }

    def outputs(self, simulated, inputs):
        with torch.no_grad():
            return simulated.eval()(inputs).numpy()

    def train(self, simulated, batches):
        simulated.train()
        optimizer = torch.optim.Adam(simulated.parameters(), 1e-3)
        for _ in range(3):
            for inputs in batches:
                optimizer.zero_grad()
                simulated(inputs).square().mean().backward()
                optimizer.step()
        assert all(p.grad is not None for p in simulated.parameters() if p.requires_grad)
