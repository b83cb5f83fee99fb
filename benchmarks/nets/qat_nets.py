"""Nets over the digits that lose much accuracy in a plan of INT8 or 4-bit weights alone.

All are trained without weight decay. Hostile channels are then made smaller where they are written
and larger where they are read, which changes nothing of the function: one scale per output leaves
the other inputs of a layer few codes. In `Stream`, every channel is added to all layers before, so
that no channel can be rescaled.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from torch import nn
from torch.nn import functional as F

from benchmarks.measurement.search_data import Digits, kept

EPOCHS, BATCH, RATE = 20, 50, 3e-3


class Stream(nn.Module):
    """Dense layers that add to a stream."""

    def __init__(self, width: int = 64, depth: int = 3) -> None:
        super().__init__()
        self.first = nn.Linear(64, width)
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(depth))
        self.head = nn.Linear(width, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = F.relu(self.first(x.flatten(1)))
        for layer in self.layers:
            x = F.relu(x + layer(x))
        return self.head(x)

    @torch.no_grad()
    def shrink(self, channels: list[int], factor: float) -> None:
        """Make channels of the stream smaller, and their readers larger."""
        for layer in (self.first, *self.layers):
            layer.weight[channels] /= factor
            layer.bias[channels] /= factor
        for layer in (*self.layers, self.head):
            layer.weight[:, channels] *= factor


class Narrow(nn.Module):
    """Depthwise and pointwise convolutions of 16 channels, with shortcuts."""

    def __init__(self, width: int = 16, blocks: int = 4) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(1, width, 3, padding=1), nn.BatchNorm2d(width))
        self.depthwise, self.pointwise = (
            nn.ModuleList(
                nn.Sequential(convolution(), nn.BatchNorm2d(width)) for _ in range(blocks)
            )
            for convolution in (
                lambda: nn.Conv2d(width, width, 3, padding=1, groups=width),
                lambda: nn.Conv2d(width, width, 1),
            )
        )
        self.head = nn.Linear(width, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = F.relu(self.stem(x))
        for depthwise, pointwise in zip(self.depthwise, self.pointwise, strict=True):
            x = F.relu(x + pointwise(F.relu(depthwise(x))))
        return self.head(x.mean((2, 3)))

    @torch.no_grad()
    def shrink(self, channels: list[int], factor: float) -> None:
        """Make channels between the convolutions of every block smaller."""
        for depthwise, pointwise in zip(self.depthwise, self.pointwise, strict=True):
            depthwise[1].weight[channels] /= factor
            depthwise[1].bias[channels] /= factor
            pointwise[0].weight[:, channels] *= factor


@dataclass(frozen=True)
class Case:
    """A net and its plan.

    Attributes:
        name: the name.
        build: makes the net.
        bits: bits of the weights; activations are INT8 for 8 bits, else float.
        channels: the hostile channels.
        factor: their factor.
    """

    name: str
    build: Callable[[], nn.Module]
    bits: int
    channels: tuple[int, ...]
    factor: float

    def net(self) -> nn.Module:
        """Return the trained net."""
        torch.manual_seed(0)
        net = self.build()
        path = kept(f"qat_{type(net).__name__}.pt", __file__)
        if not path.exists():
            _train(net)
            torch.save(net.state_dict(), path)
        net.load_state_dict(torch.load(path, weights_only=True))
        net.shrink(list(self.channels), self.factor)  # type: ignore[operator]
        return net.eval()


CASES = (
    Case("dense with shortcuts, 4-bit weights", Stream, 4, (3, 17, 40, 60), 30.0),
    Case("dense with shortcuts, INT8", Stream, 8, (3, 17, 40, 60), 300.0),
    Case("narrow depthwise, INT8", Narrow, 8, (2, 7, 11), 1000.0),
)


def _train(net: nn.Module) -> None:
    data = Digits("train")
    images, labels = torch.tensor(data.images), torch.tensor(data.labels)
    optimizer = torch.optim.Adam(net.parameters(), RATE)
    net.train()
    for _ in range(EPOCHS):
        for part in torch.randperm(len(images)).split(BATCH):
            optimizer.zero_grad()
            F.cross_entropy(net(images[part]), labels[part]).backward()
            optimizer.step()


def accuracy(run: Callable[[np.ndarray], object]) -> float:
    """Return the accuracy of a model on the test images."""
    data = Digits("test")
    outputs = run(data.images)
    outputs = outputs[0] if isinstance(outputs, list | tuple) else outputs
    scores = np.asarray(next(iter(outputs.values())) if isinstance(outputs, dict) else outputs)
    return float((scores.argmax(1) == data.labels).mean())
