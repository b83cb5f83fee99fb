"""Confidence bound of the loss on other texts: coverage, and its role in verdicts."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from torch import nn

from neural_mp import MixedPrecision
from neural_mp.core.trial import Outcome
from neural_mp.metrics import KLDivergence, Perplexity
from neural_mp.reporting.tables import build_trial_table
from neural_mp.tuning.evaluation.accuracy_bounds import TextLosses, metric_of_texts


def _texts(random: np.random.Generator, number: int) -> tuple[TextLosses, TextLosses]:
    """FP32's losses of texts of unequal length, and those of a plan: 0.01 nats more per token."""
    counts = random.integers(20, 200, number)
    baseline = counts * random.gamma(4, 0.5, number)
    candidate = baseline + counts * (0.01 + 0.03 * random.normal(size=number))
    return tuple(TextLosses(tuple(sums), tuple(counts * 1.0)) for sums in (baseline, candidate))


def test_the_bound_of_unrelated_texts_is_that_of_a_bootstrap_or_wider():
    ratios = []
    for seed in range(12):
        random = np.random.default_rng(seed)
        baseline, candidate = _texts(random, 300)
        base, sums, counts = (
            np.array(x) for x in (baseline.sums, candidate.sums, candidate.counts)
        )
        drawn = random.integers(300, size=(4000, 300))
        increases = (sums - base)[drawn].sum(axis=1) / counts[drawn].sum(axis=1)
        expected = base.sum() / counts.sum() + np.quantile(increases, 0.99)
        loss = sums.sum() / counts.sum()
        bound = candidate.bound_mean_over(baseline)
        # As many other texts vary as much as these do.
        ratios.append((bound - loss) / (np.sqrt(2) * (expected - loss)))
    assert min(ratios) > 0.9
    assert np.median(ratios) < 1.5


def _neighbours(random: np.random.Generator, number: int) -> tuple[TextLosses, TextLosses]:
    """Losses of texts of files of about ten texts each, which a plan harms more or less."""
    baseline, candidate = _texts(random, number)
    harm = np.repeat(0.02 * random.normal(size=number), 10)[:number]
    sums = np.array(candidate.sums) + harm * np.array(candidate.counts)
    return baseline, TextLosses(tuple(sums), candidate.counts)


@pytest.mark.parametrize("texts", [_texts, _neighbours])
def test_the_loss_of_other_texts_exceeds_the_bound_in_about_one_of_a_hundred_sets(texts):
    random = np.random.default_rng(1)
    exceeded = 0
    for _ in range(400):
        baseline, candidate = texts(random, 100)
        other_before, other_after = texts(random, 100)
        bound = candidate.bound_mean_over(baseline) - np.sum(baseline.sums) / np.sum(
            baseline.counts
        )
        change = np.sum(other_after.sums) - np.sum(other_before.sums)
        exceeded += change / np.sum(other_after.counts) > bound
    assert exceeded <= 0.025 * 400


def test_few_texts_or_other_texts_give_no_bound():
    baseline, candidate = _texts(np.random.default_rng(0), 20)
    short = TextLosses(candidate.sums[:5], candidate.counts[:5])
    assert short.bound_mean_over(TextLosses(baseline.sums[:5], baseline.counts[:5])) is None
    assert candidate.bound_mean_over(TextLosses(baseline.sums, baseline.counts[::-1])) is None


@pytest.mark.parametrize("metric", [Perplexity(), KLDivergence()])
def test_metrics_of_texts_keep_what_their_result_is_made_of(metric):
    random = np.random.default_rng(0)
    for _ in range(3):
        logits = random.normal(size=(5, 9, 11)).astype(np.float32)
        labels = random.integers(11, size=(5, 9))
        labels[0, 4:] = -100
        metric.update(
            logits, random.normal(size=logits.shape) if isinstance(metric, KLDivergence) else labels
        )
    sums, counts = metric.text_losses()
    assert len(sums) == 15
    assert metric.at_loss(np.sum(sums) / np.sum(counts)) == pytest.approx(metric.result())
    many = TextLosses.from_metric(metric)
    assert np.sum(many.sums) == pytest.approx(np.sum(sums))
    metric.reset()
    assert metric.text_losses() == ([], [])
    assert metric_of_texts([(metric, 0.5)]) is None
    assert metric_of_texts([(metric, 1.0)]) is metric


class Decoder(nn.Module):
    """Predicts the next token from the last one alone."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.last = nn.Embedding(32, 64), nn.Linear(64, 32)

    def forward(self, input_ids: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"logits": 4 * self.last(self.table(input_ids))}


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    torch.manual_seed(0)
    net, tokens = Decoder().eval(), torch.randint(32, (64, 1))
    with torch.no_grad():
        for _ in range(23):  # texts of the decoder itself, so that every change harms
            chances = net(tokens[:, -1:])["logits"][:, 0].softmax(-1)
            tokens = torch.cat([tokens, torch.multinomial(chances, 1)], dim=1)
    data = [({"input_ids": part}, part) for part in tokens.split(8)]

    def tuned(tolerance: float):
        converter = MixedPrecision(
            precisions="int2,int4,int8", objective="modelsize", metric="perplexity"
        )
        converter.workspace = tmp_path_factory.mktemp("run")
        converter.model, converter.eval_dataloader = net, data
        converter.accuracy_criterion = {"relative": tolerance, "any_tolerance": True}
        return converter()

    return tuned


@pytest.mark.slow
def test_a_trial_has_the_bound_that_decides(run):
    result = run(0.02)
    assert result.met
    for trial in result.trials:
        if trial.loss is not None:
            assert trial.loss_bound > trial.loss
            assert trial.meets_accuracy == (trial.loss_bound <= 0.02 + 1e-9)
    again = run(0.02)
    assert [t.loss_bound for t in again.trials] == [t.loss_bound for t in result.trials]


@pytest.mark.slow
def test_a_plan_that_meets_the_target_on_these_texts_only_is_missed(run):
    loose = next(trial for trial in run(0.02).trials if trial.loss_bound is not None)
    between = (loose.loss + loose.loss_bound) / 2
    assert loose.loss < between < loose.loss_bound
    trials = [trial for trial in run(between).trials if trial.plan == loose.plan]
    assert all(trial.outcome is Outcome.MISSED for trial in trials)
    assert all("bound on other texts" in (trial.error or "") for trial in trials)


def test_tables_show_the_bound(run):
    trials = run(0.02).trials
    table = build_trial_table([(trial, None) for trial in trials])
    column = next(c for c in table.columns if c.header == "loss")
    assert any("at most" in str(cell) for cell in column.cells)
    assert not math.isnan(trials[0].loss_bound)
