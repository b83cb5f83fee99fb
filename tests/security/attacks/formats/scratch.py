"""Files and results that are made once, in folders that are removed; a small encoder."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from neural_mp import MixedPrecision
from neural_mp.api.optimized_model import OptimizedModel


def written(name: str, write: Callable[[Path], Any]) -> bytes:
    """Return the bytes of the file that a function writes under a name."""
    with tempfile.TemporaryDirectory() as folder:
        write(Path(folder) / name)
        return (Path(folder) / name).read_bytes()


def tune_in_scratch(make_converter: Callable[[Path], MixedPrecision]) -> OptimizedModel:
    """Return the result of a converter that works in a folder."""
    with tempfile.TemporaryDirectory() as folder:
        return make_converter(Path(folder)).fit()


def encoder_config() -> Any:
    """Return the configuration of a small encoder of `transformers`."""
    import transformers

    return transformers.BertConfig(
        vocab_size=50,
        hidden_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        intermediate_size=32,
        architectures=["BertModel"],
    )
