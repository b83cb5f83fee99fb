"""MobileNetV2 and EfficientNet-B0 in plain torch, random weights."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

Stages = tuple[tuple[int, ...], ...]
#: Expansion, channels, blocks, stride of the first, window: table 2 of arXiv:1801.04381.
_MOBILENET_STAGES = (
    (1, 16, 1, 1, 3),
    (6, 24, 2, 2, 3),
    (6, 32, 3, 2, 3),
    (6, 64, 4, 2, 3),
    (6, 96, 3, 1, 3),
    (6, 160, 3, 2, 3),
    (6, 320, 1, 1, 3),
)
#: The same of EfficientNet-B0: table 1 of arXiv:1905.11946.
_EFFICIENTNET_STAGES = (
    (1, 16, 1, 1, 3),
    (6, 24, 2, 2, 3),
    (6, 40, 2, 2, 5),
    (6, 80, 3, 2, 3),
    (6, 112, 3, 1, 5),
    (6, 192, 4, 2, 5),
    (6, 320, 1, 1, 3),
)
#: Channels that the squeeze leaves, as a fraction of a block's input.
_SQUEEZED = 4


def _normed(channels_in: int, channels: int, window: int = 1, stride: int = 1, groups: int = 1):
    convolution = nn.Conv2d(
        channels_in, channels, window, stride, window // 2, groups=groups, bias=False
    )
    return convolution, nn.BatchNorm2d(channels)


class SqueezeExcite(nn.Module):
    """Every channel times a factor computed from the means of all channels."""

    def __init__(self, channels: int, squeezed: int) -> None:
        super().__init__()
        self.squeeze = nn.Conv2d(channels, squeezed, 1)
        self.excite = nn.Conv2d(squeezed, channels, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        factors = self.excite(nn.functional.silu(self.squeeze(x.mean((2, 3), keepdim=True))))
        return x * torch.sigmoid(factors)


class Inverted(nn.Module):
    """Widened, filtered channel by channel, perhaps weighted, narrowed; with a shortcut if it fits.

    `sizes` are the channels of the input and of the result, the stride, the expansion, the window.
    """

    def __init__(self, sizes: tuple[int, ...], act: type[nn.Module], squeezes: bool) -> None:
        super().__init__()
        channels_in, channels, stride, expansion, window = sizes
        width = channels_in * expansion
        widened = (*_normed(channels_in, width), act()) if expansion > 1 else ()
        filtered = (*_normed(width, width, window, stride, width), act())
        weighted = (SqueezeExcite(width, max(1, channels_in // _SQUEEZED)),) if squeezes else ()
        self.layers = nn.Sequential(*widened, *filtered, *weighted, *_normed(width, channels))
        self.shortcut = stride == 1 and channels_in == channels

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.layers(x) if self.shortcut else self.layers(x)


class MobileNet(nn.Module):
    def __init__(self, stages: Stages, act: type[nn.Module], squeezes: bool) -> None:
        super().__init__()
        blocks, channels = [], 32
        for expansion, width, count, stride, window in stages:
            for index in range(count):
                sizes = (channels, width, 1 if index else stride, expansion, window)
                blocks.append(Inverted(sizes, act, squeezes))
                channels = width
        self.features = nn.Sequential(
            *_normed(3, 32, 3, 2), act(), *blocks, *_normed(channels, 1280), act()
        )
        self.head = nn.Linear(1280, 1000)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.features(x).mean((2, 3)))


def _seeded(*kind: Any) -> nn.Module:
    torch.manual_seed(0)
    net = MobileNet(*kind)
    for module in net.modules():
        if isinstance(module, nn.Conv2d):
            nn.init.kaiming_normal_(module.weight, mode="fan_out")
    return net.eval()


def mobilenetv2() -> nn.Module:
    """Seeded, in evaluation mode."""
    return _seeded(_MOBILENET_STAGES, nn.ReLU6, False)


def efficientnet_b0() -> nn.Module:
    """Seeded, in evaluation mode."""
    return _seeded(_EFFICIENTNET_STAGES, nn.SiLU, True)
