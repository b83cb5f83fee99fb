"""Losses and distances of `torch.nn`, as outputs of a model."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from zoo.harness import Case
from zoo.torch_cases import BY_MODULES, Inputs, case, floats, integers, loss, several

_WIDTH = 10


def probabilities(*shape: int) -> Inputs:
    """Rows that sum to 1."""
    return lambda samples: torch.softmax(torch.randn(samples, *shape), -1)


def signs(*shape: int) -> Inputs:
    """Values of -1 and 1."""
    return lambda samples: torch.randint(0, 2, (samples, *shape)) * 2.0 - 1.0


class _Probable(nn.Module):
    """A loss of log-probabilities or of probabilities."""

    def __init__(self, loss_of: nn.Module, change: Callable[[torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.loss_of, self.change = loss_of, change

    def forward(self, x: torch.Tensor, *targets: Any) -> torch.Tensor:
        return self.loss_of(self.change(x), *targets)


def _log(x: torch.Tensor) -> torch.Tensor:
    return torch.log_softmax(x, 1)


class _Ctc(nn.Module):
    """CTC of 12 steps and five letters a sample."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.loss = nn.Linear(6, 8), nn.CTCLoss()

    def forward(self, x: torch.Tensor, letters: torch.Tensor) -> torch.Tensor:
        steps = torch.log_softmax(self.stem(x), 2).transpose(0, 1)
        lengths = torch.full((x.shape[0],), 12), torch.full((x.shape[0],), 5)
        return self.loss(steps, letters, *lengths)


def _letters(samples: int) -> torch.Tensor:
    return torch.randint(1, 8, (samples, 5))


CASES: tuple[Case, ...] = (
    *(
        loss(kind.__name__, kind, _WIDTH, floats(_WIDTH))
        for kind in (nn.HuberLoss, nn.L1Loss, nn.MSELoss, nn.SmoothL1Loss, nn.PoissonNLLLoss)
    ),
    loss("MSELoss unreduced", lambda: nn.MSELoss(reduction="none"), _WIDTH, floats(_WIDTH)),
    *(
        loss(kind.__name__, kind, _WIDTH, integers(_WIDTH))
        for kind in (nn.CrossEntropyLoss, nn.MultiMarginLoss)
    ),
    loss(
        "CrossEntropyLoss weighted",
        lambda: nn.CrossEntropyLoss(weight=torch.linspace(0.5, 1, _WIDTH), label_smoothing=0.1),
        _WIDTH,
        integers(_WIDTH),
    ),
    loss("NLLLoss", lambda: _Probable(nn.NLLLoss(), _log), _WIDTH, integers(_WIDTH)),
    loss("KLDivLoss", lambda: _Probable(nn.KLDivLoss(), _log), _WIDTH, probabilities(_WIDTH)),
    loss("BCELoss", lambda: _Probable(nn.BCELoss(), torch.sigmoid), _WIDTH, probabilities(_WIDTH)),
    loss("BCEWithLogitsLoss", nn.BCEWithLogitsLoss, _WIDTH, probabilities(_WIDTH)),
    loss("MultiLabelSoftMarginLoss", nn.MultiLabelSoftMarginLoss, _WIDTH, probabilities(_WIDTH)),
    loss("SoftMarginLoss", nn.SoftMarginLoss, _WIDTH, signs(_WIDTH)),
    loss("HingeEmbeddingLoss", nn.HingeEmbeddingLoss, _WIDTH, signs(_WIDTH)),
    loss("MultiLabelMarginLoss", nn.MultiLabelMarginLoss, _WIDTH, integers(_WIDTH, _WIDTH)),
    loss(
        "GaussianNLLLoss",
        nn.GaussianNLLLoss,
        _WIDTH,
        floats(_WIDTH),
        probabilities(_WIDTH),
        **BY_MODULES,
    ),
    loss("MarginRankingLoss", nn.MarginRankingLoss, _WIDTH, floats(_WIDTH), signs(_WIDTH)),
    loss("CosineEmbeddingLoss", nn.CosineEmbeddingLoss, _WIDTH, floats(_WIDTH), signs()),
    loss("TripletMarginLoss", nn.TripletMarginLoss, _WIDTH, floats(_WIDTH), floats(_WIDTH)),
    loss(
        "TripletMarginWithDistanceLoss",
        lambda: nn.TripletMarginWithDistanceLoss(distance_function=nn.PairwiseDistance()),
        _WIDTH,
        floats(_WIDTH),
        floats(_WIDTH),
    ),
    loss("CosineSimilarity", nn.CosineSimilarity, _WIDTH, floats(_WIDTH)),
    loss("PairwiseDistance", nn.PairwiseDistance, _WIDTH, floats(_WIDTH)),
    case("CTCLoss", _Ctc, several(floats(12, 6), _letters), **BY_MODULES),
    loss(
        "LinearCrossEntropyLoss", lambda: nn.LinearCrossEntropyLoss(_WIDTH, 6), _WIDTH, integers(6)
    ),
    loss("NLLLoss2d", lambda: _Probable(nn.NLLLoss2d(), _log), _WIDTH, integers(_WIDTH)),
    loss(
        "AdaptiveLogSoftmaxWithLoss",
        lambda: nn.AdaptiveLogSoftmaxWithLoss(_WIDTH, 20, [5, 10]),
        _WIDTH,
        integers(20),
        **BY_MODULES,
    ),
)
