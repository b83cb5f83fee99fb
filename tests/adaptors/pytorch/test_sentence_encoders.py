"""Sentence encoders of transformers, converted layer by layer for a ranking metric."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from scipy.stats import spearmanr
from transformers import BertConfig, BertModel

import neural_mp
from neural_mp import MixedPrecision

pytestmark = pytest.mark.slow
PAIRS = 32


def _pooled_similarities(states: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """Return the cosine of neighbouring sentences: means of the states of their tokens."""
    weights = mask[..., None].to(states.dtype)
    sentences = (states * weights).sum(1) / weights.sum(1)
    return torch.nn.functional.cosine_similarity(sentences[::2], sentences[1::2])


def test_a_search_keeps_the_ranking_of_sentence_pairs(tmp_path) -> None:
    torch.manual_seed(0)
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2}
    encoder = BertModel(BertConfig(vocab_size=128, num_attention_heads=2, **sizes)).eval()
    ids = torch.randint(1, 128, (2 * PAIRS, 12))
    ids[1::2, :8] = torch.where(torch.rand(PAIRS, 8) < 0.5, ids[::2, :8], ids[1::2, :8])
    mask = torch.ones_like(ids)
    mask[::2, 9:] = 0
    inputs = {"input_ids": ids, "attention_mask": mask}
    with torch.no_grad():
        right = _pooled_similarities(encoder(**inputs).last_hidden_state, mask)

    def rank(model: Any) -> float:
        states = model(**inputs)["last_hidden_state"]
        found = _pooled_similarities(torch.as_tensor(np.asarray(states.detach())), mask)
        return float(spearmanr(found.numpy(), right.numpy()).statistic)

    converter = MixedPrecision(capture="layers", precisions="int4,int8", objective="footprint")
    converter.model, converter.eval_func = encoder, rank
    converter.calib_dataloader = [(inputs, None)]
    converter.accuracy_criterion = 0.05
    converter.cache = False
    result = converter()
    assert result.met
    assert result.report.size < 0.4 * result.report.baseline_size
    assert rank(result.model) >= 0.95
    result.save(tmp_path / "encoder")
    again = neural_mp.load(tmp_path / "encoder").model
    assert type(again) is BertModel
    expected = result.model(**inputs).last_hidden_state
    assert torch.equal(again(**inputs).last_hidden_state, expected)
