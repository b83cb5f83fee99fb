"""Parts of a case of the bench of pretrained models, and metrics that several cases share."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Protocol

import numpy as np

Split = Literal["calibration", "test"]
Batch = tuple[Any, Any]


class MissingPartError(Exception):
    """A package or a program that a case needs is not there."""


class Metric(Protocol):
    """A metric as `MixedPrecision` takes it."""

    def reset(self) -> None: ...

    def update(self, preds: Any, labels: Any) -> None: ...

    def result(self) -> float: ...


@dataclass(frozen=True)
class Batches:
    """Batches that are made once, and can be gone through again and again."""

    made: Sequence[Batch]
    batch_size: int

    def __iter__(self) -> Iterator[Batch]:
        return iter(self.made)

    def __len__(self) -> int:
        return len(self.made)


@dataclass(frozen=True)
class Case:
    """A pretrained model, with what a user would have at hand.

    Attributes:
        framework: `onnxrt`, `pytorch` or `tensorflow`.
        source: a folder for scratch files → the model as a user would give it.
        batches: part of the data → its batches of `(inputs, labels)`.
        metric: makes the metric of its users; higher is better.
        peers: the tools beside ours, by the names in `peers`.
        relative: the share of the accuracy that may be lost.
    """

    framework: str
    source: Callable[[Path], Any]
    batches: Callable[[Split], Batches]
    metric: Callable[[], Metric]
    peers: tuple[str, ...]
    relative: float = 0.01


def shipped(package: str, *parts: str) -> Path:
    """A file that an installed package ships; the package is not imported.

    Raises:
        MissingPartError: the package is not installed.
    """
    spec = importlib.util.find_spec(package)
    if spec is None or not spec.submodule_search_locations:
        raise MissingPartError(
            f"the package {package!r} is not installed; pip install -e '.[bench]'"
        )
    return Path(spec.submodule_search_locations[0], *parts)


class Share:
    """The share of answers that are right; a metric says which in `update`."""

    def __init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        self.right = self.all = 0

    def count(self, right: np.ndarray) -> None:
        """Take in some answers: whether each is right."""
        self.right += int(np.sum(right))
        self.all += len(right)

    def result(self) -> float:
        return self.right / self.all


class Accuracy(Share):
    """The share of samples whose highest score is at the label."""

    def update(self, preds: np.ndarray, labels: np.ndarray) -> None:
        self.count(np.asarray(preds).argmax(1) == labels)
