"""Small nets of several architectures, trained within seconds on scikit-learn's digits.

Pictures are enlarged to 32 × 32 and covered with noise, so that no net is perfect. Classifiers
return logits [batch, 10]; the U-Net returns the logits of a mask of the strokes [batch, 1, 32, 32];
the encoder reads pictures as rows of tokens, with a mask of padding.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np
import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.nn import functional as F

SIDE, CLASSES = 32, 10
#: Standard deviation of the noise, where strokes are 1.
_NOISE = 0.3
#: Samples for training, calibration and evaluation.
TRAINED, CALIBRATED, EVALUATED = 4000, 128, 600
#: Magnitude of the entries of masks that exporters write.
_MASKED = -3.4e38


@dataclass(frozen=True)
class DigitCase:
    """A trained net with its data.

    Attributes:
        net: in inference mode.
        calibration, evaluation: inputs [samples, …].
        labels: classes [samples], or masks [samples, 1, side, side], of the evaluation.
        is_segmentation: whether the metric is the intersection over union of masks.
    """

    net: nn.Module
    calibration: np.ndarray
    evaluation: np.ndarray
    labels: np.ndarray
    is_segmentation: bool = False


def drawn_pictures(count: int, seed: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return noisy pictures [count, 1, 32, 32], their classes, and masks of the strokes."""
    digits, draw = load_digits(), np.random.default_rng(seed)
    chosen = draw.integers(0, len(digits.images), count)
    clean = torch.tensor(digits.images[chosen] / 16, dtype=torch.float32)[:, None]
    clean = F.interpolate(clean, (SIDE, SIDE), mode="bilinear")
    noise = torch.tensor(draw.standard_normal(clean.shape), dtype=torch.float32)
    labels = torch.tensor(digits.target[chosen])
    return clean + _NOISE * noise, labels, (clean > 0.5).float()


def _conv(inputs: int, outputs: int, stride: int = 1, groups: int = 1) -> nn.Sequential:
    layer = nn.Conv2d(inputs, outputs, 3, stride, 1, groups=groups, bias=False)
    return nn.Sequential(layer, nn.BatchNorm2d(outputs), nn.ReLU())


class _Gate(nn.Module):
    """Squeeze and excitation."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.down, self.up = nn.Linear(channels, channels // 4), nn.Linear(channels // 4, channels)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        weights = torch.sigmoid(self.up(F.relu(self.down(x.mean((2, 3))))))
        return x * weights[:, :, None, None]


class _Mobile(nn.Module):
    """Inverted bottlenecks with hard swish and gates."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Sequential(
            nn.Conv2d(1, 16, 3, 2, 1, bias=False), nn.BatchNorm2d(16), nn.Hardswish()
        )
        self.blocks = nn.ModuleList(self._block(16, stride) for stride in (1, 2, 1))
        self.head = nn.Linear(16, CLASSES)

    @staticmethod
    def _block(channels: int, stride: int) -> nn.Sequential:
        wide = 4 * channels
        return nn.Sequential(
            nn.Conv2d(channels, wide, 1, bias=False),
            nn.BatchNorm2d(wide),
            nn.Hardswish(),
            nn.Conv2d(wide, wide, 3, stride, 1, groups=wide, bias=False),
            nn.BatchNorm2d(wide),
            nn.Hardswish(),
            _Gate(wide),
            nn.Conv2d(wide, channels, 1, bias=False),
            nn.BatchNorm2d(channels),
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.stem(x)
        for block in self.blocks:
            y = block(x)
            x = x + y if y.shape == x.shape else y
        return self.head(x.mean((2, 3)))


class _Vision(nn.Module):
    """A vision transformer with patches of 4 × 4."""

    def __init__(self, width: int = 48, layers: int = 3) -> None:
        super().__init__()
        self.patches = nn.Conv2d(1, width, 4, 4)
        self.positions = nn.Parameter(0.02 * torch.randn(1, (SIDE // 4) ** 2, width))
        self.layers = nn.ModuleList(_encoder_layer(width) for _ in range(layers))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, CLASSES)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.patches(x).flatten(2).transpose(1, 2) + self.positions
        for layer in self.layers:
            x = layer(x)
        return self.head(self.norm(x).mean(1))


class _Masked(nn.Module):
    """An encoder of rows of pixels; dark rows are padding, masked by −3.4e38 as in exports."""

    def __init__(self, width: int = 48, layers: int = 3) -> None:
        super().__init__()
        self.rows, self.width = nn.Linear(SIDE, width), width
        self.positions = nn.Parameter(0.02 * torch.randn(1, SIDE, width))
        self.inner = nn.ModuleList(nn.Linear(width, 3 * width) for _ in range(layers))
        self.outer = nn.ModuleList(nn.Linear(width, width) for _ in range(layers))
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(layers))
        self.head = nn.Linear(width, CLASSES)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        rows = x.squeeze(1)
        padding = (rows.mean(-1) < 0.1).to(rows.dtype)[:, None] * _MASKED
        x = self.rows(rows) + self.positions
        for inner, outer, norm in zip(self.inner, self.outer, self.norms, strict=True):
            query, key, value = inner(norm(x)).chunk(3, -1)
            scores = query @ key.transpose(1, 2) / self.width**0.5 + padding
            x = x + outer(torch.softmax(scores, -1) @ value)
        return self.head(x.mean(1))


def _encoder_layer(width: int) -> nn.Module:
    return nn.TransformerEncoderLayer(
        width, 4, 2 * width, batch_first=True, norm_first=True, activation="gelu", dropout=0.0
    )


class _UNet(nn.Module):
    """Two levels with a transposed convolution and a skip connection."""

    def __init__(self, width: int = 12) -> None:
        super().__init__()
        self.first, self.down = _conv(1, width), _conv(width, 2 * width, 2)
        self.inner = _conv(2 * width, 2 * width)
        self.up = nn.ConvTranspose2d(2 * width, width, 2, 2)
        self.last, self.head = _conv(2 * width, width), nn.Conv2d(width, 1, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        first = self.first(x)
        inner = self.inner(self.down(first))
        return self.head(self.last(torch.cat([first, F.relu(self.up(inner))], 1)))


def _plain() -> nn.Module:
    features = nn.Sequential(_conv(1, 16, 2), _conv(16, 32, 2), _conv(32, 32))
    return nn.Sequential(features, _classifier(32))


def _classifier(channels: int) -> nn.Module:
    return nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(channels, CLASSES))


def _detector() -> nn.Module:
    """Spatial pyramid pooling behind separable convolutions, as in YOLO's necks."""
    separable = nn.Sequential(_conv(1, 16, 2), _conv(16, 16, 1, 16), nn.Conv2d(16, 32, 1))
    return nn.Sequential(separable, nn.SiLU(), _Pyramid(32), _classifier(32))


class _Pyramid(nn.Module):
    def __init__(self, channels: int) -> None:
        super().__init__()
        self.mix = nn.Conv2d(3 * channels, channels, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        wide = F.max_pool2d(x, 5, 1, 2)
        return F.silu(self.mix(torch.cat([x, wide, F.max_pool2d(wide, 5, 1, 2)], 1)))


#: Name → the untrained net.
NETS: Mapping[str, Callable[[], nn.Module]] = {
    "plain": _plain,
    "mobile": _Mobile,
    "vision transformer": _Vision,
    "masked encoder": _Masked,
    "U-Net": _UNet,
    "pyramid": _detector,
}
#: Training of seconds: passes over the data, and samples of a step.
_EPOCHS, _BATCH = 6, 50


def trained_case(name: str, seed: int) -> DigitCase:
    """Return a net by its name, trained from a seed."""
    torch.manual_seed(seed)
    net, segments = NETS[name](), name == "U-Net"
    pictures, classes, masks = drawn_pictures(TRAINED, seed)
    optimizer = torch.optim.Adam(net.parameters(), 3e-3)
    for _ in range(_EPOCHS):
        for start in range(0, TRAINED, _BATCH):
            part = slice(start, start + _BATCH)
            outputs = net(pictures[part])
            loss = (
                F.binary_cross_entropy_with_logits(outputs, masks[part])
                if segments
                else F.cross_entropy(outputs, classes[part])
            )
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    shown, labels, strokes = drawn_pictures(EVALUATED, seed + 1)
    expected = strokes if segments else labels
    calibration = pictures[:CALIBRATED].numpy()
    return DigitCase(net.eval(), calibration, shown.numpy(), expected.numpy(), segments)
