"""A convolutional net for scikit-learn's handwritten digits: 1797 images of 8×8 pixels."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.nn import functional as F

WEIGHTS = Path(__file__).parent / "out" / "digits_net.pt"


class Residual(nn.Module):
    def __init__(self, channels_in: int, channels_out: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(channels_in, channels_out, 3, stride, 1, bias=False)
        self.norm1 = nn.BatchNorm2d(channels_out)
        self.conv2 = nn.Conv2d(channels_out, channels_out, 3, 1, 1, bias=False)
        self.norm2 = nn.BatchNorm2d(channels_out)
        self.shortcut = nn.Identity()
        if stride != 1 or channels_in != channels_out:
            self.shortcut = nn.Sequential(
                nn.Conv2d(channels_in, channels_out, 1, stride, bias=False),
                nn.BatchNorm2d(channels_out),
            )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = F.relu(self.norm1(self.conv1(x)))
        return F.relu(self.norm2(self.conv2(y)) + self.shortcut(x))


class DigitsNet(nn.Module):
    """A small ResNet; input float32 [batch, 1, 8, 8] in 0…1, output 10 logits."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(1, 64, 3, padding=1)
        self.block1 = Residual(64, 64, 1)
        self.block2 = Residual(64, 128, 2)
        self.block3 = Residual(128, 128, 1)
        self.head = nn.Linear(128, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = F.relu(self.stem(x))
        x = self.block3(self.block2(self.block1(x)))
        return self.head(x.mean((2, 3)))


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


def train(net: nn.Module, epochs: int = 8, batch_size: int = 64, rate: float = 4e-3) -> None:
    """Train it to the same accuracy on every machine.

    CPUs round differently, so no two of them end with the same weights. The rate that falls to
    zero makes the last steps so small that this does not matter.
    """
    data = Digits("train")
    images, labels = torch.from_numpy(data.images), torch.from_numpy(data.labels)
    order = torch.Generator().manual_seed(0)
    steps = epochs * math.ceil(len(labels) / batch_size)
    optimizer = torch.optim.AdamW(net.parameters(), rate)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, rate, total_steps=steps)
    net.train()
    for _ in range(epochs):
        for batch in torch.randperm(len(labels), generator=order).split(batch_size):
            loss = F.cross_entropy(net(images[batch]), labels[batch])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            schedule.step()
    net.eval()


def trained_net() -> DigitsNet:
    """The net, trained the first time it is asked for."""
    torch.manual_seed(0)
    net = DigitsNet()
    if not WEIGHTS.exists():
        print("training a net on scikit-learn's digits (about ten seconds) …")
        train(net)
        WEIGHTS.parent.mkdir(exist_ok=True)
        torch.save(net.state_dict(), WEIGHTS)
    net.load_state_dict(torch.load(WEIGHTS, weights_only=True))
    return net.eval()
