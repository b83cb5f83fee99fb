"""Pretrained models that packages ship, and models trained here, each with data and metric."""

from __future__ import annotations

import importlib

from benchmarks.real.case import Case

#: Case → where it is written down.
PLACES = {
    "magika": ("benchmarks.real.magika", "CASE"),
    "ocr-recognition": ("benchmarks.real.ocr", "RECOGNITION"),
    "ocr-detection": ("benchmarks.real.ocr", "DETECTION"),
    "ocr-direction": ("benchmarks.real.ocr", "DIRECTION"),
    "voice-streaming": ("benchmarks.real.speech", "STREAMING"),
    "voice-sequence": ("benchmarks.real.speech", "SEQUENCE"),
    "encoder-pytorch": ("benchmarks.real.encoder", "PYTORCH"),
    "encoder-onnx": ("benchmarks.real.encoder", "ONNX"),
    "encoder-keras": ("benchmarks.real.encoder", "KERAS"),
    "pitch-wide": ("benchmarks.real.pitch", "CASE"),
    "digits-lstm": ("benchmarks.real.sequences", "LSTM"),
    "words-bidirectional": ("benchmarks.real.sequences", "BIDIRECTIONAL"),
    "reversal-gru": ("benchmarks.real.sequences", "ENCODER_DECODER"),
    "digits-assertions": ("benchmarks.real.served", "ASSERTIONS"),
    "digits-unused-save": ("benchmarks.real.served", "UNUSED_SAVE"),
}


def case_named(name: str) -> Case:
    """A case, with what it needs imported."""
    module, attribute = PLACES[name]
    case: Case = getattr(importlib.import_module(module), attribute)
    return case
