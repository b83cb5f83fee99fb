"""Regression metrics: MSE, RMSE, MAE and R2.

Predictions and labels have one shape, `[N]` or `[N, ...]`; `[N]` and `[N, 1]` fit each other.
"""

from __future__ import annotations

import math
from typing import ClassVar

import numpy as np

from neural_mp.errors import MetricError
from neural_mp.metrics.base import METRICS, Collection, RunningMean
from neural_mp.metrics.predictions import convert_number_pairs


class _MeanDifference(RunningMean):
    """A mean of a function of the differences between predictions and labels."""

    higher_is_better: ClassVar[bool] = False
    best_value: ClassVar[float | None] = 0.0

    def update(self, preds: object, labels: object) -> None:
        """Add one batch."""
        predicted, truth = convert_number_pairs(preds, labels)
        self.take_in(self._compute_element_errors(predicted - truth))

    @staticmethod
    def _compute_element_errors(differences: np.ndarray) -> np.ndarray:
        raise NotImplementedError


@METRICS.register("MSE", "mean_squared_error")
class MSE(_MeanDifference):
    """The mean squared error over all numbers."""

    @staticmethod
    def _compute_element_errors(differences: np.ndarray) -> np.ndarray:
        return differences**2


@METRICS.register("RMSE", "root_mean_squared_error")
class RMSE(MSE):
    """The root mean squared error over all numbers."""

    best_value: ClassVar[float | None] = None

    def result(self) -> float:
        """Return the value since the last reset; NaN if a prediction was NaN."""
        return math.sqrt(super().result())


@METRICS.register("MAE", "mean_absolute_error")
class MAE(_MeanDifference):
    """The mean absolute error over all numbers."""

    @staticmethod
    def _compute_element_errors(differences: np.ndarray) -> np.ndarray:
        return np.abs(differences)


@METRICS.register("R2", "r2_score")
class R2(Collection):
    """The coefficient of determination, scikit-learn's `r2_score`, averaged over outputs."""

    higher_is_better: ClassVar[bool] = True

    def update(self, preds: object, labels: object) -> None:
        """Add one batch."""
        predicted, truth = convert_number_pairs(preds, labels)
        self.take_in(predicted.reshape(len(predicted), -1), truth.reshape(len(truth), -1))

    def result(self) -> float:
        """Return the value since the last reset, at most 1; NaN if a prediction was NaN.

        Raises:
            MetricError: there are fewer than two samples.
        """
        from sklearn.metrics import r2_score

        predicted, truth = self.concatenate_batches()
        if len(truth) < 2:
            raise MetricError("R2 needs at least two samples, got one")
        if np.isnan(predicted).any():
            return float("nan")
        return float(r2_score(truth, predicted))
