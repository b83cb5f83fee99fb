"""Padding has no part in the moments of layers in ONNX Runtime and OpenVINO."""

from __future__ import annotations

import numpy as np
import onnx
import pytest
from onnx_decoders import HEAD, LAYERS, PAIRS, optimum

from neural_mp.adaptors.onnxrt.adaptor import OnnxRuntimeAdaptor
from neural_mp.adaptors.openvino.adaptor import OpenVinoAdaptor

TEXTS, TOKENS, PADS = 5, 7, 4


def _batches(pads: int) -> list[dict[str, np.ndarray]]:
    """Return texts with padding behind them, which causal attention does not reach."""
    draw = np.random.default_rng(0)
    cache = {
        f"past_key_values.{index}.{kind}": np.zeros((TEXTS, PAIRS, 0, HEAD), np.float32)
        for index in range(LAYERS)
        for kind in ("key", "value")
    }
    batches = []
    for _ in range(2):
        ids = np.zeros((TEXTS, TOKENS + pads), np.int64)
        ids[:, :TOKENS] = draw.integers(1, 60, (TEXTS, TOKENS))
        mask = np.zeros_like(ids)
        mask[:, :TOKENS] = 1
        batches.append({"input_ids": ids, "attention_mask": mask, **cache})
    return batches


@pytest.mark.parametrize("kind", [OnnxRuntimeAdaptor, OpenVinoAdaptor])
def test_moments_are_those_of_the_tokens_that_count(kind, tmp_path):
    onnx.save(optimum(), tmp_path / "decoder.onnx")
    adaptor, moments = kind(), []
    for pads in (0, PADS):
        batches = _batches(pads)
        model = adaptor.load(str(tmp_path / "decoder.onnx"), example=batches[0])
        part = adaptor.grouped_weights
        moments.append(part.input_moments(model, batches, list(part.weights(model))))
    plain, padded = moments
    assert set(plain) == set(padded)
    assert len(plain) >= 7 * LAYERS
    for op, expected in plain.items():
        tolerance = 1e-4 * np.abs(expected.products).max()
        np.testing.assert_allclose(padded[op].products, expected.products, atol=tolerance)
        np.testing.assert_allclose(padded[op].magnitudes, expected.magnitudes, rtol=1e-3)
