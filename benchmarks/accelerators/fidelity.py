"""Metrics of outputs against those of FP32, or against the truth; higher is better.

Detections are read of one array of boxes and scores, as exports of YOLO return.
"""

from __future__ import annotations

import numpy as np
from scipy.stats import rankdata

from benchmarks.real.ocr import THRESHOLD, overlap, text_of

#: Least score of a detection, and overlap of boxes of one object.
_LEAST_SCORE, _SAME_OBJECT = 0.3, 0.5


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


def detections_in(output: np.ndarray) -> list[tuple[np.ndarray, int]]:
    """Return boxes and classes in an array [4 + classes, cells], without doubles.

    Boxes are left, top, right, bottom; of several of one object, the one of the highest score.
    """
    scores, classes = output[4:].max(0), output[4:].argmax(0)
    kept: list[tuple[np.ndarray, int]] = []
    for cell in np.argsort(-scores):
        if scores[cell] < _LEAST_SCORE:
            break
        box = output[:4, cell]
        if all(overlap(box, other) < _SAME_OBJECT for other, _ in kept):
            kept.append((box, int(classes[cell])))
    return kept


class Detections:
    """F1 score of detections: objects of the right class whose boxes overlap by half."""

    def __init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        """Reset the state."""
        self.matched = self.shown = self.expected = 0

    def update(self, preds: np.ndarray, labels: np.ndarray) -> None:
        """Add outputs [scenes, 4 + classes, cells], and objects [scenes, objects, 5]."""
        for output, objects in zip(preds, labels, strict=True):
            detections = detections_in(np.asarray(output))
            present = objects[objects[:, 4] >= 0]
            self.shown += len(detections)
            self.expected += len(present)
            self.matched += sum(
                any(
                    kind == row[4] and overlap(box, row[:4]) >= _SAME_OBJECT
                    for box, kind in detections
                )
                for row in present
            )

    def result(self) -> float:
        """Return the F1 score."""
        return 2 * self.matched / max(1, self.shown + self.expected)
