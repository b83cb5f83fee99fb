"""Settings of a run, and the decoder of a seed with its texts."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from torch import nn
from transformers import LlamaForCausalLM

from benchmarks.decoders import source_decoder as decoder
from neural_mp.metrics import Perplexity

Batches = Sequence[Any]


@dataclass(frozen=True)
class Settings:
    """Sizes of a run.

    Attributes:
        steps: steps of training.
        windows: windows of each text.
        tuning_texts: runs per decoder whose plans are evaluated on unseen text.
        layers: layers of the decoders that are timed.
        rounds: interleaved calls of each form.
        wide: width of the decoder whose calibration is observed.
        rounding_steps: steps per decoder block of learned rounding.
        keep: folder of trained decoders.
        peer: Python with the tools to compare with.
        auto_round: Python with auto-round.
    """

    steps: int
    windows: int
    tuning_texts: int
    layers: int
    rounds: int
    wide: int
    rounding_steps: int
    keep: Path
    peer: Path | None
    auto_round: Path | None = None


@dataclass(frozen=True)
class Subject:
    """A trained decoder, its hostile twin, and texts.

    Attributes:
        seed: seed of the training.
        settings: sizes of the run.
    """

    seed: int
    settings: Settings

    @cached_property
    def _texts(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        return decoder.texts()

    @cached_property
    def plain(self) -> nn.Module:
        """The decoder, trained once per folder."""
        folder = self.settings.keep / f"decoder-{self.seed}-{self.settings.steps}"
        if folder.is_dir():
            return LlamaForCausalLM.from_pretrained(folder).eval()
        started = time.process_time()
        net = decoder.trained(self._texts[0], self.settings.steps, self.seed)
        net.save_pretrained(folder)
        spent = time.process_time() - started
        base = perplexity(net, self.tuning)
        print(f"seed {self.seed}: trained in {spent:.0f} CPU s, perplexity {base:.3f}", flush=True)
        return net

    @cached_property
    def hostile(self) -> nn.Module:
        """The twin that computes the same function with outlier channels."""
        return decoder.hostile(self.plain)

    @property
    def nets(self) -> dict[str, nn.Module]:
        """Name → decoder."""
        return {"plain": self.plain, "outlier channels": self.hostile}

    @cached_property
    def calibration(self) -> Batches:
        """Windows of the text that the decoder was trained with."""
        return decoder.windows(self._texts[0], self.settings.windows)

    @cached_property
    def tuning(self) -> Batches:
        """Windows that runs evaluate."""
        return decoder.windows(self._texts[1], self.settings.windows)

    @cached_property
    def unseen(self) -> Batches:
        """Windows that no run evaluates."""
        return decoder.windows(self._texts[2], self.settings.windows)

    def tuning_part(self, index: int, of: int) -> Batches:
        """Return windows of one of several disjoint parts of the tuning text."""
        part = np.array_split(self._texts[1], of)[index]
        return decoder.windows(part, self.settings.windows)


def perplexity(model: Any, batches: Batches) -> float:
    """Return the perplexity of a model."""
    metric = Perplexity()
    for inputs, labels in batches:
        metric.update(model(**inputs), labels)
    return metric.result()


def change(perplexity: float, base: float) -> str:
    """Return a change in percent."""
    return f"{(perplexity / base - 1) * 100:+.2f} %"
