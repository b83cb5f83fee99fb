"""RapidOCR's detector (PP-OCRv4): a page in, the places of its lines out."""

from __future__ import annotations

import numpy as np
from scipy import ndimage

from benchmarks.real.case import Batches, Case, Split, shipped
from benchmarks.real.rendered import page

HEIGHT, WIDTH, BATCH = 384, 512, 1
PAGES = {"calibration": 16, "test": 60}
MEAN, DEVIATION = np.array([0.485, 0.456, 0.406]), np.array([0.229, 0.224, 0.225])
#: What the package itself takes: where text is, and by how much the model shrinks its places.
THRESHOLD, SHRUNK = 0.3, 1.6


def batches(split: Split) -> Batches:
    start = 40_000 if split == "calibration" else 50_000
    pages = []
    for seed in range(start, start + PAGES[split]):
        shown, boxes = page(seed, HEIGHT, WIDTH)
        pixels = (shown / 255 - MEAN) / DEVIATION
        pages.append((pixels.transpose(2, 0, 1)[None].astype(np.float32), boxes[None]))
    return Batches(pages, BATCH)


def boxes_in(scores: np.ndarray) -> np.ndarray:
    """The boxes [found, 4] that a map of scores [height, width] shows."""
    labelled, _ = ndimage.label(scores > THRESHOLD)
    boxes = []
    for rows, columns in ndimage.find_objects(labelled):
        height, width = rows.stop - rows.start, columns.stop - columns.start
        if min(height, width) < 3:
            continue
        grown = SHRUNK * height * width / (2 * (height + width))
        boxes.append(
            (columns.start - grown, rows.start - grown, columns.stop + grown, rows.stop + grown)
        )
    return np.asarray(boxes, np.float32).reshape(-1, 4)


def overlap(first: np.ndarray, second: np.ndarray) -> float:
    """Intersection over union of two boxes."""
    low, high = np.maximum(first[:2], second[:2]), np.minimum(first[2:], second[2:])
    shared = float(np.prod(np.maximum(high - low, 0)))
    areas = float(np.prod(first[2:] - first[:2]) + np.prod(second[2:] - second[:2]))
    return shared / (areas - shared)


class HarmonicMean:
    """Of precision and recall, of boxes that overlap by half: the F1 score of detections."""

    def __init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        self.matched = self.found = self.there = 0

    def update(self, preds: np.ndarray, labels: np.ndarray) -> None:
        for scores, truth in zip(preds[:, 0], labels, strict=True):
            detected = boxes_in(scores)
            self.matched += sum(
                any(overlap(box, candidate) >= 0.5 for candidate in detected) for box in truth
            )
            self.found += len(detected)
            self.there += len(truth)

    def result(self) -> float:
        return 2 * self.matched / (self.found + self.there)


CASE = Case(
    "onnxrt",
    lambda scratch: str(shipped("rapidocr_onnxruntime", "models", "ch_PP-OCRv4_det_infer.onnx")),
    batches,
    HarmonicMean,
    ("quantize_static", "quantize_dynamic"),
)
