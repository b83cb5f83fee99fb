"""Metrics of embeddings and rankings: correlations, cosine with FP32, ndcg@k, recall@k, MRR.

Predictions of a ranking are scores `[Q, D]` of D documents for each of Q queries, with the
relevance `[Q, D]` as labels; or scores `[N]` of single pairs, with a dict of labels: `query` `[N]`,
equal for the documents of a query, and `relevance` `[N]`. Documents of a query may be in several
batches.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import numpy as np

from neural_mp.data.option_checks import check_whole_number, true_or_false
from neural_mp.errors import MetricError
from neural_mp.metrics.base import METRICS, Collection, RunningMean, nothing_taken_in
from neural_mp.metrics.predictions import convert_number_pairs, convert_to_array
from neural_mp.util.pytree import convert_to_numpy


class _Correlation(Collection):
    """A correlation of predicted scores `[N]` with labels `[N]`.

    Args:
        pairs: whether predictions are embeddings `[2N, D]`, where rows 2i and 2i + 1 are the pair
            i, whose score is their cosine; labels are `[N]`, or `[2N]` with each label twice.

    Raises:
        ConfigurationError: `pairs` is neither true nor false.
    """

    higher_is_better: ClassVar[bool] = True
    best_value: ClassVar[float | None] = 1.0

    def __init__(self, pairs: bool = False) -> None:
        self.pairs = true_or_false(f"{type(self).__name__}: pairs", pairs)
        super().__init__()

    def update(self, preds: object, labels: object) -> None:
        """Add one batch."""
        if self.pairs:
            preds, labels = _score_pairs_of_rows(preds, labels)
        predicted, truth = convert_number_pairs(preds, labels)
        self.take_in(predicted.reshape(-1), truth.reshape(-1))

    def result(self) -> float:
        """Return the correlation since the last reset; NaN if undefined or a prediction was NaN.

        Raises:
            MetricError: there are fewer than two samples.
        """
        predicted, truth = self.concatenate_batches()
        if len(truth) < 2:
            raise MetricError(f"{type(self).__name__} needs at least two samples, got one")
        # SciPy warns about constants, whose correlation is undefined.
        if np.isnan(predicted).any() or not (np.ptp(predicted) and np.ptp(truth)):
            return float("nan")
        return self._correlate(predicted, truth)

    @staticmethod
    def _correlate(predicted: np.ndarray, truth: np.ndarray) -> float:
        raise NotImplementedError


@METRICS.register("spearman", "spearmanr")
class Spearman(_Correlation):
    """The correlation of ranks, SciPy's `spearmanr`."""

    @staticmethod
    def _correlate(predicted: np.ndarray, truth: np.ndarray) -> float:
        from scipy.stats import spearmanr

        return float(spearmanr(predicted, truth).statistic)


@METRICS.register("pearson", "pearsonr")
class Pearson(_Correlation):
    """The linear correlation, SciPy's `pearsonr`."""

    @staticmethod
    def _correlate(predicted: np.ndarray, truth: np.ndarray) -> float:
        from scipy.stats import pearsonr

        return float(pearsonr(predicted, truth).statistic)


@METRICS.register("cosine", "cosine_similarity")
class Cosine(RunningMean):
    """The mean cosine of the outputs `[..., D]` with those of the FP32 model, without labels.

    Computed by scikit-learn's `paired_cosine_distances` along the last axis; a vector of zeros has
    the cosine .5 to any other.
    """

    higher_is_better: ClassVar[bool] = True
    best_value: ClassVar[float | None] = 1.0
    compare_label: ClassVar[bool] = False

    def update(self, preds: object, labels: object) -> None:
        """Add one batch; `labels` are the predictions of the FP32 model."""
        from sklearn.metrics.pairwise import paired_cosine_distances

        values, truth = convert_to_array(preds, "predictions"), convert_to_array(labels, "labels")
        if values.shape != truth.shape or values.ndim < 2:
            raise MetricError(
                f"cosine requires vectors of both models, (samples, …, size), got "
                f"{values.dtype} of {values.shape}, and {truth.dtype} of {truth.shape} of the FP32 "
                f"model"
            )
        rows, reference = (
            array.reshape(-1, array.shape[-1]).astype(np.float64) for array in (values, truth)
        )
        usable = np.isfinite(rows).all(axis=1)
        cosines = np.full(len(rows), np.nan)
        if usable.any():
            cosines[usable] = 1 - paired_cosine_distances(rows[usable], reference[usable])
        self.take_in(cosines)


def _score_pairs_of_rows(preds: object, labels: object) -> tuple[np.ndarray, np.ndarray]:
    """Return the cosine and the label of each pair of neighboring rows."""
    rows, truth = convert_to_array(preds, "predictions"), convert_to_array(labels, "labels")
    if rows.ndim != 2 or len(rows) % 2 or truth.size not in (len(rows), len(rows) // 2):
        raise MetricError(
            f"pairs requires embeddings [2N, D], two rows a pair, and labels [N] or [2N], got "
            f"{rows.dtype} of {rows.shape} and labels of {truth.shape}"
        )
    truth = truth.reshape(-1)
    return cosine_of_pairs(rows), truth[::2] if truth.size == len(rows) else truth


def cosine_of_pairs(rows: np.ndarray) -> np.ndarray:
    """Return the cosines of rows 2i and 2i + 1 of embeddings `[2N, D]`; 0 with a zero vector."""
    rows = rows.astype(np.float64)
    norms = np.linalg.norm(rows, axis=1, keepdims=True)
    units = rows / np.where(norms == 0, 1, norms)
    return np.asarray((units[::2] * units[1::2]).sum(axis=1))


_KEYS = ("query", "relevance")


class _Ranking:
    """The mean over queries of a value of their ranked documents.

    Of equal scores the first counts as higher, and NaN as the lowest. A query without a relevant
    document, of relevance above 0, counts as 0.

    Args:
        k: number of documents that count, from the top; None for all.

    Raises:
        ConfigurationError: `k` is not a whole number from 1.
    """

    higher_is_better: ClassVar[bool] = True
    best_value: ClassVar[float | None] = 1.0

    def __init__(self, k: int | None = None) -> None:
        name = f"{type(self).__name__}: k"
        self.k = None if k is None else check_whole_number(name, k, minimum=1)
        self.reset()

    def reset(self) -> None:
        """Discard all queries."""
        #: Scores and relevance of whole queries.
        self._rows: list[tuple[np.ndarray, np.ndarray]] = []
        #: Query → score and relevance of each document.
        self._documents: dict[Any, list[tuple[float, float]]] = {}

    def update(self, preds: object, labels: object) -> None:
        """Add the documents of one batch."""
        scores = convert_to_array(preds, "predictions").astype(np.float64)
        if isinstance(labels, Mapping):
            self._add_documents(scores, labels)
            return
        relevance = convert_to_array(labels, "labels").astype(np.float64)
        if scores.ndim != 2 or scores.shape != relevance.shape:
            raise MetricError(
                f"{type(self).__name__} requires scores [Q, D] and labels of this shape, or scores "
                f"[N] and labels with the keys query and relevance, got {scores.dtype} of "
                f"{scores.shape} and labels of {relevance.shape}"
            )
        self._rows += zip(scores.copy(), _check_relevance(relevance), strict=True)

    def _add_documents(self, scores: np.ndarray, labels: Mapping[str, Any]) -> None:
        if not set(_KEYS) <= set(labels):
            raise MetricError(
                f"labels of {type(self).__name__} must have the keys query and relevance, got "
                f"{', '.join(map(str, labels))}"
            )
        queries = convert_to_numpy(labels["query"]).reshape(-1)
        relevance = convert_to_array(labels["relevance"], "labels").reshape(-1).astype(np.float64)
        if not scores.size == queries.size == relevance.size:
            raise MetricError(
                f"{type(self).__name__} requires a score, a query and a relevance for each pair, "
                f"got {scores.size}, {queries.size} and {relevance.size}"
            )
        documents = zip(scores.reshape(-1), _check_relevance(relevance), strict=True)
        for query, (score, relevant) in zip(queries.tolist(), documents, strict=True):
            self._documents.setdefault(query, []).append((float(score), float(relevant)))

    def merge(self, other: _Ranking) -> None:
        """Add the queries of another instance."""
        self._rows += other._rows
        for query, documents in other._documents.items():
            self._documents.setdefault(query, []).extend(documents)

    def result(self) -> float:
        """Return the mean over all queries since the last reset."""
        columns = (np.array(documents).T for documents in self._documents.values())
        queries = [*self._rows, *((scores, relevance) for scores, relevance in columns)]
        if not queries:
            raise nothing_taken_in(self)
        return float(np.mean([self._score_query(*query) for query in queries]))

    def _score_query(self, scores: np.ndarray, relevance: np.ndarray) -> float:
        if not (relevance > 0).any():
            return 0.0
        scores = np.where(np.isnan(scores), -np.inf, scores)
        return self._score_ranking(scores, relevance)

    def _score_ranking(self, scores: np.ndarray, relevance: np.ndarray) -> float:
        raise NotImplementedError


@METRICS.register("ndcg@k", "ndcg")
class NDCG(_Ranking):
    """The normalized discounted cumulative gain, scikit-learn's `ndcg_score`.

    The gain is linear in the relevance; equal scores share their gains.
    """

    def _score_ranking(self, scores: np.ndarray, relevance: np.ndarray) -> float:
        from sklearn.metrics import ndcg_score

        if len(scores) == 1:
            return 1.0
        # Ranks keep the order and are finite, as scikit-learn requires.
        ranks = np.unique(scores, return_inverse=True)[1]
        return float(ndcg_score([relevance], [ranks], k=self.k))


@METRICS.register("mrr@k", "mrr", "mean_reciprocal_rank")
class MRR(_Ranking):
    """The mean of 1 over the rank of the first relevant document, 0 beyond `k`."""

    def _score_ranking(self, scores: np.ndarray, relevance: np.ndarray) -> float:
        order = np.argsort(-scores, kind="stable")[: self.k]
        ranks = np.flatnonzero(relevance[order] > 0)
        return 1 / (1 + int(ranks[0])) if ranks.size else 0.0


@METRICS.register("recall@k", "recall_at_k")
class RecallAtK(_Ranking):
    """The share of the relevant documents that are among the `k` highest scores.

    Args:
        k: number of documents that count, from the top.

    Raises:
        ConfigurationError: `k` is not a whole number from 1.
    """

    def __init__(self, k: int = 10) -> None:
        super().__init__(check_whole_number("recall@k: k", k, minimum=1))

    def _score_ranking(self, scores: np.ndarray, relevance: np.ndarray) -> float:
        relevant = relevance > 0
        order = np.argsort(-scores, kind="stable")[: self.k]
        return float(relevant[order].sum() / relevant.sum())


def _check_relevance(relevance: np.ndarray) -> np.ndarray:
    if not (relevance >= 0).all():
        raise MetricError(f"the relevance must be at least 0, got {relevance.min()}")
    return relevance.copy()
