"""Data, metric and machine of all contracts, without pytest."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np

from neural_mp.common import DataLoader
from neural_mp.core.hardware import NATIVE_FLAGS, Hardware, detect
from neural_mp.core.plan import PrecisionPlan
from neural_mp.core.precision import FP32, Precision
from neural_mp.space import TuningSpace

#: CPU flags that determine INT8 support only.
INTEGER_FLAGS = detect({}).flags & frozenset(NATIVE_FLAGS[Precision.INT8])


def machine(*forced: Precision) -> Hardware:
    """Return this machine without native 16-bit support, with `forced` precisions enabled."""
    return Hardware("this machine", INTEGER_FLAGS, 2, forced=frozenset(forced))


def signal_to_noise(reference: np.ndarray, given: np.ndarray) -> float:
    """Return the SQNR of an array in dB."""
    noise = max(float(np.linalg.norm(reference - given)), 1e-12)
    return float(20 * np.log10(float(np.linalg.norm(reference)) / noise))


def uniform(space: TuningSpace, precision: Precision) -> PrecisionPlan:
    """Return a plan with all tunable ops in `precision` if supported, else FP32."""
    return PrecisionPlan(
        {op: space.capabilities[op].config(precision) or FP32 for op in space.tunable_ops}
    )


@dataclass(frozen=True, eq=False)
class Split:
    """Part of scikit-learn's handwritten digits: `split[i]` is `(image, label)`.

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
        """Return a loader of the split."""
        return DataLoader(self, batch_size=batch_size)


@cache
def digits() -> tuple[Split, Split]:
    """Return the training part (1200 digits) and the test part (597)."""
    from sklearn.datasets import load_digits

    data = load_digits()
    order = np.random.default_rng(0).permutation(len(data.target))
    images = (data.images / 16).astype(np.float32)[:, None]
    labels = data.target.astype(np.int64)
    parts = order[:1200], order[1200:]
    train, test = (Split(images[part], labels[part]) for part in parts)
    return train, test


class Accuracy:
    """Accuracy metric as a user would write it, with a count of evaluations."""

    def __init__(self) -> None:
        self.evaluations = 0
        self.reset()

    def reset(self) -> None:
        """Reset the state."""
        self.right = self.all = 0

    def update(self, preds: object, labels: Any) -> None:
        """Count the correct predictions of a batch."""
        self.right += int((np.asarray(preds).argmax(1) == np.asarray(labels)).sum())
        self.all += len(labels)

    def result(self) -> float:
        """Return the fraction of correct predictions."""
        self.evaluations += 1
        return self.right / self.all
