"""MobileNetV2 in plain torch, random weights."""

from __future__ import annotations

import torch
from torch import nn

#: Expansion, channels, blocks, stride of the first: table 2 of arXiv:1801.04381.
STAGES = (
    (1, 16, 1, 1),
    (6, 24, 2, 2),
    (6, 32, 3, 2),
    (6, 64, 4, 2),
    (6, 96, 3, 1),
    (6, 160, 3, 2),
    (6, 320, 1, 1),
)


def _normed(channels_in: int, channels: int, window: int, stride: int = 1, groups: int = 1):
    convolution = nn.Conv2d(
        channels_in, channels, window, stride, window // 2, groups=groups, bias=False
    )
    return convolution, nn.BatchNorm2d(channels)


class Inverted(nn.Module):
    """Widened, filtered channel by channel, narrowed; with a shortcut where shapes allow."""

    def __init__(self, channels_in: int, channels: int, stride: int, expansion: int) -> None:
        super().__init__()
        width = channels_in * expansion
        widened = (*_normed(channels_in, width, 1), nn.ReLU6()) if expansion > 1 else ()
        filtered = (*_normed(width, width, 3, stride, width), nn.ReLU6())
        self.layers = nn.Sequential(*widened, *filtered, *_normed(width, channels, 1))
        self.shortcut = stride == 1 and channels_in == channels

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.layers(x) if self.shortcut else self.layers(x)


class MobileNetV2(nn.Module):
    def __init__(self, classes: int = 1000) -> None:
        super().__init__()
        blocks, channels = [], 32
        for expansion, width, count, stride in STAGES:
            for index in range(count):
                blocks.append(Inverted(channels, width, 1 if index else stride, expansion))
                channels = width
        self.features = nn.Sequential(
            *_normed(3, 32, 3, 2), nn.ReLU6(), *blocks, *_normed(channels, 1280, 1), nn.ReLU6()
        )
        self.head = nn.Linear(1280, classes)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.features(x).mean((2, 3)))


def mobilenetv2() -> nn.Module:
    """Seeded, in evaluation mode."""
    torch.manual_seed(0)
    net = MobileNetV2()
    for module in net.modules():
        if isinstance(module, nn.Conv2d):
            nn.init.kaiming_normal_(module.weight, mode="fan_out")
    return net.eval()
