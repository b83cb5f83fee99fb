"""The nets of the search benchmark in torch, for PyTorch, ONNX and, copied, TensorFlow.

Hostile places change numbers in two neighbouring layers and nothing of the function: a channel is
made hundreds of times larger where it is written, and as much smaller where it is read. One scale
for the whole tensor then leaves nothing of its other channels in INT8.

Plain torch that old releases run and can trace, since peers need those.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.nn import functional as F

from benchmarks.measurement.search_data import Digits, kept
from benchmarks.nets.case import write_onnx

CHAIN_FACTOR, RESIDUAL_FACTOR, NORM_FACTOR = 1024.0, 400.0, 300.0


class Convolutions(nn.Module):
    """Convolutions with ReLU in a row, a pooling in the middle, a dense layer."""

    def __init__(self, channels: tuple[int, ...]) -> None:
        super().__init__()
        pairs = zip((1, *channels), channels)  # noqa: B905 – one shorter, on purpose
        self.convs = nn.ModuleList(nn.Conv2d(a, b, 3, padding=1) for a, b in pairs)
        self.half = len(channels) // 2
        self.head = nn.Linear(channels[-1], 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for index, conv in enumerate(self.convs):
            x = F.relu(conv(x))
            if index + 1 == self.half:
                x = F.max_pool2d(x, 2)
        return self.head(x.mean((2, 3)))


class Block(nn.Module):
    """Two normed convolutions and a shortcut, projected where the width changes."""

    def __init__(self, channels_in: int, channels: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(channels_in, channels, 3, padding=1, bias=False)
        self.norm1 = nn.BatchNorm2d(channels)
        self.conv2 = nn.Conv2d(channels, channels, 3, padding=1, bias=False)
        self.norm2 = nn.BatchNorm2d(channels)
        self.project, self.norm3 = nn.Identity(), nn.Identity()
        if channels_in != channels:
            self.project = nn.Conv2d(channels_in, channels, 1, bias=False)
            self.norm3 = nn.BatchNorm2d(channels)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.norm2(self.conv2(F.relu(self.norm1(self.conv1(x)))))
        return F.relu(y + self.norm3(self.project(x)))


class Residual(nn.Module):
    """A stem, seven blocks and a dense layer: 17 weighted ops. Halved behind the third block."""

    WIDTHS = (64, 64, 64, 128, 128, 128, 128)
    HALVED = 3

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(1, 64, 3, padding=1, bias=False)
        self.norm = nn.BatchNorm2d(64)
        pairs = zip((64, *self.WIDTHS), self.WIDTHS)  # noqa: B905 – one shorter, on purpose
        self.blocks = nn.ModuleList(Block(a, b) for a, b in pairs)
        self.head = nn.Linear(self.WIDTHS[-1], 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = F.relu(self.norm(self.stem(x)))
        for index, block in enumerate(self.blocks):
            if index == self.HALVED:
                x = F.max_pool2d(x, 2)
            x = block(x)
        return self.head(x.mean((2, 3)))


class Layer(nn.Module):
    """Attention and two dense layers, each behind a layer norm."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.query, self.key = nn.Linear(width, width), nn.Linear(width, width)
        self.value, self.out = nn.Linear(width, width), nn.Linear(width, width)
        self.wide, self.narrow = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.size = width // heads

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.norm1(x)
        query, key, value = (
            dense(y).reshape(-1, 16, self.heads, self.size).transpose(1, 2)
            for dense in (self.query, self.key, self.value)
        )
        weights = (query @ key.transpose(2, 3) * self.size**-0.5).softmax(-1)
        x = x + self.out((weights @ value).transpose(1, 2).reshape(-1, 16, self.heads * self.size))
        return x + self.narrow(F.gelu(self.wide(self.norm2(x))))


class Transformer(nn.Module):
    """16 patches of 2×2 pixels, 3 layers of 192 features: 20 weighted ops."""

    WIDTH, HEADS, DEPTH = 192, 4, 3

    def __init__(self) -> None:
        super().__init__()
        self.patch = nn.Conv2d(1, self.WIDTH, 2, 2)
        self.position = nn.Parameter(torch.randn(1, 16, self.WIDTH) * 0.1)
        self.layers = nn.ModuleList(Layer(self.WIDTH, self.HEADS) for _ in range(self.DEPTH))
        self.norm = nn.LayerNorm(self.WIDTH)
        self.head = nn.Linear(self.WIDTH, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.patch(x).flatten(2).transpose(1, 2) + self.position
        for layer in self.layers:
            x = layer(x)
        return self.head(self.norm(x).mean(1))


def _scale(factor: float, writers: Iterable[nn.Module], readers: list[nn.Module]) -> None:
    """Make the channel that the readers read most that much larger between them."""
    with torch.no_grad():
        channel = int(sum(_per_input(reader) for reader in readers).argmax())
        for writer in writers:
            writer.weight[channel] *= factor
            writer.bias[channel] *= factor
        for reader in readers:
            reader.weight[:, channel] /= factor


def _per_input(layer: nn.Module) -> torch.Tensor:
    weight = layer.weight.abs()
    return weight.sum(tuple(axis for axis in range(weight.ndim) if axis != 1)) / weight.sum()


def _hostile_chain(net: Convolutions) -> None:
    """Between convolutions 2 and 3."""
    _scale(CHAIN_FACTOR, [net.convs[1]], [net.convs[2]])


def _inside_block(net: Residual, index: int, factors: Iterable[float] = (RESIDUAL_FACTOR,)) -> None:
    block = net.blocks[index]
    for factor in factors:
        _scale(factor, [block.norm1], [block.conv2])


def _hostile_one(net: Residual) -> None:
    """Inside the second block."""
    _inside_block(net, 1)


def _hostile_two(net: Residual) -> None:
    """Inside the second and the fifth block."""
    _inside_block(net, 1)
    _inside_block(net, 4)


def _hostile_three(net: Residual) -> None:
    """And on the stream between the stem and the fourth block.

    There, no two layers can be equalised: the stem and the first three blocks write the tensor,
    all of the first four, and the projection, read it.
    """
    _hostile_two(net)
    stage, following = net.blocks[: net.HALVED], net.blocks[net.HALVED]
    writers = [net.norm, *(block.norm2 for block in stage)]
    readers = [*(block.conv1 for block in stage), following.conv1, following.project]
    _scale(RESIDUAL_FACTOR, writers, readers)


def _hostile_spread(net: Residual) -> None:
    """Inside the second and the fifth block, 40 channels each, from ×3000 down to ×2.

    Where one channel is large, a range that clips it serves, as others do its work: calibration
    algorithms find that. Here, no range suits all.
    """
    factors = [3000 / 1.2**step for step in range(40)]
    _inside_block(net, 1, factors)
    _inside_block(net, 4, factors)


def _hostile_transformer(net: Transformer) -> None:
    """Three channels behind the first norm of the first layer and behind the second of all."""
    first = net.layers[0]
    for _ in range(3):  # a channel that was scaled is the one that is read least
        _scale(NORM_FACTOR, [first.norm1], [first.query, first.key, first.value])
        for layer in net.layers:
            _scale(NORM_FACTOR, [layer.norm2], [layer.wide])


Family = Callable[[], nn.Module]
_EASY: Family = lambda: Convolutions((64, 64, 128, 128))  # noqa: E731
_CHAIN: Family = lambda: Convolutions((64,) * 8)  # noqa: E731

#: Model → the net, what it is kept as, epochs of training, what makes it hostile.
NETS: dict[str, tuple[Family, str, int, Callable[..., None] | None]] = {
    "easy": (_EASY, "easy", 16, None),
    "chain": (_CHAIN, "chain", 32, _hostile_chain),
    "residual1": (Residual, "residual", 5, _hostile_one),
    "residual2": (Residual, "residual", 5, _hostile_two),
    "residual3": (Residual, "residual", 5, _hostile_three),
    "spread": (Residual, "residual", 5, _hostile_spread),
    "transformer": (Transformer, "transformer", 16, _hostile_transformer),
}


def plain_net(name: str) -> nn.Module:
    """A net as it was trained; that is done the first time it is asked for."""
    family, stem, epochs, _ = NETS[name]
    weights = kept(f"{stem}.npz", __file__)
    torch.manual_seed(0)
    net = family()
    if not weights.exists():
        _train(net, epochs)
        save_weights(net, weights)
    return with_weights(net, weights)


def net_in(framework: str, name: str) -> Any:
    """Return a net as a user of a framework has it."""
    if framework == "tensorflow":
        from benchmarks.nets.search_keras import keras_net

        return keras_net(name)
    return str(onnx_file(name)) if framework == "onnx" else search_net(name)


def search_net(name: str) -> nn.Module:
    """A net as the benchmark tunes it, with its hostile places."""
    net, spoil = plain_net(name), NETS[name][3]
    if spoil is not None:
        spoil(net)
    return net


def untrained_net(name: str) -> nn.Module:
    """To be given weights."""
    return NETS[name][0]().eval()


def save_weights(net: nn.Module, path: Path) -> None:
    np.savez(path, **{key: value.numpy() for key, value in net.state_dict().items()})


def with_weights(net: nn.Module, path: Path) -> nn.Module:
    with np.load(path) as arrays:
        net.load_state_dict({key: torch.from_numpy(arrays[key]) for key in arrays.files})
    return net.eval()


def _train(net: nn.Module, epochs: int) -> None:
    data = Digits("train")
    images, labels = torch.from_numpy(data.images), torch.from_numpy(data.labels)
    optimizer = torch.optim.AdamW(net.parameters(), 2e-3)
    steps = epochs * -(-len(labels) // 64)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 2e-3, total_steps=steps)
    net.train()
    for _ in range(epochs):
        for batch in torch.randperm(len(labels)).split(64):
            loss = F.cross_entropy(net(images[batch]), labels[batch])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            schedule.step()
    net.eval()


def onnx_file(name: str) -> Path:
    """The net as torch's exporter writes it, its batch open."""
    path = kept(f"{name}.onnx", __file__)
    if not path.exists():
        write_onnx(search_net(name), {"image": np.zeros((2, 1, 8, 8), np.float32)}, path)
    return path


def deviation(name: str) -> tuple[float, float]:
    """How far the hostile places change the outputs in FP32, relatively; the plain accuracy."""
    data = Digits("test")
    nets = plain_net(name), search_net(name)
    with torch.no_grad():
        plain, spoilt = (net(torch.from_numpy(data.images)) for net in nets)
    accuracy = (plain.argmax(1).numpy() == data.labels).mean()
    return float((plain - spoilt).abs().max() / plain.abs().max()), float(accuracy)
