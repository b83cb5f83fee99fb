"""What YAML can name under `metric:`."""

from neural_mp.metrics.classification import AUC, F1, Accuracy, Loss, TopK
from neural_mp.metrics.registry import METRICS, build_metric
from neural_mp.metrics.regression import MAE, MSE, R2, RMSE

__all__ = [
    "AUC",
    "F1",
    "MAE",
    "METRICS",
    "MSE",
    "R2",
    "RMSE",
    "Accuracy",
    "Loss",
    "TopK",
    "build_metric",
]
