"""Silero's voice activity detector in the two forms that it is shipped in, on clips of speech.

The one hears a chunk at a time, keeps its state outside, and lies in the branches of an `If`; the
other hears a whole clip. Clips, at 16 kHz, are of speech and of other sounds, with what is speech.
"""

from __future__ import annotations

import io
import shutil
import subprocess
import wave

import numpy as np
from scipy import signal

from benchmarks.real.case import Batches, Case, MissingPartError, Share, Split, shipped
from benchmarks.real.texts import sentences

RATE = 16_000
#: Samples that the model judges at a time, and those before them that it sees, too.
CHUNK, CONTEXT = 512, 64
PROGRAM = "espeak-ng"
VOICES = ("en-us", "en-gb", "de", "en-us+f3", "en-gb+m4", "fr")
CLIPS, CHUNKS = {"calibration": 4, "test": 16}, 240


def spoken(text: str, voice: str, words_per_minute: int) -> np.ndarray:
    """A text, said by a program: float32 in -1…1.

    Raises:
        MissingPartError: the program is not installed.
    """
    if shutil.which(PROGRAM) is None:
        raise MissingPartError(f"the program {PROGRAM!r}, which speaks, is not installed")
    command = [PROGRAM, "-v", voice, "-s", str(words_per_minute), "--stdout", text]
    content = subprocess.run(command, check=True, capture_output=True).stdout
    with wave.open(io.BytesIO(content)) as sound:
        rate = sound.getframerate()
        samples = np.frombuffer(sound.readframes(sound.getnframes()), np.int16)
    return signal.resample_poly(samples / 32768, RATE, rate).astype(np.float32)


def other_sound(draw: np.random.Generator, count: int) -> np.ndarray:
    """Silence, noise, a tone or a chord."""
    time = np.arange(count) / RATE
    kind = draw.integers(0, 4)
    if kind == 0:
        return np.zeros(count, np.float32)
    if kind == 1:
        return draw.normal(0, draw.uniform(0.01, 0.2), count).astype(np.float32)
    tones = draw.uniform(100, 3000, 1 if kind == 2 else 3)
    shown = sum(np.sin(2 * np.pi * tone * time + draw.uniform(0, 6)) for tone in tones)
    return (draw.uniform(0.1, 0.3) * shown).astype(np.float32)


def clip(seed: int, chunks: int) -> tuple[np.ndarray, np.ndarray]:
    """Sounds and sentences in turn, with noise over all.

    Returns:
        float32 [chunks · CHUNK]; whether each chunk is speech, bool [chunks].
    """
    draw = np.random.default_rng(seed)
    texts = sentences()
    parts: list[np.ndarray] = []
    voiced: list[np.ndarray] = []
    while sum(map(len, parts)) < chunks * CHUNK:
        silent = other_sound(draw, int(draw.uniform(0.4, 1.5) * RATE))
        text = str(texts[draw.integers(len(texts))])[:80]
        voice = spoken(text, str(draw.choice(VOICES)), int(draw.integers(120, 220)))
        voice = voice * draw.uniform(0.3, 1.0)
        parts += [silent, voice]
        voiced += [
            np.zeros(len(silent)),
            signal.convolve(np.abs(voice) > 0.01, np.ones(2400), "same"),
        ]
    count = chunks * CHUNK
    sound = np.concatenate(parts)[:count] + draw.normal(0, draw.uniform(0.001, 0.01), count)
    speech = np.concatenate(voiced)[:count].reshape(chunks, CHUNK) > 0.5
    return sound.astype(np.float32), speech.mean(axis=1) > 0.5


def frames(sound: np.ndarray) -> np.ndarray:
    """What the model sees of a clip: float32 [chunks, CONTEXT + CHUNK]."""
    padded = np.pad(sound, (CONTEXT, 0))
    count = len(sound) // CHUNK
    return np.stack([padded[i * CHUNK : (i + 1) * CHUNK + CONTEXT] for i in range(count)])


class RightChunks(Share):
    """The share of chunks that are taken for speech, or not, rightly."""

    def update(self, preds: list[np.ndarray], labels: np.ndarray) -> None:
        self.count((np.asarray(preds[0]).reshape(-1) > 0.5) == labels)


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
