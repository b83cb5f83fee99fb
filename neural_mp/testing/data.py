"""Real data that comes with scikit-learn, and the metric a user would write."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np

from neural_mp.common import DataLoader


@dataclass(frozen=True, eq=False)
class Split:
    """A part of scikit-learn's handwritten digits: `split[i]` is `(image, label)`.

    Attributes:
        images: float32 in 0…1, shape [samples, 1, 8, 8].
        labels: int64, shape [samples].
    """

    images: np.ndarray
    labels: np.ndarray

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: int) -> tuple[np.ndarray, Any]:
        return self.images[index], self.labels[index]

    def loader(self, batch_size: int = 100) -> DataLoader:
        """The split in batches."""
        return DataLoader(self, batch_size=batch_size)


@cache
def digits() -> tuple[Split, Split]:
    """The training part, of 1200 digits, and the test part, of 597."""
    from sklearn.datasets import load_digits

    data = load_digits()
    order = np.random.default_rng(0).permutation(len(data.target))
    images = (data.images / 16).astype(np.float32)[:, None]
    labels = data.target.astype(np.int64)
    parts = order[:1200], order[1200:]
    train, test = (Split(images[part], labels[part]) for part in parts)
    return train, test


class Accuracy:
    """The metric a user would write; counts how often it was evaluated."""

    def __init__(self) -> None:
        self.evaluations = 0
        self.reset()

    def reset(self) -> None:
        """Forget the batches seen."""
        self.right = self.all = 0

    def update(self, preds: Any, labels: Any) -> None:
        """Count the right answers of a batch."""
        self.right += int((np.asarray(preds).argmax(1) == np.asarray(labels)).sum())
        self.all += len(labels)

    def result(self) -> float:
        """The share of right answers."""
        self.evaluations += 1
        return self.right / self.all
