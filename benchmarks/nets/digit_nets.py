"""Small nets in the shapes of DistilBERT, MPNet, ViT, MobileViT, U-Net and YOLO.

Classifiers return logits [batch, 10], the U-Net the logits of a mask [batch, 1, side, side], and
the detector boxes and scores in one array, as exports of YOLO do.
"""

from __future__ import annotations

import math

import torch
from torch import nn
from torch.nn import functional as F

CLASSES = 10
#: Magnitude of the entries of masks that exporters write.
MASKED = -3.4e38
#: Channels of hidden states that start with a large gain in layer normalizations, as large encoders
#: have outlier channels, and the gain.
_OUTLIERS, _GAIN = (3, 17), 4.0


class Attention(nn.Module):
    """Attention of several heads, with a mask and a bias that are added to the scores."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.query, self.key, self.value, self.out = (nn.Linear(width, width) for _ in range(4))

    def forward(self, x: torch.Tensor, added: torch.Tensor | None = None) -> torch.Tensor:
        """Return states [batch, tokens, width]."""

        def split(y: torch.Tensor) -> torch.Tensor:
            return y.unflatten(-1, (self.heads, -1)).transpose(1, 2)

        query, key, value = (split(part(x)) for part in (self.query, self.key, self.value))
        scores = query @ key.transpose(-1, -2) / math.sqrt(query.shape[-1])
        if added is not None:
            scores = scores + added
        return self.out((torch.softmax(scores, -1) @ value).transpose(1, 2).flatten(2))


class _Layer(nn.Module):
    """An encoder layer, normalized behind the residuals, or ahead of them."""

    def __init__(self, width: int, heads: int, is_pre_norm: bool = False) -> None:
        super().__init__()
        self.attention, self.is_pre_norm = Attention(width, heads), is_pre_norm
        self.inner, self.outer = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(2))
        for norm in self.norms:
            _raise_outliers(norm)

    def forward(self, x: torch.Tensor, added: torch.Tensor | None = None) -> torch.Tensor:
        first, second = self.norms
        if self.is_pre_norm:
            x = x + self.attention(first(x), added)
            return x + self._dense(second(x))
        x = first(x + self.attention(x, added))
        return second(x + self._dense(x))

    def _dense(self, x: torch.Tensor) -> torch.Tensor:
        return self.outer(F.gelu(self.inner(x)))


def _raise_outliers(norm: nn.Module) -> None:
    with torch.no_grad():
        norm.weight[list(_OUTLIERS)] *= _GAIN  # type: ignore[operator,index]  # a parameter


class DistilBert(nn.Module):
    """An encoder of tokens int64 [batch, length]; the mean of those that are no padding classifies.

    Args:
        vocabulary: number of tokens.
        length: tokens of a text.
        has_bias: whether a relative position bias is added to the scores, as in MPNet, in place of
            absolute positions.
    """

    def __init__(
        self, vocabulary: int, length: int, has_bias: bool = False, width: int = 32, layers: int = 2
    ) -> None:
        super().__init__()
        self.heads = 4
        self.tokens = nn.Embedding(vocabulary, width)
        self.norm = nn.LayerNorm(width)
        self.layers = nn.ModuleList(_Layer(width, self.heads) for _ in range(layers))
        self.hidden, self.head = nn.Linear(width, width), nn.Linear(width, CLASSES)
        distances = torch.arange(length)[None] - torch.arange(length)[:, None]
        self.register_buffer("buckets", distances.clamp(-8, 8) + 8)
        self.bias = nn.Embedding(17, self.heads) if has_bias else None
        self.positions = None if has_bias else nn.Embedding(length, width)

    def forward(self, ids: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        """Return logits; `mask` float [batch, length] is 0 at padding."""
        x = self.tokens(ids)
        if self.positions is not None:
            x = x + self.positions.weight
        added = (1.0 - mask[:, None, None, :]) * MASKED
        if self.bias is not None:
            added = added + self.bias(self.buckets).permute(2, 0, 1)[None]
        x = self.norm(x)
        for layer in self.layers:
            x = layer(x, added)
        weights = mask[:, :, None]
        pooled = (x * weights).sum(1) / weights.sum(1)
        return self.head(F.relu(self.hidden(pooled)))


class VisionTransformer(nn.Module):
    """A vision transformer with patches of 4 × 4 and a class token."""

    def __init__(self, side: int, width: int = 32, layers: int = 2) -> None:
        super().__init__()
        self.patches = nn.Conv2d(1, width, 4, 4)
        self.first = nn.Parameter(0.02 * torch.randn(1, 1, width))
        self.positions = nn.Parameter(0.02 * torch.randn(1, (side // 4) ** 2 + 1, width))
        self.layers = nn.ModuleList(_Layer(width, 4, is_pre_norm=True) for _ in range(layers))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, CLASSES)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return logits of pictures [batch, 1, side, side]."""
        x = self.patches(x).flatten(2).transpose(1, 2)
        x = torch.cat([self.first.expand(x.shape[0], -1, -1), x], 1) + self.positions
        for layer in self.layers:
            x = layer(x)
        return self.head(self.norm(x)[:, 0])


def _conv(
    inputs: int, outputs: int, size: int = 3, stride: int = 1, groups: int = 1
) -> nn.Sequential:
    layer = nn.Conv2d(inputs, outputs, size, stride, size // 2, groups=groups, bias=False)
    return nn.Sequential(layer, nn.BatchNorm2d(outputs), nn.SiLU())


class _Inverted(nn.Module):
    """An inverted bottleneck with a depthwise convolution."""

    def __init__(self, inputs: int, outputs: int, stride: int = 1) -> None:
        super().__init__()
        wide = 3 * inputs
        self.inner = nn.Sequential(_conv(inputs, wide, 1), _conv(wide, wide, 3, stride, wide))
        self.outer = nn.Sequential(nn.Conv2d(wide, outputs, 1, bias=False), nn.BatchNorm2d(outputs))
        self.adds = stride == 1 and inputs == outputs

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.outer(self.inner(x))
        return x + y if self.adds else y


class _MobileViTBlock(nn.Module):
    """Attention between pixels at the same place of all patches of 2 × 2."""

    def __init__(self, channels: int, width: int) -> None:
        super().__init__()
        self.near, self.inner = _conv(channels, channels), nn.Conv2d(channels, width, 1, bias=False)
        self.layers = nn.ModuleList(_Layer(width, 4, is_pre_norm=True) for _ in range(2))
        self.norm, self.outer = nn.LayerNorm(width), _conv(width, channels, 1)
        self.mix = _conv(2 * channels, channels)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.inner(self.near(x))
        width, side = y.shape[1], y.shape[2] // 2
        y = y.reshape(-1, width, side, 2, side, 2).permute(0, 3, 5, 2, 4, 1)
        y = y.reshape(-1, side * side, width)
        for layer in self.layers:
            y = layer(y)
        y = self.norm(y).reshape(-1, 2, 2, side, side, width).permute(0, 5, 3, 1, 4, 2)
        y = self.outer(y.reshape(-1, width, 2 * side, 2 * side))
        return self.mix(torch.cat([x, y], 1))


class MobileViT(nn.Module):
    """Inverted bottlenecks, then attention between patches."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Sequential(_conv(1, 12, 3, 2), _Inverted(12, 16), _Inverted(16, 24, 2))
        self.block, self.last = _MobileViTBlock(24, 32), _conv(24, 64, 1)
        self.head = nn.Linear(64, CLASSES)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return logits of pictures [batch, 1, side, side]."""
        return self.head(self.last(self.block(self.stem(x))).mean((2, 3)))


class UNet(nn.Module):
    """Two levels, with separable and transposed convolutions and skip connections."""

    def __init__(self, width: int = 12) -> None:
        super().__init__()
        self.first = _separable(1, width)
        self.second, self.third = _separable(width, 2 * width), _separable(2 * width, 4 * width)
        self.up = nn.ConvTranspose2d(4 * width, 2 * width, 2, 2)
        self.inner = _separable(4 * width, 2 * width)
        self.last_up = nn.ConvTranspose2d(2 * width, width, 2, 2)
        self.last, self.head = _separable(2 * width, width), nn.Conv2d(width, 1, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return logits of masks of pictures [batch, 1, side, side]."""
        first = self.first(x)
        second = self.second(F.max_pool2d(first, 2))
        third = self.up(self.third(F.max_pool2d(second, 2)))
        inner = self.inner(torch.cat([second, third], 1))
        return self.head(self.last(torch.cat([first, self.last_up(inner)], 1)))


def _separable(inputs: int, outputs: int) -> nn.Sequential:
    depthwise = _conv(inputs, inputs, 3, 1, inputs)
    return nn.Sequential(depthwise, _conv(inputs, outputs, 1), _conv(outputs, outputs))


class Yolo(nn.Module):
    """A detector of one level without anchors: boxes in pixels and scores, [batch, 14, cells].

    Boxes are left, top, right, bottom.
    """

    stride = 8

    def __init__(self, side: int, width: int = 12) -> None:
        super().__init__()
        self.stem = nn.Sequential(_conv(1, width, 3, 2), _conv(width, 2 * width, 3, 2))
        self.first, self.down = _Split(2 * width), _conv(2 * width, 3 * width, 3, 2)
        self.second, self.pool = _Split(3 * width), _Pyramid(3 * width)
        self.near = _conv(2 * width, 2 * width, 3, 2)
        self.neck = _conv(5 * width, 3 * width, 1)
        self.boxes = nn.Sequential(_conv(3 * width, 2 * width), nn.Conv2d(2 * width, 4, 1))
        self.scores = nn.Sequential(_conv(3 * width, 2 * width), nn.Conv2d(2 * width, CLASSES, 1))
        cells = side // self.stride
        rows, columns = torch.meshgrid(torch.arange(cells), torch.arange(cells), indexing="ij")
        self.register_buffer("centers", torch.stack([columns, rows]).flatten(1) + 0.5)

    def raw(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return boxes in pixels [batch, 4, cells] and logits [batch, 10, cells]."""
        fine = self.first(self.stem(x))
        coarse = self.pool(self.second(self.down(fine)))
        joined = self.neck(torch.cat([coarse, self.near(fine)], 1))
        sides = F.softplus(self.boxes(joined).flatten(2))
        low, high = self.centers - sides[:, :2], self.centers + sides[:, 2:]
        return torch.cat([low, high], 1) * self.stride, self.scores(joined).flatten(2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return boxes and probabilities of pictures [batch, 1, side, side]."""
        boxes, logits = self.raw(x)
        return torch.cat([boxes, torch.sigmoid(logits)], 1)


class _Split(nn.Module):
    """Half of the channels through a bottleneck, all mixed at the end."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        half = channels // 2
        self.inner = nn.Sequential(_conv(half, half), _conv(half, half))
        self.mix = _conv(channels + half, channels, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        direct, refined = x.chunk(2, 1)
        return self.mix(torch.cat([direct, refined, refined + self.inner(refined)], 1))


class _Pyramid(nn.Module):
    """Spatial pyramid pooling."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.mix = _conv(3 * channels, channels, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        wide = F.max_pool2d(x, 5, 1, 2)
        return self.mix(torch.cat([x, wide, F.max_pool2d(wide, 5, 1, 2)], 1))
