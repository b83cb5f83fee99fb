"""RapidOCR's classifier of directions: is a line of text upright, or upside down?"""

from __future__ import annotations

import numpy as np

from benchmarks.real.case import Accuracy, Batches, Case, Split, shipped
from benchmarks.real.rendered import line, normalized, phrases

HEIGHT, WIDTH, BATCH = 48, 192, 16
LINES = {"calibration": 64, "test": 480}


def batches(split: Split) -> Batches:
    start = 20_000 if split == "calibration" else 30_000
    shown, rotated = [], np.random.default_rng(start).integers(0, 2, LINES[split])
    for index, text in enumerate(phrases(LINES[split], start)):
        upright = line(text, start + index, HEIGHT, WIDTH)
        shown.append(upright[::-1, ::-1] if rotated[index] else upright)
    pixels = normalized(shown, WIDTH)
    parts = (slice(i, i + BATCH) for i in range(0, len(pixels), BATCH))
    return Batches([(pixels[part], rotated[part]) for part in parts], BATCH)


CASE = Case(
    "onnxrt",
    lambda scratch: str(
        shipped("rapidocr_onnxruntime", "models", "ch_ppocr_mobile_v2.0_cls_infer.onnx")
    ),
    batches,
    Accuracy,
    ("quantize_static", "quantize_dynamic"),
)
