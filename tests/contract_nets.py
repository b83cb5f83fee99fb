"""The nets that the contracts ask for, in PyTorch; their docstrings there say how they look."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional as F

from neural_mp.testing import FACTOR


class Outliers(nn.Module):
    """`CorrectionContract.net`."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv2d(1, 12, 3, padding=1)
        self.grouped = nn.Conv2d(12, 24, 3, padding=1, groups=3)
        self.last = nn.Conv2d(24, 12, 3, padding=1)
        self.norm = nn.LayerNorm(12)
        self.query, self.key = nn.Linear(12, 10), nn.Linear(12, 10)
        with torch.no_grad():
            self.norm.bias.normal_()
            for layer in (self.first, self.grouped, self.norm):
                layer.weight[5] *= FACTOR
                layer.bias[5] *= FACTOR
            self.grouped.weight[8:16, 1] /= FACTOR  # channel 5 is the second of the second group
            for layer in (self.last, self.query, self.key):
                layer.weight[:, 5] /= FACTOR

    def forward(self, image: torch.Tensor) -> torch.Tensor:
        features = torch.relu(self.grouped(torch.relu(self.first(image))))
        features = torch.relu(self.last(F.max_pool2d(features, 2)))
        features = self.norm(features.flatten(2).transpose(1, 2))
        return self.query(features) * self.key(features)


class Residual(nn.Module):
    """`CorrectionContract.residual`."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv2d(1, 8, 3, padding=1)
        self.second = nn.Conv2d(8, 8, 3, padding=1)

    def forward(self, image: torch.Tensor) -> torch.Tensor:
        features = torch.relu(self.first(image))
        return self.second(features) + features


class TwoOutputs(Residual):
    """`CorrectionContract.two_outputs`."""

    def forward(self, image: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        features = torch.relu(self.first(image))
        return self.second(features), features


class Normed(nn.Module):
    """`CorrectionContract.normed`."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.dense = nn.LayerNorm(8), nn.Linear(8, 16)
        with torch.no_grad():
            self.norm.bias.normal_()
            self.norm.weight[5] *= FACTOR
            self.norm.bias[5] *= FACTOR
            self.dense.weight[:, 5] /= FACTOR

    def forward(self, image: torch.Tensor) -> torch.Tensor:
        return self.dense(self.norm(image[:, 0]))


def seeded(kind: type[nn.Module]) -> nn.Module:
    torch.manual_seed(0)
    return kind().eval()


class EveryKind(nn.Module):
    """`AmpContract.net`: every kind of op occurs once."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(1, 8, 3, padding=1, bias=False)
        self.dense = nn.Linear(8 * 16, 10, bias=False)

    def forward(self, image: torch.Tensor) -> torch.Tensor:
        features = torch.relu(self.conv(nn.functional.avg_pool2d(image, 2)))
        logits = self.dense(features.reshape(features.shape[0], -1))
        share = torch.softmax(logits + -torch.exp(logits), 1)
        return torch.cat([share, torch.tanh(features.mean((2, 3)))], 1)
