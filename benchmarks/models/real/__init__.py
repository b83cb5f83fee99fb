"""Pretrained models that packages ship, and models trained here, each with data and metric."""

from __future__ import annotations

import importlib

from real.case import Case

#: Case → where it is written down.
PLACES = {
    "magika": ("real.magika", "CASE"),
    "ocr-recognition": ("real.ocr_recognition", "CASE"),
    "ocr-detection": ("real.ocr_detection", "CASE"),
    "ocr-direction": ("real.ocr_direction", "CASE"),
    "voice-streaming": ("real.voice", "STREAMING"),
    "voice-sequence": ("real.voice", "SEQUENCE"),
    "encoder-pytorch": ("real.encoder", "PYTORCH"),
    "encoder-onnx": ("real.encoder", "ONNX"),
    "encoder-keras": ("real.encoder", "KERAS"),
    "pitch-wide": ("real.pitch", "CASE"),
    "digits-lstm": ("real.sequences", "LSTM"),
    "words-bidirectional": ("real.sequences", "BIDIRECTIONAL"),
    "reversal-gru": ("real.sequences", "ENCODER_DECODER"),
    "digits-assertions": ("real.served", "ASSERTIONS"),
    "digits-unused-save": ("real.served", "UNUSED_SAVE"),
}


def case_named(name: str) -> Case:
    """A case, with what it needs imported."""
    module, attribute = PLACES[name]
    case: Case = getattr(importlib.import_module(module), attribute)
    return case
