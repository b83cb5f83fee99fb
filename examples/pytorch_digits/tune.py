"""Tune the digits net from Python: INT8 and BF16 where they hold one percent of accuracy."""

from __future__ import annotations

from pathlib import Path

from digits import Digits, trained_net
from rich.console import Console
from sklearn.metrics import accuracy_score

from neural_mp import MixedPrecision, common
from neural_mp.reporting import LiveListener, result_tables

OUT = Path(__file__).parent / "out"


class Accuracy:
    """A metric as neural_mp takes it."""

    def __init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        self.predicted, self.expected = [], []

    def update(self, preds, labels) -> None:
        self.predicted.extend(preds.argmax(1))
        self.expected.extend(labels)

    def result(self) -> float:
        return accuracy_score(self.expected, self.predicted)


def main() -> None:
    converter = MixedPrecision()
    converter.model = trained_net()
    converter.precisions = "int8,bf16"
    converter.metric = Accuracy()
    converter.eval_dataloader = common.DataLoader(Digits("test"), batch_size=128)
    converter.calib_dataloader = common.DataLoader(Digits("train"), batch_size=100)
    converter.workspace = OUT / "workspace"
    converter.listener = LiveListener(summary=False)
    optimized = converter()

    optimized.save(OUT / "tuned")
    Console().print(result_tables(optimized.report, optimized.met))
    print(f"saved to {OUT / 'tuned'}; open {OUT / 'tuned' / 'report.html'} to look at the run")


if __name__ == "__main__":
    main()
