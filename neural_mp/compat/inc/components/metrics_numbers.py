"""Metrics over numbers in files of Intel Neural Compressor: Loss, MAE, MSE and RMSE.

Source of what they mean: `neural_compressor/experimental/metric/metric.py` of release 1.14.
"""

from __future__ import annotations

from typing import Any, ClassVar

import numpy as np

from neural_mp.compat.inc.components.metric_inputs import as_one, parts
from neural_mp.compat.inc.components.registries import METRICS, registered
from neural_mp.data.option_checks import true_or_false
from neural_mp.metrics import regression
from neural_mp.metrics.base import RunningMean
from neural_mp.metrics.predictions import as_array, number_pairs


class _OutputByOutput(RunningMean):
    """Goes before a metric of ours that takes one output, and gives it all outputs in turn."""

    def __init__(self, compare_label: bool = True) -> None:
        true_or_false(f"{type(self).__name__}: compare_label", compare_label)
        super().__init__()
        self.compare_label = compare_label

    def update(self, preds: Any, labels: Any, sample_weight: Any = None) -> None:
        """Take in one batch.

        Raises:
            MetricError: predictions and labels differ in number or shape.
        """
        for predicted, truth in _pairs(preds, labels):
            super().update(predicted, truth)  # type: ignore[misc]


@registered(METRICS, "MAE")
class MAE(_OutputByOutput, regression.MAE):
    """The mean absolute difference over all numbers of all outputs.

    Unsigned integers are compared as the numbers they are; there, their differences wrap around.

    Args:
        compare_label: whether predictions are compared with the labels; if not, with what the
            FP32 model predicts.

    Raises:
        ConfigurationError: `compare_label` is neither true nor false.
    """


@registered(METRICS, "MSE")
class MSE(_OutputByOutput, regression.MSE):
    """The mean squared difference over all numbers of all outputs; options as `MAE` has them."""


@registered(METRICS, "RMSE")
class RMSE(_OutputByOutput, regression.RMSE):
    """The square root of `MSE`; options as `MAE` has them."""


@registered(METRICS, "Loss")
class Loss(RunningMean):
    """The mean of the predictions, which are losses already; labels only tell how many there are.

    All numbers of all outputs are summed up, and the sum is divided by the length of the first
    output in a list. An array `[N, M]` that is not in a list counts as a list of its N rows, as it
    does there: its sum is divided by M. That is N times the mean over samples, as large for FP32
    as for every other model.
    """

    running: ClassVar[bool] = False  # what it divides by need not be the number of samples
    higher_is_better: ClassVar[bool] = False

    def update(self, preds: Any, labels: Any, sample_weight: Any = None) -> None:
        """Take in one batch.

        Raises:
            MetricError: predictions and labels differ in number or shape.
        """
        self._sum += float(sum(predicted.sum() for predicted, _ in _pairs(preds, labels)))
        first = parts(labels)[0]
        array = np.atleast_1d(as_array(first, "labels"))
        is_list_of_rows = first is labels and array.ndim > 1
        self._count += array.shape[1] if is_list_of_rows else len(array)


def _pairs(preds: Any, labels: Any) -> list[tuple[np.ndarray, np.ndarray]]:
    """Output by output, predictions and labels as float64 arrays of one shape."""
    predicted, truth = parts(preds), parts(labels)
    if len(predicted) != len(truth):  # one of them may be a list of rows, which belong together
        predicted, truth = [as_one(preds, "predictions")], [as_one(labels, "labels")]
    return [number_pairs(*pair) for pair in zip(predicted, truth, strict=True)]
