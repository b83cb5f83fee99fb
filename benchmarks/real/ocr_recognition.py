"""RapidOCR's recogniser (PP-OCRv4): a line of text in, the characters out."""

from __future__ import annotations

from functools import cache
from pathlib import Path

import numpy as np
import onnx

from benchmarks.real.case import Batches, Case, Share, Split, shipped
from benchmarks.real.rendered import line, normalized, phrases

HEIGHT, WIDTH, BATCH = 48, 320, 8
LINES = {"calibration": 64, "test": 240}


def model_file() -> Path:
    return shipped("rapidocr_onnxruntime", "models", "ch_PP-OCRv4_rec_infer.onnx")


@cache
def characters() -> list[str]:
    """What the classes stand for; 0 is the blank between characters."""
    properties = onnx.load(model_file(), load_external_data=False).metadata_props
    (listed,) = (item.value for item in properties if item.key == "character")
    return ["", *listed.splitlines(), " "]


def batches(split: Split) -> Batches:
    start = 0 if split == "calibration" else 10_000
    texts = list(phrases(LINES[split], start))
    groups = []
    for first in range(0, len(texts), BATCH):
        some = texts[first : first + BATCH]
        shown = [line(text, start + first + i, HEIGHT, WIDTH) for i, text in enumerate(some)]
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


CASE = Case(
    "onnxrt",
    lambda scratch: str(model_file()),
    batches,
    WholeLines,
    ("quantize_static", "quantize_dynamic"),
)
