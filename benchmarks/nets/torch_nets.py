"""The nets of the PyTorch benchmark, and what they are fed with.

Plain torch that old releases run and can trace, since a peer needs those.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import nn

from benchmarks.nets.bert import bert_base
from benchmarks.nets.resnet50 import resnet50
from benchmarks.nets.search_nets import untrained_net

Inputs = tuple[torch.Tensor, ...]


def _random(*shape: int) -> Callable[[int], Inputs]:
    def draw(batch: int) -> Inputs:
        return (torch.randn(batch, *shape, generator=torch.Generator().manual_seed(0)),)

    return draw


def _sentences(batch: int) -> Inputs:
    draw = torch.Generator().manual_seed(0)
    return torch.randint(0, 30000, (batch, 128), generator=draw), torch.ones(batch, 128).long()


@dataclass(frozen=True)
class Net:
    """A model and its data.

    Attributes:
        build: makes the model, in evaluation mode.
        inputs: makes a batch of so many samples.
        samples: how many it is calibrated with.
        batch: how many of those at once.
    """

    build: Callable[[], nn.Module]
    inputs: Callable[[int], Inputs]
    samples: int = 32
    batch: int = 8

    def calibration(self) -> list[Inputs]:
        """The calibration data in batches."""
        parts = (tensor.split(self.batch) for tensor in self.inputs(self.samples))
        return list(zip(*parts))  # noqa: B905 - they are of one length


def _small(name: str) -> Net:
    """A net of the search benchmark: digits of 8×8 pixels."""

    def build() -> nn.Module:
        torch.manual_seed(0)
        return untrained_net(name)

    return Net(build, _random(1, 8, 8), samples=100, batch=20)


LARGE = {
    "resnet50": Net(resnet50, _random(3, 224, 224)),
    "bert": Net(bert_base, _sentences),
}
NETS = {**LARGE, **{name: _small(name) for name in ("easy", "chain", "residual1", "transformer")}}
