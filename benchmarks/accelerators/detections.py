"""Detections of one array of boxes and scores, as exports of YOLO return."""

from __future__ import annotations

import numpy as np

from benchmarks.real.ocr_detection import overlap

#: Least score of a detection, and overlap of boxes of one object.
_LEAST_SCORE, _SAME_OBJECT = 0.3, 0.5


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
