"""Padding of calibration data counts in no statistic of a decoder."""

from __future__ import annotations

from functools import cache

import numpy as np
import pytest
import torch
from torch import nn

from neural_mp.adaptors.common import sensitivity
from neural_mp.adaptors.common.optional import Gradients
from neural_mp.adaptors.pytorch.adaptor import PyTorchAdaptor
from neural_mp.adaptors.pytorch.decoders import decoder_blocks
from neural_mp.core.enums import Capture
from neural_mp.util.pytree import sample_of

transformers = pytest.importorskip("transformers")
pytestmark = pytest.mark.slow

_SIZES = {
    "vocab_size": 64, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2,
    "num_attention_heads": 2, "num_key_value_heads": 1, "max_position_embeddings": 64,
    "bos_token_id": 0, "eos_token_id": 0, "pad_token_id": 0,
}  # fmt: skip
_PADS = 9


@cache
def _decoder(kind: str) -> nn.Module:
    torch.manual_seed(0)
    options = {"num_local_experts": 4, "num_experts_per_tok": 2} if kind == "Mixtral" else {}
    config = getattr(transformers, f"{kind}Config")(**_SIZES, **options)
    model = getattr(transformers, f"{kind}ForCausalLM")(config).eval()
    with torch.no_grad():
        model.model.embed_tokens.weight[0] = 3  # padding is no zero
    return model


def _batches() -> tuple[list[dict], list[dict]]:
    """Return texts, and the texts with padding before them."""
    random = torch.Generator().manual_seed(1)
    plain = [torch.randint(1, 64, (4, 12), generator=random) for _ in range(2)]
    padded = [torch.cat([torch.zeros(4, _PADS, dtype=torch.long), x], 1) for x in plain]
    masks = [(torch.arange(12 + _PADS)[None] >= _PADS).long().expand(4, -1)] * 2
    return (
        [{"input_ids": x, "attention_mask": torch.ones_like(x)} for x in plain],
        [{"input_ids": x, "attention_mask": m} for x, m in zip(padded, masks, strict=True)],
    )


@pytest.mark.parametrize("kind", ["Llama", "Mixtral"])
def test_moments_are_those_of_the_real_tokens(kind):
    for collect in (_moments_by_block, _moments_of_whole):
        plain, padded = (collect(_decoder(kind), batches) for batches in _batches())
        assert set(plain) == set(padded)
        assert len(plain) > 12
        for op, moments in plain.items():
            scale = np.abs(moments.products).max()
            assert np.allclose(padded[op].products, moments.products, atol=1e-4 * scale), op


def _moments_by_block(model: nn.Module, batches: list[dict]):
    loaded = PyTorchAdaptor().load(model, example=batches[0], capture=Capture.LAYERS)
    ops = [op.name for op in PyTorchAdaptor().graph(loaded)]
    parts = decoder_blocks.iterate_block_moments(loaded, lambda: batches, ops, lambda _: False)
    return {op: moments for part in parts for op, moments in part.items()}


def _moments_of_whole(model: nn.Module, batches: list[dict]):
    loaded = PyTorchAdaptor().load(model, example=batches[0], capture=Capture.LAYERS)
    ops = [op.name for op in PyTorchAdaptor().graph(loaded)]
    return decoder_blocks.collect_input_moments(loaded, batches, ops)


def test_the_sensitivity_draws_words_for_real_tokens_only():
    plain, padded = _batches()
    scores = []
    for batches in (plain, padded):
        positions = []

        def differentiate(_model, sample, _ops, direction, positions=positions):
            shape = (*sample["input_ids"].shape, 3)
            (drawn,) = direction([np.zeros(shape, np.float32)], True)
            positions.append(np.abs(drawn).sum(axis=-1) > 0)
            return {"layer": np.ones(2, np.float32)}

        gradients = Gradients(lambda _: {}, differentiate)
        change = {"layer": {"int4": np.ones(2, np.float32)}}
        samples = [sample_of(batch, index) for batch in batches for index in range(4)]
        scores.append(sensitivity._score_changes(gradients, None, samples, change))
        assert np.array_equal(
            np.concatenate(positions),
            np.concatenate([batch["attention_mask"].numpy() == 1 for batch in batches]),
        )
    assert scores[0] == scores[1]
