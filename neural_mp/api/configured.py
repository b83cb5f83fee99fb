"""Data and metrics that a tuning file names, made; a mistake is said with its place in the file."""

from __future__ import annotations

from neural_mp.common import DataLoader, Metric
from neural_mp.config import Settings
from neural_mp.config.source import KeyPath
from neural_mp.core.words import Dialect
from neural_mp.data import OWN, Transform, Vocabulary, build_dataloader, build_transforms
from neural_mp.metrics import METRICS, build_metric

ACCURACY: KeyPath = ("evaluation", "accuracy")
PERFORMANCE: KeyPath = ("evaluation", "performance")
CALIBRATION: KeyPath = ("quantization", "calibration")


def vocabulary_of(settings: Settings) -> Vocabulary:
    """What the names in a tuning file stand for: by our words, or by those of the file."""
    if settings.dialect is Dialect.OWN:
        return OWN
    from neural_mp.compat.inc.names import vocabulary

    return vocabulary(settings.model.framework)


def loader(settings: Settings, section: KeyPath) -> DataLoader | None:
    """The loader that a section of a file describes; None where it describes none.

    Args:
        settings: the file.
        section: `ACCURACY`, `PERFORMANCE` or `CALIBRATION`.

    Raises:
        ConfigurationError: a name or an option is wrong.
        DataError: the data are missing or of the wrong form.
    """
    spec = {
        ACCURACY: settings.evaluation.dataloader,
        PERFORMANCE: settings.evaluation.performance.dataloader,
        CALIBRATION: settings.calibration.dataloader,
    }[section]
    if spec is None:
        return None
    with settings.source.at((*section, "dataloader")):
        return build_dataloader(spec, vocabulary_of(settings))


def postprocess(settings: Settings) -> Transform | None:
    """What a file applies to predictions and labels; None for nothing.

    Raises:
        ConfigurationError: a name or an option is wrong.
    """
    with settings.source.at((*ACCURACY, "postprocess", "transform")):
        return build_transforms(settings.evaluation.postprocess, vocabulary_of(settings))


def metrics(settings: Settings) -> list[tuple[Metric, float]]:
    """The metrics that a file names, with their weights.

    Raises:
        ConfigurationError: a name or an option is wrong.
        MetricError: one of the user's own lacks a method.
    """
    names = vocabulary_of(settings).metrics or METRICS
    found = []
    for item in settings.evaluation.metrics:
        with settings.source.at((*ACCURACY, "metric")):
            found.append((build_metric(item.name, item.options, names), item.weight))
    return found
