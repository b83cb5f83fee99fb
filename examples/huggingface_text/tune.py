"""Tune a classifier of transformers to INT8, with batches as a collator gives them, by its F1."""

from __future__ import annotations

from pathlib import Path

from docstrings import Docstrings, trained
from rich.console import Console
from sklearn.metrics import f1_score

from neural_mp import MixedPrecision
from neural_mp.reporting import LiveListener, result_tables

OUT = Path(__file__).parent / "out"


class MacroF1:
    """The mean of the F1 scores of all topics; what the model returns has its `logits`."""

    def __init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        self.predicted, self.expected = [], []

    def update(self, preds, labels) -> None:
        self.predicted.extend(preds.logits.argmax(-1).tolist())
        self.expected.extend(labels.tolist())

    def result(self) -> float:
        return f1_score(self.expected, self.predicted, average="macro")


def main() -> None:
    data = Docstrings()
    converter = MixedPrecision()
    converter.model = trained(data)
    converter.precisions = "int8"
    converter.metric = MacroF1()
    converter.eval_dataloader = data.test  # dicts with "labels" in them
    converter.calib_dataloader = data.train
    converter.exclude = "classifier"  # a module of the model: it stays in FP32
    converter.objective = "modelsize"
    converter.workspace = OUT / "workspace"
    converter.listener = LiveListener(summary=False)
    optimized = converter()

    optimized.save(OUT / "tuned")
    Console().print(result_tables(optimized.report, optimized.met))
    print(f"saved to {OUT / 'tuned'}")


if __name__ == "__main__":
    main()
