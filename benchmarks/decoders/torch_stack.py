"""Layers with the widths of a decoder of 0.5 billion weights, in PyTorch, and interleaved times."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from statistics import median
from typing import Any

import torch
from torch import nn

#: Widths of the hidden state, of keys and values, within the layers, and number of words.
WIDTH, CACHED, INNER, WORDS = 896, 128, 4864, 32000
ROWS = (1, 8, 128)


class Layer(nn.Module):
    """The products of a decoder layer that read weights; attention itself is left out."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v, self.o = (
            nn.Linear(WIDTH, width, bias=False) for width in (WIDTH, CACHED, CACHED, WIDTH)
        )
        self.gate, self.up = (nn.Linear(WIDTH, INNER, bias=False) for _ in range(2))
        self.down = nn.Linear(INNER, WIDTH, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        mixed = (self.k(x) * self.v(x)).repeat(1, WIDTH // CACHED)
        x = x + self.o(self.q(x) + mixed)
        x = x + self.down(nn.functional.silu(self.gate(x)) * self.up(x))
        return torch.tanh(x)


def stack(layers: int) -> nn.Module:
    """Return layers and an output layer with random weights."""
    torch.manual_seed(0)
    return nn.Sequential(*(Layer() for _ in range(layers)), nn.Linear(WIDTH, WORDS, bias=False))


def inputs() -> dict[int, torch.Tensor]:
    """Rows → random inputs."""
    draw = torch.Generator().manual_seed(1)
    return {rows: torch.randn(rows, WIDTH, generator=draw) for rows in ROWS}


def cpu_seconds(calls: Sequence[Callable[[], Any]], rounds: int) -> list[list[float]]:
    """Return the CPU seconds of interleaved calls, a list per call."""
    durations: list[list[float]] = [[] for _ in calls]
    for call in calls:
        call()
    for _ in range(rounds):
        for call, seconds in zip(calls, durations, strict=True):
            started = time.process_time()
            call()
            seconds.append(time.process_time() - started)
    return durations


def ratio(first: Sequence[float], second: Sequence[float]) -> float:
    """Return the median of the ratios of paired times."""
    return median(a / b for a, b in zip(first, second, strict=True))
