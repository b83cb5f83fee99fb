"""Tune an ONNX file from Python: INT8 where it holds one percent of accuracy."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnxruntime
from digits import Digits, model_file
from rich.console import Console

from neural_mp import MixedPrecision, common
from neural_mp.reporting import LiveListener, result_tables

OUT = Path(__file__).parent / "out"


class Accuracy:
    """A metric as neural_mp takes it."""

    def __init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        self.right = self.all = 0

    def update(self, preds, labels) -> None:
        self.right += int((preds.argmax(1) == labels).sum())
        self.all += len(labels)

    def result(self) -> float:
        return self.right / self.all


def main() -> None:
    converter = MixedPrecision()
    converter.model = model_file()
    converter.precisions = "int8"
    converter.metric = Accuracy()
    converter.eval_dataloader = common.DataLoader(Digits("test"), batch_size=128)
    converter.calib_dataloader = common.DataLoader(Digits("train"), batch_size=100)
    converter.workspace = OUT / "workspace"
    converter.listener = LiveListener(summary=False)
    optimized = converter()

    optimized.save(OUT / "tuned")  # with its plan and report
    optimized.save(OUT / "tuned.onnx")  # alone, its plan among its properties
    Console().print(result_tables(optimized.report, optimized.met))

    # Plain ONNX Runtime, without this package:
    images = Digits("test").images
    session = onnxruntime.InferenceSession(OUT / "tuned.onnx")
    (logits,) = session.run(None, {"image": images})
    same = np.array_equal(logits.argmax(1), optimized(images).argmax(1))
    print(f"saved to {OUT / 'tuned.onnx'}; in plain ONNX Runtime the same answers: {same}")


if __name__ == "__main__":
    main()
