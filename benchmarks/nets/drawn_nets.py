"""Nets drawn by a seed from families, with random weights: nobody has tuned on them.

A name is `FAMILY.SEED.NUMBER`. Stems, blocks, widths, depths, activations, attention, heads, sizes
of inputs and the batch size are drawn.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from functools import partial
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.nn import functional as F

from benchmarks.nets.case import Arrays, Case

_ACTIVATIONS = (nn.ReLU, nn.ReLU, nn.SiLU, nn.Hardswish, nn.GELU)
_BATCHES, _JUDGED = (1, 1, 8), 16
#: Samples whose statistics batch norms keep.
_STATISTICS = 16
#: Learned queries of nets with attention to patches.
_QUERIES = 32


def drawn_case(name: str) -> Case:
    """Return the case of a name."""
    family, *numbers = name.split(".")
    if family not in FAMILIES or len(numbers) != 2:
        raise ValueError(
            f"a drawn net must be named FAMILY.SEED.NUMBER, got {name!r}; the families are "
            f"{', '.join(FAMILIES)}"
        )
    return FAMILIES[family](random.Random(" ".join([family, *numbers])))


def drawn_names(seed: int, count: int, families: Sequence[str]) -> list[str]:
    """Return the names of a number of nets, of some families in turn."""
    return [
        f"{families[index % len(families)]}.{seed}.{index // len(families)}"
        for index in range(count)
    ]


def draw_normal(shape: tuple[int, ...], count: int, seed: int) -> Arrays:
    """Draw samples whose neighbours resemble each other, as in pictures and sound."""
    noise = np.random.default_rng(seed).standard_normal((count, *shape), np.float32)
    smooth = np.cumsum(noise, axis=-1) / np.sqrt(np.arange(1, shape[-1] + 1, dtype=np.float32))
    return (0.5 * noise + 0.5 * smooth.astype(np.float32),)


def draw_integers(most: int, length: int, count: int, seed: int) -> Arrays:
    return (np.random.default_rng(seed).integers(0, most, (count, length)),)


def _case(
    draw: random.Random,
    make: Callable[[], nn.Module],
    samples: Callable[[int, int], Arrays],
    names: tuple[str, ...] = ("image",),
) -> Case:
    build = partial(with_statistics, make, samples, draw.randrange(1 << 30))
    return Case(build, samples, names, (draw.choice(_BATCHES),), _JUDGED)


def with_statistics(
    make: Callable[[], nn.Module], samples: Callable[[int, int], Arrays], seed: int
) -> nn.Module:
    """Make a net with random weights, whose batch norms have the statistics of samples."""
    torch.manual_seed(seed)
    net = make()
    norms = [part for part in net.modules() if isinstance(part, nn.modules.batchnorm._BatchNorm)]
    for norm in norms:
        norm.momentum = 1.0
    if norms:  # with the statistics of no data, signals vanish
        with torch.no_grad():
            net.train()(*map(torch.from_numpy, samples(_STATISTICS, seed)))
    return net.eval()


class Residual(nn.Module):
    def __init__(self, inner: nn.Module, outer: nn.Module | None = None) -> None:
        super().__init__()
        self.inner, self.outer = inner, outer or nn.Identity()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.outer(x + self.inner(x))


class _Excitation(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.gate = nn.Sequential(
            nn.AdaptiveAvgPool2d(1),
            nn.Conv2d(width, max(8, width // 4), 1),
            nn.ReLU(),
            nn.Conv2d(max(8, width // 4), width, 1),
            nn.Sigmoid(),
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.gate(x)


def conv_block(
    inputs: int, outputs: int, kernel: int = 3, stride: int = 1, groups: int = 1, act: Any = nn.ReLU
) -> nn.Sequential:
    conv = nn.Conv2d(inputs, outputs, kernel, stride, kernel // 2, groups=groups, bias=False)
    return nn.Sequential(conv, nn.BatchNorm2d(outputs), act())


def convolutional(draw: random.Random) -> Case:
    """Plain or residual blocks behind a stem, with a classifier."""
    act, side = draw.choice(_ACTIVATIONS), draw.choice((96, 128, 160, 224))
    width = draw.choice((16, 24, 32, 48))
    stages, depth = draw.choice((3, 4)), draw.choice((1, 2, 3))
    is_residual, is_pooled = draw.random() < 0.7, draw.random() < 0.5
    kernel = draw.choice((3, 5, 7))

    def make() -> nn.Module:
        parts: list[nn.Module] = [conv_block(3, width, kernel, 2, act=act)]
        parts += [nn.MaxPool2d(3, 2, 1)] if is_pooled else []
        for stage in range(stages):
            inputs, outputs = width << max(0, stage - 1), width << stage
            parts.append(conv_block(inputs, outputs, 3, 2 if stage else 1, act=act))
            for _ in range(depth):
                inner = nn.Sequential(
                    conv_block(outputs, outputs, act=act),
                    conv_block(outputs, outputs, act=nn.Identity),
                )
                parts.append(Residual(inner, act()) if is_residual else inner)
        head = (nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(outputs, 100))
        return nn.Sequential(*parts, *head)

    return _case(draw, make, partial(draw_normal, (3, side, side)))


def separable(draw: random.Random) -> Case:
    """Inverted bottlenecks of depthwise convolutions, with or without squeeze-and-excitation."""
    act, side, kernel = draw.choice(_ACTIVATIONS), draw.choice((96, 128, 192)), draw.choice((3, 5))
    width, growth = draw.choice((16, 24, 32)), draw.choice((2, 4, 6))
    is_excited, depth = draw.random() < 0.6, draw.choice((1, 2, 3))

    def block(inputs: int, outputs: int, stride: int) -> nn.Module:
        inner = inputs * growth
        parts: list[nn.Module] = [conv_block(inputs, inner, 1, act=act)]
        parts.append(conv_block(inner, inner, kernel, stride, inner, act))
        parts += [_Excitation(inner)] if is_excited else []
        bottleneck = nn.Sequential(*parts, conv_block(inner, outputs, 1, act=nn.Identity))
        return Residual(bottleneck) if stride == 1 and inputs == outputs else bottleneck

    def make() -> nn.Module:
        parts: list[nn.Module] = [conv_block(3, width, 3, 2, act=act)]
        for stage in range(3):
            inputs, outputs = width + 16 * stage, width + 16 * (stage + 1)
            parts += [block(inputs, outputs, 2)]
            parts += [block(outputs, outputs, 1) for _ in range(depth)]
        head = (conv_block(outputs, 4 * outputs, 1, act=act), nn.AdaptiveAvgPool2d(1), nn.Flatten())
        return nn.Sequential(*parts, *head, nn.Linear(4 * outputs, 100))

    return _case(draw, make, partial(draw_normal, (3, side, side)))


class _Attention(nn.Module):
    """Attention of queries over themselves, over windows of them, or over a memory."""

    def __init__(self, width: int, heads: int, window: int = 0) -> None:
        super().__init__()
        self.heads, self.window = heads, window
        self.query, self.keys_values = nn.Linear(width, width), nn.Linear(width, 2 * width)
        self.out = nn.Linear(width, width)

    def forward(self, x: torch.Tensor, memory: torch.Tensor | None = None) -> torch.Tensor:
        shape = x.shape
        if self.window:
            x = x.unflatten(1, (-1, self.window)).flatten(0, 1)
        keys, values = self.keys_values(x if memory is None else memory).chunk(2, -1)
        heads = [t.unflatten(-1, (self.heads, -1)).transpose(1, 2) for t in (keys, values)]
        query = self.query(x).unflatten(-1, (self.heads, -1)).transpose(1, 2)
        context = F.scaled_dot_product_attention(query, *heads).transpose(1, 2).flatten(2)
        return self.out(context).reshape(shape)


class _Layer(nn.Module):
    def __init__(self, width: int, heads: int, act: Any, window: int, crosses: bool) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(3))
        self.attention = _Attention(width, heads, window)
        self.cross = _Attention(width, heads) if crosses else None
        self.inner = nn.Sequential(nn.Linear(width, 4 * width), act(), nn.Linear(4 * width, width))

    def forward(self, x: torch.Tensor, memory: torch.Tensor) -> torch.Tensor:
        x = x + self.attention(self.norms[0](x))
        if self.cross is not None:
            x = x + self.cross(self.norms[1](x), memory)
        return x + self.inner(self.norms[2](x))


class _Transformer(nn.Module):
    """Patches of a picture through layers of attention, with a classifier."""

    def __init__(
        self, width: int, depth: int, patch: int, queries: int, layer: Callable[[int], _Layer]
    ) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, width, patch, patch)
        self.queries = nn.Parameter(torch.randn(1, queries, width)) if queries else None
        self.layers = nn.ModuleList(layer(width) for _ in range(depth))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, 100)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        memory = self.patches(x).flatten(2).transpose(1, 2)
        state = memory
        if self.queries is not None:
            state = self.queries.expand(memory.shape[0], -1, -1)
        for layer in self.layers:
            state = layer(state, memory)
        return self.head(self.norm(state).mean(1))


def _attention_net(draw: random.Random, window: int, crosses: bool) -> Case:
    width, depth = draw.choice((96, 128, 192, 256, 384)), draw.choice((2, 4, 6))
    heads, act = draw.choice((2, 4, 8)), draw.choice((nn.GELU, nn.ReLU))
    layer = partial(_Layer, heads=heads, act=act, window=window, crosses=crosses)
    patch, side = draw.choice((8, 16)), draw.choice((128, 192))
    make = partial(_Transformer, width, depth, patch, _QUERIES if crosses else 0, layer)
    return _case(draw, make, partial(draw_normal, (3, side, side)))


def attention(draw: random.Random) -> Case:
    """An encoder of patches."""
    return _attention_net(draw, 0, crosses=False)


def windows(draw: random.Random) -> Case:
    """Attention within windows of patches."""
    return _attention_net(draw, draw.choice((8, 16)), crosses=False)


def crossing(draw: random.Random) -> Case:
    """Learned queries that attend to patches."""
    return _attention_net(draw, 0, crosses=True)


class UNet(nn.Module):
    def __init__(self, width: int, depth: int, act: Any, is_transposed: bool) -> None:
        super().__init__()
        widths = [width << level for level in range(depth + 1)]
        self.stem = conv_block(3, width, act=act)
        self.down = nn.ModuleList(conv_block(a, b, 3, 2, act=act) for a, b in pairwise(widths))
        self.up = nn.ModuleList(
            nn.ConvTranspose2d(b, a, 2, 2)
            if is_transposed
            else nn.Sequential(nn.Upsample(scale_factor=2), nn.Conv2d(b, a, 1))
            for a, b in pairwise(widths)
        )
        self.merge = nn.ModuleList(conv_block(2 * a, a, act=act) for a in widths[:-1])
        self.head = nn.Conv2d(width, 4, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        skips = [self.stem(x)]
        for down in self.down:
            skips.append(down(skips[-1]))
        state = skips.pop()
        for up, merge in zip(reversed(self.up), reversed(self.merge), strict=True):
            state = merge(torch.cat([up(state), skips.pop()], 1))
        return self.head(state)


def transposed(draw: random.Random) -> Case:
    """Contraction and expansion with skips, by transposed convolutions or by resizing."""
    width, depth, side = draw.choice((16, 24, 32)), draw.choice((2, 3)), draw.choice((96, 128))
    make = partial(UNet, width, depth, draw.choice(_ACTIVATIONS), draw.random() < 0.7)
    return _case(draw, make, partial(draw_normal, (3, side, side)))


class Recurrent(nn.Module):
    def __init__(
        self, kind: Any, features: int, width: int, layers: int, is_bidirectional: bool
    ) -> None:
        super().__init__()
        self.inner = kind(features, width, layers, batch_first=True, bidirectional=is_bidirectional)
        self.head = nn.Linear(width * (1 + is_bidirectional), 32)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.inner(x)[0])


def recurrent(draw: random.Random) -> Case:
    """LSTM or GRU over a sequence."""
    features, length = draw.choice((32, 64, 80)), draw.choice((50, 100))
    width, layers = draw.choice((128, 256)), draw.choice((1, 2))
    is_bidirectional, kind = draw.random() < 0.5, draw.choice((nn.LSTM, nn.GRU))
    make = partial(Recurrent, kind, features, width, layers, is_bidirectional)
    return _case(draw, make, partial(draw_normal, (length, features)), ("sequence",))


def temporal_net(width: int, depth: int) -> nn.Module:
    """Make a residual net of dilated 1-D convolutions of 40 channels, with a classifier."""

    def block(level: int) -> nn.Module:
        conv = nn.Conv1d(width, width, 3, padding=2**level, dilation=2**level, bias=False)
        return Residual(nn.Sequential(conv, nn.BatchNorm1d(width), nn.ReLU()), nn.ReLU())

    blocks = [block(level) for level in range(depth)]
    head = (nn.AdaptiveAvgPool1d(1), nn.Flatten(), nn.Linear(width, 32))
    return nn.Sequential(nn.Conv1d(40, width, 1), *blocks, *head)


def temporal(draw: random.Random) -> Case:
    """Dilated 1-D convolutions with residuals, as for sound and time series."""
    width, depth, length = draw.choice((32, 64, 128)), draw.choice((3, 5)), draw.choice((200, 400))
    make = partial(temporal_net, width, depth)
    return _case(draw, make, partial(draw_normal, (40, length)), ("sound",))


class Tables(nn.Module):
    def __init__(self, tables: int, width: int, hidden: int, depth: int) -> None:
        super().__init__()
        self.tables = nn.ModuleList(nn.Embedding(1000, width) for _ in range(tables))
        sizes = [tables * width, *[hidden] * depth]
        layers = [part for a, b in pairwise(sizes) for part in (nn.Linear(a, b), nn.ReLU())]
        self.inner = nn.Sequential(*layers, nn.Linear(hidden, 1))

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        rows = [table(ids[:, index]) for index, table in enumerate(self.tables)]
        return self.inner(torch.cat(rows, 1))


def tables(draw: random.Random) -> Case:
    """Embeddings of categories through dense layers, as for recommendations."""
    count, width = draw.choice((8, 16, 26)), draw.choice((16, 32, 64))
    make = partial(Tables, count, width, draw.choice((256, 512, 1024)), draw.choice((2, 3)))
    return _case(draw, make, partial(draw_integers, 1000, count), ("ids",))


class FirstOutput(nn.Module):
    """The first output of a net of transformers, a tensor."""

    def __init__(self, net: nn.Module, name: str) -> None:
        super().__init__()
        self.net, self.name = net, name

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.net(**{self.name: x})[0]


def transformers(draw: random.Random) -> Case:
    """A small to base-sized encoder of an architecture of the package transformers."""
    import transformers as package

    name = draw.choice(("DistilBert", "Bert", "ViT", "ConvNext", "Segformer"))
    depth, width = draw.choice((2, 4, 6)), draw.choice((128, 256, 384, 768))
    sizes: dict[str, Any] = {
        "DistilBert": {"dim": width, "hidden_dim": 4 * width, "n_layers": depth, "n_heads": 4},
        "ConvNext": {"depths": [1, 1, depth, 1], "hidden_sizes": [48, 96, 192, 384]},
        "Segformer": {"depths": [1, 1, 1, 1]},
    }.get(
        name,
        {
            "hidden_size": width,
            "intermediate_size": 4 * width,
            "num_hidden_layers": depth,
            "num_attention_heads": 4,
        },
    )
    config = getattr(package, f"{name}Config")(**sizes)
    model = getattr(package, f"{name}Model")
    if "Bert" in name:
        argument, samples = "input_ids", partial(draw_integers, 30000, draw.choice((64, 128)))
    else:
        side = 224 if name == "ViT" else 128
        argument, samples = "pixel_values", partial(draw_normal, (3, side, side))
    return _case(draw, lambda: FirstOutput(model(config), argument), samples, (argument,))


FAMILIES: dict[str, Callable[[random.Random], Case]] = {
    family.__name__: family
    for family in (
        convolutional,
        separable,
        attention,
        windows,
        crossing,
        transposed,
        recurrent,
        temporal,
        tables,
        transformers,
    )
}
