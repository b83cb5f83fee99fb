"""The models of `inc3.py`, built alike in every environment."""

from __future__ import annotations

from torch import nn

#: Tokens of a window of the decoder.
CONTEXT = 128
#: Tolerated relative losses of accuracy of the searches.
TOLERATED = {"mlp": 0.002, "cnn": 0.002, "decoder": 0.01}


def network(name: str) -> nn.Module:
    """Return an untrained model."""
    if name == "mlp":
        return nn.Sequential(
            nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 10)
        )
    if name == "cnn":
        return nn.Sequential(
            nn.Unflatten(1, (1, 8)),
            nn.Conv2d(1, 32, 3, padding=1),
            nn.ReLU(),
            nn.Conv2d(32, 64, 3, padding=1),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Flatten(),
            nn.Linear(1024, 64),
            nn.ReLU(),
            nn.Linear(64, 10),
        )
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=256,
        hidden_size=192,
        intermediate_size=512,
        num_hidden_layers=4,
        num_attention_heads=6,
        num_key_value_heads=6,
        max_position_embeddings=CONTEXT,
        bos_token_id=0,
        eos_token_id=0,
    )
    return LlamaForCausalLM(config)
