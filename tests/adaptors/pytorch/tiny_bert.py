"""Configuration of a small encoder of transformers."""

from __future__ import annotations

from typing import Any


def tiny_bert_config(**more: Any) -> Any:
    """Return the configuration; `more`: further keys, e.g. `num_labels`."""
    import transformers

    return transformers.BertConfig(
        vocab_size=50,
        hidden_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        intermediate_size=32,
        **more,
    )
