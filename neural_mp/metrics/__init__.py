"""Metrics: built-in metrics by name, and adapters for user-defined metrics."""

from neural_mp.metrics.base import METRICS
from neural_mp.metrics.classification import AUC, F1, Accuracy, Loss, TopK
from neural_mp.metrics.coercion import build_metric, convert_to_metric
from neural_mp.metrics.detection import MeanAveragePrecision
from neural_mp.metrics.language import KLDivergence, LMEvalTask, MultipleChoice, Perplexity
from neural_mp.metrics.regression import MAE, MSE, R2, RMSE
from neural_mp.metrics.segmentation import MeanIoU

__all__ = [
    "AUC",
    "F1",
    "MAE",
    "METRICS",
    "MSE",
    "R2",
    "RMSE",
    "Accuracy",
    "KLDivergence",
    "LMEvalTask",
    "Loss",
    "MeanAveragePrecision",
    "MeanIoU",
    "MultipleChoice",
    "Perplexity",
    "TopK",
    "build_metric",
    "convert_to_metric",
]
