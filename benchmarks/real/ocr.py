"""RapidOCR: its detector and recogniser (PP-OCRv4), and its classifier of directions.

The detector takes a page and returns the places of its lines; the recogniser takes a line of text
and returns its characters; the classifier tells whether a line is upright, or upside down.
"""

from __future__ import annotations

from functools import cache
from pathlib import Path

import numpy as np
import onnx
from scipy import ndimage

from benchmarks.real.case import Accuracy, Batches, Case, Share, Split, shipped
from benchmarks.real.rendered import line, normalized, page, phrases

LINE_HEIGHT = 48
WIDTH, BATCH = 320, 8
LINES = {"calibration": 64, "test": 240}
DIRECTION_WIDTH, DIRECTION_BATCH = 192, 16
DIRECTION_LINES = {"calibration": 64, "test": 480}
PAGE_HEIGHT, PAGE_WIDTH, PAGES_AT_ONCE = 384, 512, 1
PAGES = {"calibration": 16, "test": 60}
MEAN, DEVIATION = np.array([0.485, 0.456, 0.406]), np.array([0.229, 0.224, 0.225])
#: What the package itself takes: where text is, and by how much the model shrinks its places.
THRESHOLD, SHRUNK = 0.3, 1.6


def model_file() -> Path:
    return shipped("rapidocr_onnxruntime", "models", "ch_PP-OCRv4_rec_infer.onnx")


@cache
def characters() -> list[str]:
    """The characters of the classes; 0 is the blank between characters."""
    properties = onnx.load(model_file(), load_external_data=False).metadata_props
    (listed,) = (item.value for item in properties if item.key == "character")
    return ["", *listed.splitlines(), " "]


def draw_lines(split: Split) -> Batches:
    start = 0 if split == "calibration" else 10_000
    texts = list(phrases(LINES[split], start))
    groups = []
    for first in range(0, len(texts), BATCH):
        some = texts[first : first + BATCH]
        shown = [line(text, start + first + i, LINE_HEIGHT, WIDTH) for i, text in enumerate(some)]
        groups.append((normalized(shown, WIDTH), np.array(some)))
    return Batches(groups, BATCH)


class WholeLines(Share):
    """The share of lines of which every character is right, spaces aside."""

    def update(self, preds: np.ndarray, labels: np.ndarray) -> None:
        recognized = (text_of(scores) for scores in preds)
        pairs = zip(recognized, labels, strict=True)
        self.count(
            np.array([text.replace(" ", "") == str(b).replace(" ", "") for text, b in pairs])
        )


def text_of(scores: np.ndarray) -> str:
    """The characters that scores [steps, classes] say: repeated ones count once."""
    best = scores.argmax(1)
    return "".join(characters()[index] for index in best[np.diff(best, prepend=-1) != 0])


RECOGNITION = Case(
    "onnxrt",
    lambda scratch: str(model_file()),
    draw_lines,
    WholeLines,
    ("quantize_static", "quantize_dynamic"),
)


def draw_rotated_lines(split: Split) -> Batches:
    start = 20_000 if split == "calibration" else 30_000
    shown, rotated = [], np.random.default_rng(start).integers(0, 2, DIRECTION_LINES[split])
    for index, text in enumerate(phrases(DIRECTION_LINES[split], start)):
        upright = line(text, start + index, LINE_HEIGHT, DIRECTION_WIDTH)
        shown.append(upright[::-1, ::-1] if rotated[index] else upright)
    pixels = normalized(shown, DIRECTION_WIDTH)
    parts = (slice(i, i + DIRECTION_BATCH) for i in range(0, len(pixels), DIRECTION_BATCH))
    return Batches([(pixels[part], rotated[part]) for part in parts], DIRECTION_BATCH)


DIRECTION = Case(
    "onnxrt",
    lambda scratch: str(
        shipped("rapidocr_onnxruntime", "models", "ch_ppocr_mobile_v2.0_cls_infer.onnx")
    ),
    draw_rotated_lines,
    Accuracy,
    ("quantize_static", "quantize_dynamic"),
)


def draw_pages(split: Split) -> Batches:
    start = 40_000 if split == "calibration" else 50_000
    pages = []
    for seed in range(start, start + PAGES[split]):
        shown, boxes = page(seed, PAGE_HEIGHT, PAGE_WIDTH)
        pixels = (shown / 255 - MEAN) / DEVIATION
        pages.append((pixels.transpose(2, 0, 1)[None].astype(np.float32), boxes[None]))
    return Batches(pages, PAGES_AT_ONCE)


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


DETECTION = Case(
    "onnxrt",
    lambda scratch: str(shipped("rapidocr_onnxruntime", "models", "ch_PP-OCRv4_det_infer.onnx")),
    draw_pages,
    HarmonicMean,
    ("quantize_static", "quantize_dynamic"),
)
