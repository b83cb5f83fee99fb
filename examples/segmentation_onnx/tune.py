"""Tune a model with three outputs by the mIoU of one of them."""

from __future__ import annotations

from pathlib import Path

from digits import Digits, model_file
from rich.console import Console

from neural_mp import MixedPrecision, common
from neural_mp.reporting import LiveListener, result_tables

OUT = Path(__file__).parent / "out"


def main() -> None:
    converter = MixedPrecision()
    converter.model = model_file()
    converter.precisions = "int8"
    converter.metric = ("mIoU", {"output": "mask", "num_classes": 3})
    converter.eval_dataloader = common.DataLoader(Digits("test"), batch_size=128)
    converter.calib_dataloader = common.DataLoader(Digits("train"), batch_size=100)
    converter.workspace = OUT / "workspace"
    converter.listener = LiveListener(summary=False)
    optimized = converter()

    optimized.save(OUT / "tuned")
    Console().print(result_tables(optimized.report, optimized.met))
    mask, edges, digit = optimized(Digits("test").images[:4])
    print(f"mask {mask.shape}, edges {edges.shape}, digit {digit.shape}")


if __name__ == "__main__":
    main()
