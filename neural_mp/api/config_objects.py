"""Objects that a tuning file describes; errors name the key path in the file."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from neural_mp.api.loading import resolve_source
from neural_mp.common import DataLoader, Metric
from neural_mp.config import Settings
from neural_mp.config.settings import TRAIN
from neural_mp.config.source import KeyPath
from neural_mp.core.enums import Dialect
from neural_mp.data import OWN, Transform, Vocabulary, build_dataloader, build_transforms
from neural_mp.data.user_imports import named_in_file
from neural_mp.errors import (
    ConfigurationError,
    ModelLoadError,
    NeuralMPError,
    UnknownFrameworkError,
)
from neural_mp.metrics import METRICS, build_metric
from neural_mp.strategies import Strategy, create_strategy_named

ACCURACY: KeyPath = ("evaluation", "accuracy")
PERFORMANCE: KeyPath = ("evaluation", "performance")
CALIBRATION: KeyPath = ("quantization", "calibration")
_METRICS: tuple[KeyPath, ...] = ((*ACCURACY, "metric"), (*ACCURACY, "multi_metrics"))


def choose_name_vocabulary(settings: Settings) -> Vocabulary:
    """Return the vocabulary that resolves the names in a tuning file: built-in or INC names."""
    if settings.dialect is Dialect.OWN:
        return OWN
    from neural_mp.compat.inc.components import load_vocabulary
    from neural_mp.compat.inc.components.registries import FRAMEWORKS

    framework = settings.options.framework  # a plug-in has the common entries
    return load_vocabulary(framework if framework in FRAMEWORKS else None)


@contextmanager
def _locate_name_errors(settings: Settings, path: KeyPath) -> Iterator[None]:
    """Resolve names in this context, with errors that name the key path."""
    with settings.source.locate_errors(path), named_in_file(settings.folder, settings.trust):
        yield


def build_model(settings: Settings, given: object) -> Any:
    """Return the model set by the user in a type that an adaptor accepts.

    Raises:
        ConfigurationError: the name cannot be imported, or the file names untrusted code.
    """
    if given is None or given is not settings.options.model:
        return resolve_source(given)
    with _locate_name_errors(settings, ("model", "name")):
        return resolve_source(given)


@contextmanager
def locate_model_errors(settings: Settings, given: object) -> Iterator[None]:
    """Name the line of `model.name` in errors of a model that the tuning file names.

    Raises:
        ModelLoadError, UnknownFrameworkError: raised inside.
    """
    try:
        yield
    except (ModelLoadError, UnknownFrameworkError):
        if given is None or given is not settings.options.model:
            raise
        with settings.source.locate_errors(("model", "name")):
            raise


def build_loader(settings: Settings, section: KeyPath) -> DataLoader | None:
    """Return the loader described by a section of the file; None if the section has no loader.

    Raises:
        ConfigurationError: a name or an option is invalid.
        DataError: the data are missing or invalid.
    """
    spec = {
        ACCURACY: settings.evaluation.dataloader,
        PERFORMANCE: settings.evaluation.performance.dataloader,
        CALIBRATION: settings.calibration_dataloader,
        TRAIN: None if settings.train is None else settings.train.dataloader,
    }[section]
    if spec is None:
        return None
    with _locate_name_errors(settings, (*section, "dataloader")):
        return build_dataloader(spec, choose_name_vocabulary(settings))


def build_any_loader(settings: Settings, file: Path) -> DataLoader:
    """Return the calibration loader of a file, else the loader of the accuracy.

    Raises:
        ConfigurationError: there is no loader, or a name or an option is invalid.
        DataError: the data are missing or invalid.
    """
    dataloader = build_loader(settings, CALIBRATION) or build_loader(settings, ACCURACY)
    if dataloader is None:
        raise ConfigurationError(
            f"{file} must have calibration or evaluation data, got none; add "
            f"quantization.calibration.dataloader"
        )
    return dataloader


def build_postprocess(settings: Settings) -> Transform | None:
    """Return the transform of predictions and labels; None if the file has none.

    Raises:
        ConfigurationError: a name or an option is invalid.
    """
    with _locate_name_errors(settings, (*ACCURACY, "postprocess")):
        return build_transforms(settings.evaluation.postprocess, choose_name_vocabulary(settings))


def build_metrics(settings: Settings) -> list[tuple[Metric, float]]:
    """Return the metrics of the file with their weights.

    Raises:
        ConfigurationError: a name or an option is invalid.
        MetricError: a user-defined metric lacks a method.
    """
    names = choose_name_vocabulary(settings).metrics or METRICS
    weighted = []
    lines = settings.source.lines
    path = next((path for path in _METRICS if path in lines), _METRICS[0])
    written = [str(keys[-1]) for keys in lines if keys[:-1] == path]
    for item in settings.evaluation.metrics:
        with _locate_name_errors(settings, path), _restore_metric_spelling(written):
            weight = 1.0 if item.weight is None else item.weight
            weighted.append((build_metric(item.name, item.options, names), weight))
    return weighted


@contextmanager
def _restore_metric_spelling(names: Iterable[str]) -> Iterator[None]:
    """Spell metric names in errors as in the file, so that the line can be found."""
    try:
        yield
    except NeuralMPError as error:
        written: dict[str | int, str] = {name.strip().lower(): name for name in names}
        error.keys = (*(written.get(key, key) for key in error.keys[:1]), *error.keys[1:])
        raise


def build_strategy(settings: Settings, name: str) -> Strategy:
    """Return a strategy by name.

    Raises:
        ConfigurationError: the name is unknown; a name from the file is reported with its key path.
    """
    if not settings.options.is_set("strategy") or name != settings.options.strategy:
        return create_strategy_named(name)
    with settings.source.locate_errors(("tuning", "strategy", "name")):
        return create_strategy_named(name)
