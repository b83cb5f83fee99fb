"""Metrics that several cases share."""

from __future__ import annotations

import numpy as np


class Accuracy:
    """The share of samples whose highest score is at the label."""

    def __init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        self.right = self.all = 0

    def update(self, preds: np.ndarray, labels: np.ndarray) -> None:
        self.right += int((np.asarray(preds).argmax(1) == labels).sum())
        self.all += len(labels)

    def result(self) -> float:
        return self.right / self.all
