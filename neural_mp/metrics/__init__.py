"""Metrics: built-in metrics by name, and adapters for user-defined metrics."""

from neural_mp.metrics.base import METRICS
from neural_mp.metrics.classification import AUC, F1, Accuracy, Loss, TopK
from neural_mp.metrics.coercion import build_metric, convert_to_metric
from neural_mp.metrics.decoding import Decode
from neural_mp.metrics.detection import MeanAveragePrecision
from neural_mp.metrics.language import KLDivergence, LMEvalTask, MultipleChoice, Perplexity
from neural_mp.metrics.ranking import MRR, NDCG, Cosine, Pearson, RecallAtK, Spearman
from neural_mp.metrics.regression import MAE, MSE, R2, RMSE
from neural_mp.metrics.segmentation import MeanIoU
from neural_mp.metrics.texts import BLEU, CER, ROUGE, WER, ExactMatch, SpanF1, SquadF1

__all__ = [
    "AUC",
    "BLEU",
    "CER",
    "F1",
    "MAE",
    "METRICS",
    "MRR",
    "MSE",
    "NDCG",
    "R2",
    "RMSE",
    "ROUGE",
    "WER",
    "Accuracy",
    "Cosine",
    "Decode",
    "ExactMatch",
    "KLDivergence",
    "LMEvalTask",
    "Loss",
    "MeanAveragePrecision",
    "MeanIoU",
    "MultipleChoice",
    "Pearson",
    "Perplexity",
    "RecallAtK",
    "SpanF1",
    "Spearman",
    "SquadF1",
    "TopK",
    "build_metric",
    "convert_to_metric",
]
