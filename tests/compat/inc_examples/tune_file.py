"""Tune by a tuning file of version 1, and measure as it says: `tune_file.py conf.yaml model int8`.

The bench runs this program like a script of the examples. A model `*.pt` is a whole module.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import yaml
from neural_compressor.experimental import Benchmark, Quantization, common


def read(model: str) -> Any:
    """Return a module of a file of torch, and other paths unchanged."""
    if not model.endswith(".pt"):
        return model
    import torch

    return torch.load(model, weights_only=False).eval()


def main(config: str, model: str, result: str) -> None:
    """Tune, save, and measure accuracy and performance of the given model."""
    quantizer = Quantization(config)
    quantizer.model = common.Model(read(model))
    quantizer.fit().save(result)
    evaluation = yaml.safe_load(Path(config).read_text(encoding="utf-8")).get("evaluation") or {}
    for mode in ("accuracy", "performance"):
        if mode in evaluation:
            evaluator = Benchmark(config)
            evaluator.model = common.Model(read(model))
            evaluator(mode)


if __name__ == "__main__":
    main(*sys.argv[1:])
