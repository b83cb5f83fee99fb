"""Tune a YOLO-shaped detector by COCO's mAP, from a tuning file."""

from __future__ import annotations

import os
from pathlib import Path

from rich.console import Console
from shapes import model_file, prepare_data

from neural_mp import MixedPrecision
from neural_mp.data import build_dataloader
from neural_mp.metrics import Decode
from neural_mp.reporting import LiveListener, result_tables

VALIDATION = {
    "batch_size": 4,
    "dataset": {"yolo": {"data": "out/shapes/data.yaml"}},
    "transform": {"letterbox": {"size": 48}, "Rescale": {}, "ToCHW": {}},
}


def main() -> None:
    os.chdir(Path(__file__).parent)  # paths of the file are relative to the current folder
    prepare_data()
    converter = MixedPrecision("conf.yaml")
    converter.model = model_file()
    converter.listener = LiveListener(summary=False)
    optimized = converter()

    optimized.save("out/tuned")
    Console().print(result_tables(optimized.report, optimized.met))
    images, labels = next(iter(build_dataloader(VALIDATION)))
    objects, _ = Decode("yolo", score=0.5)((optimized(images), labels))
    detected, truth = (sorted(image[0]["labels"].tolist()) for image in (objects, labels))
    print(f"objects of an image: {detected}, in truth {truth}")


if __name__ == "__main__":
    main()
