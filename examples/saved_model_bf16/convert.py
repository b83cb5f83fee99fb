"""Convert a pretrained FP32 SavedModel to BF16 and say what was converted."""

from __future__ import annotations

import os
import sys
from pathlib import Path

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
os.environ.setdefault("FORCE_BF16", "1")

import numpy as np
import tensorflow as tf

from neural_mp import MixedPrecision

HERE = Path(__file__).parent
PRETRAINED, CONVERTED = HERE / "out" / "fp32", HERE / "out" / "bf16"


def pretrained() -> Path:
    """A SavedModel folder, as it might come from anywhere."""
    if not PRETRAINED.exists():
        sys.path.insert(0, str(HERE.parent / "tensorflow_digits"))
        from digits import trained_net

        trained_net().export(PRETRAINED, verbose=False)
    return PRETRAINED


def main() -> None:
    converter = MixedPrecision()
    converter.model = pretrained()
    converter.precisions = "bf16"
    converter.workspace = HERE / "out" / "workspace"
    optimized = converter()
    optimized.save(CONVERTED)

    print(optimized.report.converted[0])
    print(f"weights: {optimized.report.baseline_size:,} → {optimized.report.size:,} bytes")

    images = np.random.default_rng(0).random((64, 8, 8, 1), np.float32)
    results = []
    for folder in (PRETRAINED, CONVERTED):
        run = tf.saved_model.load(str(folder)).signatures["serving_default"]
        (result,) = run(image=tf.constant(images)).values()
        results.append(result.numpy())
    difference = np.abs(results[1] - results[0]).max() / np.abs(results[0]).max()
    print(f"outputs are {results[1].dtype}, and within {difference:.1%} of FP32")
    print(f"saved to {CONVERTED}")


if __name__ == "__main__":
    main()
