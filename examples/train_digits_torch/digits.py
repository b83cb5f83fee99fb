"""A torch net for scikit-learn's handwritten digits, with a module that float16 breaks."""

from __future__ import annotations

import numpy as np
import torch
from sklearn.datasets import load_digits
from torch import nn


class Energy(nn.Module):
    """Adds the energy of the features. On the way to it are numbers above 65504."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        energy = (x * 400).square().sum(-1, keepdim=True)
        return torch.cat([x, energy * 1e-4], -1)


class DigitsNet(nn.Module):
    """Two convolutions and two linear modules; input float32 [batch, 1, 8, 8], output 10 logits."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1, self.conv2 = nn.Conv2d(1, 16, 3), nn.Conv2d(16, 32, 3)
        self.energy = Energy()
        self.hidden, self.norm = nn.Linear(513, 64), nn.LayerNorm(64)
        self.logits = nn.Linear(64, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.conv2(self.conv1(x).relu()).relu()
        x = self.hidden(self.energy(x.flatten(1))).relu()
        return self.logits(self.norm(x))


def digits_net() -> DigitsNet:
    """The net, with the same weights on every call."""
    torch.manual_seed(0)
    return DigitsNet()


class Digits:
    """A dataset as neural_mp takes it: `dataset[i]` is `(image, label)`."""

    def __init__(self, split: str) -> None:
        data = load_digits()
        order = np.random.default_rng(0).permutation(len(data.target))
        chosen = {"train": order[:1200], "test": order[1200:]}[split]
        self.images = (data.images[chosen] / 16).astype(np.float32)[:, None]
        self.labels = data.target[chosen].astype(np.int64)

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: int) -> tuple[np.ndarray, np.int64]:
        return self.images[index], self.labels[index]
