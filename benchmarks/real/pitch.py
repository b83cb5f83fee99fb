"""A pitch tracker of wide 1-D convolutions, as CREPE is built, trained here on synthesised tones.

Layers follow Kim et al., "CREPE: A Convolutional Representation for Pitch Estimation" (2018): six
convolutions, the first of one channel and kernel 512, at a third of the published width.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.real.case import Accuracy, Batches, Case, Split

RATE, WINDOW, BATCH = 16_000, 1024, 16
#: Semitones from 65.4 Hz on.
NOTES, LOWEST_HERTZ = 48, 65.4
FILTERS, KERNELS, STRIDES = (
    (320, 40, 40, 40, 80, 160),
    (512, 64, 64, 64, 64, 64),
    (4, 1, 1, 1, 1, 1),
)
STEPS, LEARNING_RATE = 220, 1e-3
BATCHES = {"calibration": 4, "test": 24}


def tones(draw: np.random.Generator, count: int) -> tuple[np.ndarray, np.ndarray]:
    """Return windows of tones with overtones and noise, float32 [count, 1024], and their notes."""
    notes = draw.integers(0, NOTES, count)
    hertz = LOWEST_HERTZ * 2 ** ((notes + draw.uniform(-0.3, 0.3, count)) / 12)
    time = np.arange(WINDOW) / RATE
    sounds = np.zeros((count, WINDOW))
    for overtone in range(1, 7):
        phase, level = (
            draw.uniform(0, 6.28, (count, 1)),
            draw.uniform(0.2, 1, (count, 1)) / overtone,
        )
        sounds += level * np.sin(6.2832 * overtone * hertz[:, None] * time + phase)
    sounds += draw.normal(0, 1, sounds.shape) * draw.uniform(0.02, 0.4, (count, 1))
    sounds -= sounds.mean(1, keepdims=True)
    return (sounds / sounds.std(1, keepdims=True)).astype(np.float32), notes


def batches(split: Split) -> Batches:
    """Return batches of windows and notes."""
    draw = np.random.default_rng(1 if split == "calibration" else 2)
    return Batches([tones(draw, BATCH) for _ in range(BATCHES[split])], BATCH)


def network() -> Any:
    """Return the untrained module: float32 [batch, 1024] → [batch, 48]."""
    import torch
    from torch import nn

    layers: list[Any] = [nn.Unflatten(1, (1, WINDOW))]
    arriving = 1
    for filters, kernel, stride in zip(FILTERS, KERNELS, STRIDES, strict=True):
        layers += [
            nn.ConstantPad1d(((kernel - stride) // 2, (kernel - stride + 1) // 2), 0.0),
            nn.Conv1d(arriving, filters, kernel, stride),
            nn.ReLU(),
            nn.BatchNorm1d(filters),
            nn.MaxPool1d(2),
        ]
        arriving = filters
    torch.manual_seed(0)
    return nn.Sequential(*layers, nn.Flatten(), nn.Linear(FILTERS[-1] * 4, NOTES))


def trained(scratch: Path) -> Any:
    """Return the trained module; its weights are kept in the folder."""
    import torch

    net, file = network(), scratch / "pitch.pt"
    if not file.exists():
        draw = np.random.default_rng(0)
        optimizer = torch.optim.Adam(net.parameters(), LEARNING_RATE)
        for _ in range(STEPS):
            sounds, notes = map(torch.from_numpy, tones(draw, 32))
            loss = torch.nn.functional.cross_entropy(net(sounds), notes)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        torch.save(net.state_dict(), file)
    net.load_state_dict(torch.load(file, weights_only=True))
    return net.eval()


CASE = Case("pytorch", trained, batches, Accuracy, ())
