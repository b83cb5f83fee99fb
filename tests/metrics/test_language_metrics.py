"""Perplexity and divergence, compared with torch and SciPy."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from scipy.special import rel_entr, softmax

from neural_mp.errors import MetricError
from neural_mp.metrics import KLDivergence, Perplexity, build_metric

GENERATOR = np.random.default_rng(0)
LOGITS = GENERATOR.normal(size=(4, 7, 11)).astype(np.float32)
TOKENS = GENERATOR.integers(11, size=(4, 7))


def _reference(logits: np.ndarray, tokens: np.ndarray) -> float:
    loss = torch.nn.functional.cross_entropy(
        torch.from_numpy(logits[:, :-1].reshape(-1, 11)),
        torch.from_numpy(tokens[:, 1:].reshape(-1)),
    )
    return float(torch.exp(loss))


def test_perplexity_is_the_exponential_of_torchs_cross_entropy_of_the_next_token():
    metric = Perplexity()
    metric.update(LOGITS[:3], TOKENS[:3])
    metric.update(torch.from_numpy(LOGITS[3:]), torch.from_numpy(TOKENS[3:]))
    assert metric.result() == pytest.approx(_reference(LOGITS, TOKENS), rel=1e-6)


def test_tokens_with_the_label_minus_100_do_not_count():
    ignored = TOKENS.copy()
    ignored[:, :3] = -100
    metric = Perplexity()
    metric.update({"logits": LOGITS, "loss": np.float32(3)}, ignored)
    assert metric.result() == pytest.approx(_reference(LOGITS, ignored), rel=1e-6)


def test_shifted_labels_are_compared_in_place():
    metric = Perplexity(shift=False)
    metric.update(LOGITS[:, :-1], TOKENS[:, 1:])
    assert metric.result() == pytest.approx(_reference(LOGITS, TOKENS), rel=1e-6)


def test_uniform_logits_have_the_perplexity_of_the_number_of_words():
    metric = build_metric("ppl", {})
    metric.update(np.zeros((1, 5, 32), np.float32), np.zeros((1, 5), int))
    assert metric.result() == pytest.approx(32)
    assert metric.higher_is_better is False


def test_an_overflowing_perplexity_is_infinite():
    logits = np.zeros((1, 2, 3), np.float32)
    logits[0, 0, 0] = 1e4
    metric = Perplexity()
    metric.update(logits, np.array([[0, 1]]))
    assert metric.result() == np.inf


def test_a_tokenizer_of_another_model_is_named_as_the_cause():
    with pytest.raises(MetricError, match="from 0 to 10.*got 3 to 99; does the tokenizer belong"):
        Perplexity().update(LOGITS[:1, :3], np.array([[0, 3, 99]]))


@pytest.mark.parametrize(
    ("preds", "labels"),
    [
        (LOGITS, TOKENS[:2]),
        (LOGITS, TOKENS.astype(float)),
        (LOGITS[0], TOKENS[0]),
        (np.ones((4, 7, 11), int), TOKENS),
    ],
)
def test_other_shapes_and_types_are_one_error(preds, labels):
    with pytest.raises(MetricError, match="perplexity requires logits"):
        Perplexity().update(preds, labels)
    with pytest.raises(MetricError, match="must be logits, or outputs with the name 'logits'"):
        Perplexity().update({"a": preds, "b": preds}, labels)


def test_the_divergence_is_that_of_scipy_and_needs_no_labels():
    logits = GENERATOR.normal(size=LOGITS.shape).astype(np.float32)
    metric = KLDivergence()
    metric.update({"logits": logits}, LOGITS)
    expected = rel_entr(softmax(LOGITS, -1), softmax(logits, -1)).sum(axis=-1).mean()
    assert metric.result() == pytest.approx(expected, rel=1e-5)
    assert metric.compare_label is False
    metric.reset()
    metric.update(LOGITS, LOGITS)
    assert metric.result() == 0
