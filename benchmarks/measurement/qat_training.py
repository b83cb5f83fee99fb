"""Training of nets that compute with the rounding of a plan, the same for every tool.

A peer's Python runs this file too: it must not import neural_mp.
"""

from __future__ import annotations

import copy
import math
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.nn import functional as F

from benchmarks.measurement.search_data import Digits
from benchmarks.nets.qat_nets import Case, accuracy

BATCH, RATE = 50, 5e-3


@dataclass(frozen=True)
class Tool:
    """A tool of quantization-aware training.

    Attributes:
        simulate: net, calibration images, steps → a module to train.
        convert: the trained module → the runs of the converted model.
    """

    simulate: Callable[[nn.Module, torch.Tensor, int], nn.Module]
    convert: Callable[[Any], Callable[[np.ndarray], object]]


@dataclass(frozen=True)
class Outcome:
    """Figures of a training.

    Attributes:
        simulated: accuracy of the trained module.
        converted: accuracy of the converted model.
        seconds: CPU seconds of preparation, training and conversion.
        ratio: CPU seconds of a step over those of FP32 training, the median.
    """

    simulated: float
    converted: float
    seconds: float
    ratio: float


def runs_of(module: nn.Module) -> Callable[[np.ndarray], object]:
    """Return the runs of a module."""

    @torch.no_grad()
    def run(images: np.ndarray) -> object:
        return module(torch.from_numpy(images)).numpy()

    return run


def steps_in(epochs: int) -> int:
    """Return the number of steps of a training."""
    return epochs * math.ceil(len(Digits("train")) / BATCH)


def outcome(tool: Tool, case: Case, images: torch.Tensor, epochs: int) -> Outcome:
    """Train the net of a case with a tool, beside its training in FP32."""
    net = case.net()
    torch.manual_seed(0)
    started = time.process_time()
    simulation = tool.simulate(copy.deepcopy(net), images, steps_in(epochs))
    seconds = time.process_time() - started
    for module in (net, simulation):
        module.train()  # returns nothing in an exported module
    pairs = list(_trained(net, simulation, epochs))
    simulation.eval()
    started = time.process_time()
    converted = tool.convert(simulation)
    seconds += time.process_time() - started + sum(ours for _, ours in pairs)
    ratio = statistics.median(ours / fp32 for fp32, ours in pairs)
    return Outcome(accuracy(runs_of(simulation)), accuracy(converted), seconds, ratio)


def _trained(net: nn.Module, simulation: nn.Module, epochs: int) -> Iterator[tuple[float, float]]:
    """Train two modules in turn, and yield the CPU seconds of each step of both.

    The learning rate decays along half a cosine.
    """
    data = Digits("train")
    batches = list(
        zip(
            torch.tensor(data.images).split(BATCH),
            torch.tensor(data.labels).split(BATCH),
            strict=True,
        )
    )
    runs = [(module, _adam(module)) for module in (net, simulation)]
    for epoch in range(epochs):
        for _, optimizer in runs:
            optimizer.param_groups[0]["lr"] = RATE * 0.5 * (1 + math.cos(math.pi * epoch / epochs))
        for x, y in batches:
            first, second = (step_seconds(*run, x, y) for run in runs)
            yield first, second


def _adam(module: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.Adam([p for p in module.parameters() if p.requires_grad], RATE)


def step_seconds(
    module: nn.Module, optimizer: torch.optim.Optimizer, x: torch.Tensor, y: torch.Tensor
) -> float:
    """Take a step, and return its CPU seconds."""
    started = time.process_time()
    optimizer.zero_grad()
    F.cross_entropy(module(x), y).backward()
    optimizer.step()
    return time.process_time() - started
