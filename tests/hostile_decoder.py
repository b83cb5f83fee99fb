"""A small decoder of bytes, trained on text of the standard library, with channels of outliers."""

from __future__ import annotations

import inspect
from argparse import ArgumentParser
from collections.abc import Callable
from functools import cache
from pathlib import Path

import numpy as np
import torch
from torch import nn
from torch.nn import functional as F

from neural_mp.adaptors.pytorch.adaptor import PyTorchAdaptor

WIDTH, HEADS, HIDDEN, LENGTH = 64, 4, 128, 48
#: The factors of the channels of outliers.
_OUTLIERS = (8.0, 16.0, 32.0, 64.0)


class RMSNorm(nn.Module):
    """Root mean square normalization."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.weight * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6))


class Block(nn.Module):
    """Attention and a gated product, each behind a normalization."""

    def __init__(self) -> None:
        super().__init__()
        self.before, self.between = RMSNorm(), RMSNorm()
        self.q, self.k, self.v, self.o = (nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(4))
        self.gate, self.up = (nn.Linear(WIDTH, HIDDEN, bias=False) for _ in range(2))
        self.down = nn.Linear(HIDDEN, WIDTH, bias=False)

    def forward(self, x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        normed = self.before(x)
        q, k, v = (f(normed).unflatten(-1, (HEADS, -1)).transpose(1, 2) for f in self._heads())
        scores = q @ k.transpose(-1, -2) / (WIDTH / HEADS) ** 0.5 + mask
        x = x + self.o((scores.softmax(-1) @ v).transpose(1, 2).flatten(-2))
        normed = self.between(x)
        return x + self.down(F.silu(self.gate(normed)) * self.up(normed))

    def _heads(self) -> tuple[nn.Linear, ...]:
        return self.q, self.k, self.v


class Decoder(nn.Module):
    """Two blocks between a table of bytes with positions and a dense layer."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.places = nn.Embedding(128, WIDTH), nn.Embedding(LENGTH, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.last, self.head = RMSNorm(), nn.Linear(WIDTH, 128, bias=False)
        self.register_buffer("mask", torch.full((LENGTH, LENGTH), -1e4).triu(1))

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.table(ids) + self.places.weight
        for block in self.blocks:
            x = block(x, self.mask)
        return self.head(self.last(x))


@cache
def windows() -> tuple[np.ndarray, np.ndarray]:
    """Return windows of bytes to train on, and others to test on: int64 [windows, length + 1]."""
    text = np.frombuffer(inspect.getsource(inspect.getmodule(ArgumentParser)).encode(), np.uint8)
    count = len(text) // (LENGTH + 1)
    cut = np.minimum(text[: count * (LENGTH + 1)], 127).astype(np.int64).reshape(count, -1)
    order = np.random.default_rng(0).permutation(count)
    return cut[order[64:]], cut[order[:64]]


@cache
def trained(has_outliers: bool = True) -> Decoder:
    """Return the decoder after some hundred steps, with the same function but outliers if asked."""
    torch.manual_seed(0)
    net, (rows, _) = Decoder(), windows()
    steps = torch.optim.AdamW(net.parameters(), 3e-3)
    random = np.random.default_rng(0)
    for _ in range(400):
        batch = torch.from_numpy(rows[random.integers(len(rows), size=16)])
        logits = net(batch[:, :-1])
        steps.zero_grad()
        F.cross_entropy(logits.flatten(0, 1), batch[:, 1:].flatten()).backward()
        steps.step()
    with torch.no_grad():
        for block in net.blocks:
            for norm, readers in (
                (block.before, (block.q, block.k, block.v)),
                (block.between, (block.gate, block.up)),
            ):
                for factor in _OUTLIERS if has_outliers else ():
                    channel = int(random.integers(WIDTH))
                    norm.weight[channel] *= factor
                    for reader in readers:
                        reader.weight[:, channel] /= factor
    return net.eval()


def exported(folder: Path) -> Path:
    """Write the decoder as an ONNX file, with the toolkit's own export."""
    adaptor, path = PyTorchAdaptor(), folder / "decoder.onnx"
    model = adaptor.load(trained(), example=torch.from_numpy(windows()[1][:2, :-1]))
    adaptor.export_onnx(model, path, {})
    return path


def loss(logits_of: Callable[[np.ndarray], np.ndarray]) -> float:
    """Return the mean loss per byte of windows that training and calibration have not seen."""
    _, rows = windows()
    losses = []
    for batch in np.split(rows, 4):
        logits = logits_of(batch[:, :-1]).astype(np.float64)
        shifted = logits - logits.max(-1, keepdims=True)
        log = shifted - np.log(np.exp(shifted).sum(-1, keepdims=True))
        losses.append(-np.take_along_axis(log, batch[:, 1:, None], -1).mean())
    return float(np.mean(losses))
