"""The nets the tests train: importable, so that other processes and YAML files can name them."""

from __future__ import annotations

import copy

import torch
from torch import nn
from torch.nn import functional as F


class Residual(nn.Module):
    """Two convolutions and a shortcut, batch norms and in-place operations as in the wild."""

    def __init__(self, channels_in: int, channels_out: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(channels_in, channels_out, 3, stride, 1, bias=False)
        self.norm1 = nn.BatchNorm2d(channels_out)
        self.act = nn.ReLU(inplace=True)
        self.conv2 = nn.Conv2d(channels_out, channels_out, 3, 1, 1, bias=False)
        self.norm2 = nn.BatchNorm2d(channels_out)
        self.shortcut = nn.Identity()
        if stride != 1 or channels_in != channels_out:
            self.shortcut = nn.Sequential(
                nn.Conv2d(channels_in, channels_out, 1, stride, bias=False),
                nn.BatchNorm2d(channels_out),
            )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.norm2(self.conv2(self.act(self.norm1(self.conv1(x)))))
        y += self.shortcut(x)
        return F.relu(y)


class SmallNet(nn.Module):
    """Residual blocks behind a pooled stem; [batch, 1, 8, 8] → 10 logits."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(1, 16, 3, padding=1)
        self.pool = nn.MaxPool2d(2)
        self.block1 = Residual(16, 16, 1)
        self.block2 = Residual(16, 32, 2)
        self.drop = nn.Dropout(0.1)
        self.head = nn.Linear(32, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.block2(self.block1(self.pool(F.relu(self.stem(x)))))
        return self.head(self.drop(x.mean((2, 3))))


def small_net() -> nn.Module:
    return SmallNet().eval()


def deep_net() -> nn.Module:
    """8 convolutions and 1 dense layer."""
    layers: list[nn.Module] = []
    channels = 1
    for index in range(8):
        layers += [nn.Conv2d(channels, 32, 3, padding=1), nn.ReLU()]
        channels = 32
        if index == 3:
            layers.append(nn.MaxPool2d(2))
    return nn.Sequential(*layers, nn.Flatten(), nn.Linear(32 * 16, 10)).eval()


def train(net: nn.Module, split, epochs: int) -> None:
    images, labels = torch.from_numpy(split.images), torch.from_numpy(split.labels)
    optimizer = torch.optim.Adam(net.parameters(), 2e-3)
    net.train()
    for _ in range(epochs):
        for batch in torch.randperm(len(labels)).split(64):
            loss = F.cross_entropy(net(images[batch]), labels[batch])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    net.eval()


def hostile(net: nn.Module, factor: float = 1024.0) -> nn.Module:
    """The same function, with the busiest channel between convolutions 2 and 3 made ×1024."""
    changed = copy.deepcopy(net)
    first, second = [m for m in changed if isinstance(m, nn.Conv2d)][1:3]
    with torch.no_grad():
        use = first.weight.flatten(1).abs().sum(1) * second.weight.abs().sum((0, 2, 3))
        channel = int(use.argmax())
        first.weight[channel] *= factor
        first.bias[channel] *= factor
        second.weight[:, channel] /= factor
    return changed


class Branch(nn.Module):
    """Another branch per input."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.inner = module

    def forward(self, x):
        return self.inner(x) if x.sum() > 0 else -self.inner(x)
