"""Metrics of embeddings and scores: correlations with labels, and the cosine with FP32."""

from __future__ import annotations

from typing import ClassVar

import numpy as np

from neural_mp.data.option_checks import true_or_false
from neural_mp.errors import MetricError
from neural_mp.metrics.base import METRICS, Collection, RunningMean
from neural_mp.metrics.predictions import convert_number_pairs, convert_to_array


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
