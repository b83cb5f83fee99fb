"""Settings of a tuning file as dataclasses, and those of its section `quantization.train`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from neural_mp.amp import AutoMixedPrecisionOptions
from neural_mp.config.inc_dialect import Ignored
from neural_mp.config.options import Options
from neural_mp.config.source import KeyPath, Source
from neural_mp.core.enums import Dialect
from neural_mp.errors import ConfigurationError, error_path
from neural_mp.space.capability import Constraints


@dataclass(frozen=True)
class TrainSettings:
    """Settings of the training of the most promising plan.

    Attributes:
        dataloader: the mapping as written; its batches are inputs and targets.
        loss: name of the loss → its options.
        optimizer: name of the optimizer → its options, with the learning rate; None for Adam.
        max_batches: number of batches of an epoch; None for all.
    """

    dataloader: Mapping[str, Any] | None = None
    loss: Mapping[str, Mapping[str, Any]] | None = None
    optimizer: Mapping[str, Mapping[str, Any]] | None = None
    max_batches: int | None = None


@dataclass(frozen=True)
class MetricSettings:
    """Settings of a metric.

    Attributes:
        name: lower-case name in the registry, or dotted path of a user-defined metric
            (`my_pkg.metrics:Mine`).
        options: keyword arguments of the metric.
        weight: weight among several metrics; None if each has to meet the target.
        higher_is_better: whether larger values are better; None leaves it to the metric.
    """

    name: str
    options: Mapping[str, Any] = field(default_factory=dict)
    weight: float | None = 1.0
    higher_is_better: bool | None = None


@dataclass(frozen=True)
class PerformanceSettings:
    """Settings of the latency measurement.

    Attributes:
        warmup: runs before the measurement.
        iteration: measured runs.
        cores_per_instance: number of threads; None leaves it to the framework.
        dataloader: input data; None uses the data of the accuracy.
        streams: number of concurrent callers for the throughput; None for one per thread.
        instances: number of processes of INC's `Benchmark`; tuning measures in one.
    """

    warmup: int = 5
    iteration: int = 30
    cores_per_instance: int | None = None
    dataloader: Mapping[str, Any] | None = None
    streams: int | None = None
    instances: int = 1


@dataclass(frozen=True)
class EvaluationSettings:
    """Settings of accuracy and latency measurements.

    Attributes:
        metrics: one metric; or several whose weighted sum is the accuracy, or that each have to
            meet the target.
        dataloader: data of the accuracy.
        postprocess: transform name → options, applied to predictions and labels.
        performance: settings of the latency measurement.
    """

    metrics: tuple[MetricSettings, ...] = ()
    dataloader: Mapping[str, Any] | None = None
    postprocess: Mapping[str, Any] | None = None
    performance: PerformanceSettings = PerformanceSettings()


@dataclass(frozen=True)
class Settings:
    """A whole tuning file.

    Attributes:
        options: the options that Python can set as well.
        device: `cpu` or `gpu`.
        constraints: limits on the whole model, on op types and on single ops.
        amp: ops allowed in 16 bits; None if not given.
        calibration_dataloader: the mapping as written: dataset, transform, batch_size,
            last_batch, shuffle, seed.
        train: settings of the training; None if the file requests none.
        evaluation: settings of accuracy and latency measurements.
        dialect: vocabulary of datasets, transforms and metrics.
        source: the file, to locate errors.
        folder: folder of the file; None if the content was passed directly.
        trust: further modules whose classes and functions the file may name.
    """

    options: Options = field(default_factory=Options)
    device: str = "cpu"
    constraints: Constraints = field(default_factory=Constraints)
    amp: AutoMixedPrecisionOptions | None = None
    calibration_dataloader: Mapping[str, Any] | None = None
    evaluation: EvaluationSettings = EvaluationSettings()
    train: TrainSettings | None = None
    dialect: Dialect = Dialect.OWN
    source: Source = field(default_factory=lambda: Source("the settings"), compare=False)
    folder: Path | None = field(default=None, compare=False)
    trust: tuple[str, ...] = field(default=(), compare=False)


#: INC's approach that trains with the section.
TRAINED_APPROACH = "quant_aware_training"
TRAIN: KeyPath = ("quantization", "train")
_UNUSED = f"only the approach {TRAINED_APPROACH} trains"
#: INC's learning rate, if an optimizer has none.
_THEIR_RATE = 1e-3
_THEIR_EPOCHS = 1
#: INC's key → ours.
_NAMES = {"criterion": "loss", "iteration": "max_batches"}


def select_used_content(content: Mapping[str, Any], ignored: Ignored) -> Mapping[str, Any]:
    """Return the content of a file of INC with its section of training only if INC uses it.

    The approach that requests the training is removed: our search allows all approaches then.
    """
    section = content.get("quantization")
    if not isinstance(section, Mapping) or section.get("train") is None:
        return content
    used = dict(section)
    if used.get("approach") == TRAINED_APPROACH:
        del used["approach"]
    else:
        ignored(TRAIN, _UNUSED)
        del used["train"]
    return {**content, "quantization": used}


def train_settings(
    data: Mapping[str, Any] | None, dialect: Dialect
) -> tuple[TrainSettings | None, int | None]:
    """Return the settings of a validated section, None without a section, and the epochs.

    Raises:
        ConfigurationError: two keys contradict each other.
    """
    if data is None:
        return None, None
    section = dict(data)
    with error_path(*TRAIN):
        for theirs, ours in _NAMES.items():
            if theirs in section and ours in section:
                raise ConfigurationError(f"{theirs} means {ours}; remove one of the two")
            if theirs in section:
                section[ours] = section.pop(theirs)
        epochs = _read_epochs(section, dialect)
    options = {key: section[key] for key in ("dataloader", "loss", "max_batches") if key in section}
    return TrainSettings(**options, optimizer=_read_optimizer(section, dialect)), epochs


def _read_epochs(given: Mapping[str, Any], dialect: Dialect) -> int | None:
    if "epochs" in given:
        return int(given["epochs"])
    if "end_epoch" in given:
        start, end = given.get("start_epoch", 0), given["end_epoch"]
        if end <= start:
            with error_path("end_epoch"):
                raise ConfigurationError(f"must be greater than start_epoch ({start}), got {end}")
        return int(end - start)
    return int(given.get("epoch", _THEIR_EPOCHS)) if dialect is Dialect.INC else given.get("epoch")


def _read_optimizer(given: Mapping[str, Any], dialect: Dialect) -> dict[str, Any] | None:
    if "optimizer" not in given:
        return None
    default = {"learning_rate": _THEIR_RATE} if dialect is Dialect.INC else {}
    return {name: {**default, **options} for name, options in given["optimizer"].items()}
