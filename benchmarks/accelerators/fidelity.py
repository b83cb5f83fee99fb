"""Metrics of outputs against those of FP32, or against the truth; higher is better."""

from __future__ import annotations

import numpy as np
from scipy.stats import rankdata

from benchmarks.real.ocr_detection import THRESHOLD
from benchmarks.real.ocr_recognition import text_of


class Spearman:
    """The rank correlation of cosines between all texts with the cosines of FP32."""

    def __init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        """Reset the state."""
        self.actual: list[np.ndarray] = []
        self.expected: list[np.ndarray] = []

    def update(self, preds: np.ndarray, labels: np.ndarray) -> None:
        """Add embeddings [texts, width], and those of FP32."""
        self.actual.append(np.asarray(preds))
        self.expected.append(np.asarray(labels))

    def result(self) -> float:
        """Return the correlation."""
        ranks = (rankdata(_cosines(np.concatenate(p))) for p in (self.actual, self.expected))
        return float(np.corrcoef(*ranks)[0, 1])


def _cosines(embeddings: np.ndarray) -> np.ndarray:
    """Return the cosine of each pair of rows."""
    unit = embeddings / np.maximum(np.linalg.norm(embeddings, axis=1, keepdims=True), 1e-12)
    return (unit @ unit.T)[np.triu_indices(len(unit), 1)]


class Characters:
    """One minus the edit distance to the true lines, per character, spaces aside."""

    def __init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        """Reset the state."""
        self.wrong = self.all = 0

    def update(self, preds: np.ndarray, labels: np.ndarray) -> None:
        """Add scores [lines, steps, classes], and the true lines."""
        for scores, line in zip(preds, labels, strict=True):
            expected = str(line).replace(" ", "")
            self.wrong += edit_distance(text_of(scores).replace(" ", ""), expected)
            self.all += len(expected)

    def result(self) -> float:
        """Return the share of right characters."""
        return 1 - self.wrong / self.all


def edit_distance(first: str, second: str) -> int:
    """Return the number of insertions, deletions and replacements between two texts."""
    row = list(range(len(second) + 1))
    for i, a in enumerate(first, 1):
        previous, row[0] = row[0], i
        for j, b in enumerate(second, 1):
            previous, row[j] = row[j], min(row[j] + 1, row[j - 1] + 1, previous + (a != b))
    return row[-1]


class MaskOverlap:
    """Intersection over union of masks, that of scores beside the threshold of the labels."""

    def __init__(self, threshold: float = THRESHOLD) -> None:
        self.threshold = threshold
        self.reset()

    def reset(self) -> None:
        """Reset the state."""
        self.shared = self.either = 0

    def update(self, preds: np.ndarray, labels: np.ndarray) -> None:
        """Add scores, and reference scores or masks of the same shape."""
        mask, reference = np.asarray(preds) > self.threshold, np.asarray(labels) > THRESHOLD
        self.shared += int((mask & reference).sum())
        self.either += int((mask | reference).sum())

    def result(self) -> float:
        """Return the overlap."""
        return self.shared / self.either


class Probability:
    """One minus the mean difference of probabilities to those of FP32."""

    def __init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        """Reset the state."""
        self.difference, self.all = 0.0, 0

    def update(self, preds: np.ndarray, labels: np.ndarray) -> None:
        """Add probabilities, and those of FP32."""
        self.difference += float(np.abs(np.asarray(preds) - np.asarray(labels)).sum())
        self.all += np.asarray(labels).size

    def result(self) -> float:
        """Return one minus the mean difference."""
        return 1 - self.difference / self.all
