"""Metrics that several cases share."""

from __future__ import annotations

import numpy as np


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
