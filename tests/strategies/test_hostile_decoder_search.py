"""A decoder with channels of outliers gets as few bits as its twin without."""

from __future__ import annotations

import hostile_decoder as decoder
import numpy as np
import pytest
import torch

from neural_mp import AccuracyCriterion, MixedPrecision

pytestmark = pytest.mark.slow

_TOLERANCE = 0.01


def _tuned(has_outliers: bool):
    """Return the smallest model within 1 % of the perplexity, captured as one graph."""
    rows, _ = decoder.windows()
    cut = [torch.from_numpy(part) for part in np.split(rows[:128], 8)]
    converter = MixedPrecision()
    converter.model = decoder.trained(has_outliers)
    converter.precisions, converter.objective = "int4,int8", "footprint"
    converter.metric = {"perplexity": {"shift": False}}
    converter.accuracy_criterion = AccuracyCriterion(_TOLERANCE)
    converter.eval_dataloader = [(part[:, :-1], part[:, 1:]) for part in cut]
    return converter()


def _unseen_loss(model: torch.nn.Module) -> float:
    def compute_logits(ids: np.ndarray) -> np.ndarray:
        with torch.no_grad():
            return np.asarray(model(torch.from_numpy(ids)))

    return decoder.loss(compute_logits)


def test_outliers_cost_a_tenth_of_the_bytes_at_most(quick_runs):
    plain, hostile = _tuned(False), _tuned(True)
    assert hostile.report.size <= 1.1 * plain.report.size
    assert hostile.plan.counts()["int4"] >= 12
    assert len(hostile.trials) <= 4
    limit = _unseen_loss(decoder.trained()) + np.log1p(_TOLERANCE)
    assert _unseen_loss(hostile.model) <= limit
