"""ResNet-50, MobileNetV2, EfficientNet-B0 and an encoder of the size of BERT-base, in torch.

Weights are random. They are models of the sizes that people deploy.
"""

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


class Bottleneck(nn.Module):
    def __init__(self, channels_in: int, width: int, stride: int, projected: bool) -> None:
        super().__init__()
        channels_out = width * 4
        self.conv1 = nn.Conv2d(channels_in, width, 1, bias=False)
        self.norm1 = nn.BatchNorm2d(width)
        self.conv2 = nn.Conv2d(width, width, 3, stride, 1, bias=False)
        self.norm2 = nn.BatchNorm2d(width)
        self.conv3 = nn.Conv2d(width, channels_out, 1, bias=False)
        self.norm3 = nn.BatchNorm2d(channels_out)
        self.relu = nn.ReLU(inplace=True)
        self.shortcut = nn.Identity()
        if projected:
            self.shortcut = nn.Sequential(
                nn.Conv2d(channels_in, channels_out, 1, stride, bias=False),
                nn.BatchNorm2d(channels_out),
            )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.relu(self.norm1(self.conv1(x)))
        y = self.relu(self.norm2(self.conv2(y)))
        y = self.norm3(self.conv3(y))
        y += self.shortcut(x)
        return self.relu(y)


class ResNet50(nn.Module):
    def __init__(self, classes: int = 1000) -> None:
        super().__init__()
        self.stem = nn.Sequential(
            nn.Conv2d(3, 64, 7, 2, 3, bias=False),
            nn.BatchNorm2d(64),
            nn.ReLU(inplace=True),
            nn.MaxPool2d(3, 2, 1),
        )
        stages, channels = [], 64
        for width, blocks, stride in ((64, 3, 1), (128, 4, 2), (256, 6, 2), (512, 3, 2)):
            for index in range(blocks):
                first = index == 0
                stages.append(Bottleneck(channels, width, stride if first else 1, first))
                channels = width * 4
        self.stages = nn.Sequential(*stages)
        self.head = nn.Linear(channels, classes)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.stages(self.stem(x)).mean((2, 3)))


def resnet50() -> nn.Module:
    """Seeded, with batch norms as a trained net has them, in evaluation mode."""
    torch.manual_seed(0)
    net = ResNet50()
    for module in net.modules():
        if isinstance(module, nn.Conv2d):
            nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")
        elif isinstance(module, nn.BatchNorm2d):
            with torch.no_grad():
                module.running_mean.normal_(0, 0.1)
                module.running_var.uniform_(0.8, 1.2)
                module.weight.uniform_(0.3, 0.7)
                module.bias.normal_(0, 0.1)
    return net.eval()


class Encoder(nn.Module):
    """The last hidden state only, as a tensor: what every way of converting can give back."""

    def __init__(self, layers: int = 12) -> None:
        super().__init__()
        from transformers import BertConfig, BertModel

        config = BertConfig(num_hidden_layers=layers)
        self.bert = BertModel(config, add_pooling_layer=False)

    def forward(self, input_ids: torch.Tensor, attention_mask: torch.Tensor) -> torch.Tensor:
        return self.bert(input_ids=input_ids, attention_mask=attention_mask).last_hidden_state


def bert_base() -> nn.Module:
    """Seeded, in evaluation mode."""
    torch.manual_seed(0)
    return Encoder().eval()
