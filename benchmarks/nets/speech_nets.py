"""A folder of a recognizer in Whisper's shape, trained within minutes on words of two tones."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import torch
from scipy.io import wavfile

RATE, MOST_WORDS = 8000, 4
_SPOKEN = (
    "one",
    "two",
    "three",
    "four",
    "five",
    "six",
    "seven",
    "eight",
    "nine",
    "ten",
    "zero",
    "oh",
)
#: Word → frequencies of its two tones in Hz.
WORDS = {word: (300 + 170 * (n % 4), 1100 + 260 * (n // 4)) for n, word in enumerate(_SPOKEN)}
SPECIAL = ("[PAD]", "[UNK]", "[START]", "[END]")
_WORD_SECONDS = 0.22


def speak(words: list[str], random: np.random.Generator, noise: float = 0.3) -> np.ndarray:
    """Return a second of sound float32 `[RATE]`."""
    wave = noise * random.standard_normal(RATE)
    time, start = np.arange(int(_WORD_SECONDS * RATE)) / RATE, 0
    for word in words:
        start += int(random.uniform(0.0, 0.02) * RATE)
        low, high = np.array(WORDS[word]) * random.uniform(0.96, 1.04)
        sound = np.sin(2 * np.pi * low * time) + np.sin(2 * np.pi * high * time)
        wave[start : start + len(time)] += (sound * np.hanning(len(time)))[: RATE - start]
        start += len(time)
    return (wave / 4).clip(-1, 1).astype(np.float32)


def draw_sentence(random: np.random.Generator) -> list[str]:
    """Return up to four words."""
    return [str(word) for word in random.choice(list(WORDS), random.integers(1, MOST_WORDS + 1))]


def write_recognizer(folder: Path, seed: int, steps: int = 500, width: int = 128) -> None:
    """Train a recognizer and write its folder."""
    import transformers
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from tokenizers.pre_tokenizers import Whitespace

    torch.manual_seed(seed)
    vocabulary = {word: number for number, word in enumerate((*SPECIAL, *WORDS))}
    backend = Tokenizer(WordLevel(vocabulary, unk_token="[UNK]"))
    backend.pre_tokenizer = Whitespace()
    tokenizer = transformers.PreTrainedTokenizerFast(
        tokenizer_object=backend, pad_token="[PAD]", unk_token="[UNK]", eos_token="[END]"
    )
    extractor = transformers.WhisperFeatureExtractor(
        feature_size=32, sampling_rate=RATE, hop_length=80, chunk_length=1, n_fft=256
    )
    config = transformers.WhisperConfig(
        vocab_size=len(vocabulary),
        num_mel_bins=32,
        d_model=width,
        encoder_layers=2,
        decoder_layers=2,
        encoder_attention_heads=4,
        decoder_attention_heads=4,
        encoder_ffn_dim=4 * width,
        decoder_ffn_dim=4 * width,
        max_source_positions=50,
        max_target_positions=16,
        pad_token_id=0,
        bos_token_id=2,
        eos_token_id=3,
        decoder_start_token_id=2,
        suppress_tokens=None,
        begin_suppress_tokens=None,
    )
    model = transformers.WhisperForConditionalGeneration(config)
    settings: Any = model.generation_config
    settings.suppress_tokens = settings.begin_suppress_tokens = None
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 1e-3, steps)
    random = np.random.default_rng(seed)
    model.train()
    for _ in range(steps):
        spoken = [draw_sentence(random) for _ in range(16)]
        waves = [speak(words, random) for words in spoken]
        values = extractor(waves, sampling_rate=RATE, return_tensors="pt")["input_features"]
        labels = torch.full((16, MOST_WORDS + 1), -100)
        for row, words in zip(labels, spoken, strict=True):
            ids = [*(vocabulary[word] for word in words), SPECIAL.index("[END]")]
            row[: len(ids)] = torch.tensor(ids)
        loss = model(values, labels=labels).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()
    for part in (model.eval(), tokenizer, extractor):
        part.save_pretrained(folder)


def write_speech(folder: Path, seed: int, count: int) -> Path:
    """Write sound files and `data.jsonl`; return the latter."""
    folder.mkdir(parents=True, exist_ok=True)
    random, rows = np.random.default_rng(seed), []
    for number in range(count):
        words = draw_sentence(random)
        samples = (speak(words, random) * 32767).astype(np.int16)
        wavfile.write(folder / f"{number}.wav", RATE, samples)
        rows.append({"audio": f"{number}.wav", "text": " ".join(words)})
    file = folder / "data.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return file
