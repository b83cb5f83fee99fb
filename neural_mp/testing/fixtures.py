"""What all contracts start from."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from neural_mp.common import DataLoader
from neural_mp.core.hardware import NATIVE_FLAGS, Hardware, detect
from neural_mp.core.plan import PrecisionPlan
from neural_mp.core.precision import FP32, Precision
from neural_mp.space import TuningSpace

#: The flags of this CPU that decide on INT8, and on nothing else.
INTEGER_FLAGS = detect({}).flags & frozenset(NATIVE_FLAGS[Precision.INT8])


def machine(*forced: Precision) -> Hardware:
    """This machine without its 16-bit instructions, and with what is forced on."""
    return Hardware("this machine", INTEGER_FLAGS, 2, forced=frozenset(forced))


def signal_to_noise(reference: np.ndarray, given: np.ndarray) -> float:
    """The signal-to-noise ratio of an array beside its reference, in decibels."""
    noise = max(float(np.linalg.norm(reference - given)), 1e-12)
    return float(20 * np.log10(float(np.linalg.norm(reference)) / noise))


def uniform(space: TuningSpace, precision: Precision) -> PrecisionPlan:
    """Every decided op in a precision where it can run in it, the rest in FP32."""
    return PrecisionPlan(
        {op: space.capabilities[op].config(precision) or FP32 for op in space.tunable_ops}
    )


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

    def update(self, preds: object, labels: Any) -> None:
        """Count the right answers of a batch."""
        self.right += int((np.asarray(preds).argmax(1) == np.asarray(labels)).sum())
        self.all += len(labels)

    def result(self) -> float:
        """The share of right answers."""
        self.evaluations += 1
        return self.right / self.all


class OnDigits:
    """Tests on scikit-learn's digits; the records of runs stay in the folder of the test."""

    @pytest.fixture(scope="session")
    @classmethod
    def digits(cls) -> tuple[Split, Split]:
        """The digits to train and calibrate with, and those to look at."""
        return digits()

    @pytest.fixture(autouse=True)
    def _own_folder(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.chdir(tmp_path)
