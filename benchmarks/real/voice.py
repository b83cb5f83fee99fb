"""Silero's voice activity detector, in the two forms that it is shipped in.

The one hears a chunk at a time, keeps its state outside, and lies in the branches of an `If`; the
other hears a whole clip.
"""

from __future__ import annotations

import numpy as np

from benchmarks.real.case import Batches, Case, Split, shipped
from benchmarks.real.speech import RATE, RightChunks, clip, frames

CLIPS, CHUNKS = {"calibration": 4, "test": 16}, 240


def _file(name: str) -> str:
    return str(shipped("silero_vad", "data", name))


def _clips(split: Split) -> list[tuple[np.ndarray, np.ndarray]]:
    start = 60_000 if split == "calibration" else 70_000
    return [clip(seed, CHUNKS) for seed in range(start, start + CLIPS[split])]


def whole_clips(split: Split) -> Batches:
    """A clip a batch, its chunks one after the other."""
    state = np.zeros((1, 1, 128), np.float32)
    clips = [
        ({"input": frames(sound), "h": state, "c": state}, speech)
        for sound, speech in _clips(split)
    ]
    return Batches(clips, CHUNKS)


def chunks(split: Split) -> Batches:
    """The same chunk of all clips a batch, with the state that the FP32 model is in by then."""
    import onnxruntime

    session = onnxruntime.InferenceSession(_file("silero_vad.onnx"))
    sounds, speech = zip(*_clips(split), strict=True)
    heard = np.stack([frames(sound) for sound in sounds])
    state, rate = np.zeros((2, len(heard), 128), np.float32), np.array(RATE)
    parts = []
    for i in range(CHUNKS):
        inputs = {"input": heard[:, i], "state": state, "sr": rate}
        parts.append((inputs, np.array([labels[i] for labels in speech])))
        _, state = session.run(None, inputs)
    return Batches(parts, len(heard))


def _case(name: str, batches: object) -> Case:
    return Case(
        "onnxrt",
        lambda scratch: _file(name),
        batches,
        RightChunks,
        ("quantize_static", "quantize_dynamic"),
    )


STREAMING = _case("silero_vad.onnx", chunks)
SEQUENCE = _case("silero_vad_16k_sequence.onnx", whole_clips)
