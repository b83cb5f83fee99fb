"""Perplexity and divergence, compared with torch and SciPy."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from scipy.special import rel_entr, softmax

from neural_mp.core.criterion import Deadline
from neural_mp.errors import MetricError
from neural_mp.metrics import KLDivergence, Perplexity, build_metric
from neural_mp.metrics.predictions import OfOutput
from neural_mp.tuning.evaluation.batches import Batches
from neural_mp.tuning.evaluation.evaluator import Evaluator
from neural_mp.util.token_masks import TokenMasks, find_token_masks

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


def _masked() -> tuple[TokenMasks, np.ndarray]:
    """Two texts with padding before, and one behind."""
    counted = np.ones((4, 7), int)
    counted[0, :3], counted[1, :1], counted[2, 5:] = 0, 0, 0
    inputs = {"input_ids": TOKENS, "attention_mask": torch.from_numpy(counted)}
    return find_token_masks(inputs), counted.astype(bool)


def test_the_perplexity_is_that_of_the_texts_without_their_padding():
    mask, counted = _masked()
    metric = Perplexity()
    metric.update(LOGITS, TOKENS, mask=mask)
    losses = [
        torch.nn.functional.cross_entropy(
            torch.from_numpy(logits[real][:-1]),
            torch.from_numpy(tokens[real][1:]),
            reduction="none",
        )
        for logits, tokens, real in zip(LOGITS, TOKENS, counted, strict=True)
    ]
    assert metric.result() == pytest.approx(float(torch.cat(losses).mean().exp()), rel=1e-6)


def test_the_divergence_leaves_out_padding():
    mask, counted = _masked()
    fp32 = GENERATOR.normal(size=LOGITS.shape).astype(np.float32)
    metric = KLDivergence()
    metric.update(LOGITS, fp32, mask=mask)
    expected = rel_entr(softmax(fp32, axis=-1), softmax(LOGITS, axis=-1)).sum(-1)[counted].mean()
    assert metric.result() == pytest.approx(expected, rel=1e-5)
    counts = metric.text_losses()[1]
    assert list(counts) == counted.sum(axis=1).tolist()


def test_an_evaluation_passes_the_mask_of_each_batch():
    padded = np.concatenate([TOKENS[:, :3], TOKENS], axis=1)
    mask = np.repeat([[0, 1]], 4, axis=0).repeat([3, 7], axis=1)
    logits = np.concatenate([LOGITS[:, :3], LOGITS], axis=1)
    batch = {"input_ids": padded, "attention_mask": mask}, padded
    plain = {"input_ids": TOKENS}, TOKENS
    for pair, outputs in ((batch, logits), (plain, LOGITS)):
        for metric in (Perplexity(), OfOutput(Perplexity(), output="logits")):
            evaluator = Evaluator(Batches([pair], "eval_dataloader"), [(metric, 1.0)])
            result = evaluator(lambda _, outputs=outputs: {"logits": outputs}, Deadline())
            assert result == pytest.approx(_reference(LOGITS, TOKENS), rel=1e-6)


def test_masks_of_an_encoder_and_a_decoder_of_one_length_are_not_confused():
    ids, mask = np.zeros((2, 5), int), np.repeat([[0, 1, 1, 1, 1]], 2, axis=0)
    both = {"input_ids": ids, "attention_mask": mask, "decoder_input_ids": ids}
    assert not find_token_masks(both).by_shape
    both["decoder_input_ids"] = ids[:, :4]
    assert set(find_token_masks(both).by_shape) == {(2, 5)}
    both |= {"decoder_input_ids": ids, "decoder_attention_mask": mask}
    assert set(find_token_masks(both).by_shape) == {(2, 5)}
