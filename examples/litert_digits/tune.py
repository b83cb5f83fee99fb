"""Tune a Keras net as a `.tflite` file: INT8 where it holds one percent of accuracy."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from ai_edge_litert.interpreter import Interpreter
from digits import Digits, trained_net
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
    converter.model = trained_net()
    converter.framework = "litert"  # converted by TensorFlow; leave out for a .tflite file
    converter.precisions = "int8"
    converter.metric = Accuracy()
    converter.eval_dataloader = common.DataLoader(Digits("test"), batch_size=128)
    converter.calib_dataloader = common.DataLoader(Digits("train"), batch_size=100)
    converter.workspace = OUT / "workspace"
    converter.listener = LiveListener(summary=False)
    optimized = converter()

    optimized.save(OUT / "tuned")  # with its plan, report and recipe
    optimized.save(OUT / "tuned.tflite")  # alone
    Console().print(result_tables(optimized.report, optimized.met))

    # Plain LiteRT, without this package:
    images = Digits("test").images
    interpreter = Interpreter(str(OUT / "tuned.tflite"))
    logits = interpreter.get_signature_runner()(image=images)["output_0"]
    same = np.array_equal(logits, optimized(images))
    print(f"saved to {OUT / 'tuned.tflite'}; in plain LiteRT the same logits: {same}")


if __name__ == "__main__":
    main()
