"""What a tuning file says, as values."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from neural_mp.amp import AutoMixedPrecisionOptions
from neural_mp.config.source import Source
from neural_mp.core.enums import Capture, Dialect, Objective
from neural_mp.core.hardware import HOST_TARGET
from neural_mp.core.precision import Precision
from neural_mp.space.capability import Constraints
from neural_mp.tuning.criterion import MIN_SPEEDUP, AccuracyCriterion, ExitPolicy


@dataclass(frozen=True)
class ModelSettings:
    """Which model it is.

    Attributes:
        name: the model: a path or `module:attribute`; a mere label where Python sets the model.
        framework: `pytorch`, `tensorflow` or `onnxrt`; None asks the model itself.
        inputs, outputs: names of its tensors, where the framework does not know them.
        capture: `whole`, or `modules` for a model whose graph cannot be captured as a whole.
    """

    name: str | None = None
    framework: str | None = None
    inputs: tuple[str, ...] = ()
    outputs: tuple[str, ...] = ()
    capture: str = Capture.WHOLE


@dataclass(frozen=True)
class CalibrationSettings:
    """What the ranges of tensors are measured on.

    Attributes:
        sampling_size: samples read.
        dataloader: the mapping as written: dataset, transform, batch_size,
            last_batch, shuffle, seed.
    """

    sampling_size: int = 100
    dataloader: Mapping[str, Any] | None = None


@dataclass(frozen=True)
class TuningSettings:
    """How plans are searched.

    Attributes:
        strategy: its name; None takes the default one.
        criterion: how much accuracy may be lost.
        objective: what is made small: `performance` (latency), `footprint` or `modelsize`; or
            several with their weights.
        exit_policy: when to stop whether or not the target is met.
        random_seed: of everything drawn at random.
        workspace: folder of the history; None takes the default one.
        resume: go on with the run found there.
        storage: an Optuna storage URL in place of the file in the workspace.
        early_stopping: whether an evaluation that is lost already is stopped.
        cache: whether what earlier runs in the workspace measured is used, and kept for later ones.
        workers: processes that try plans side by side; or what `read_workers` takes, as written.
        min_speedup: how many times as fast as FP32 a plan must be for sure, where speed is all that
            is wanted.
    """

    strategy: str | None = None
    criterion: AccuracyCriterion = field(default_factory=AccuracyCriterion)
    objective: str | Mapping[str, float] = Objective.PERFORMANCE
    exit_policy: ExitPolicy = field(default_factory=ExitPolicy)
    random_seed: int = 0
    workspace: str | None = None
    resume: bool = False
    storage: str | None = None
    early_stopping: bool = True
    cache: bool = True
    workers: int | str | Mapping[str, Any] = 1
    min_speedup: float = MIN_SPEEDUP


@dataclass(frozen=True)
class MetricSettings:
    """One metric.

    Attributes:
        name: of the registry in lower case, or the dotted path of the user's own
            (`my_pkg.metrics:Mine`).
        options: keyword arguments it is made with.
        weight: its share where there are several; None where every one of them has to meet the
            target.
        higher_is_better: whether its larger value is the better one; None where it says itself.
    """

    name: str
    options: Mapping[str, Any] = field(default_factory=dict)
    weight: float | None = 1.0
    higher_is_better: bool | None = None


@dataclass(frozen=True)
class PerformanceSettings:
    """How latency is measured.

    Attributes:
        warmup: runs before the clock starts.
        iteration: runs timed.
        cores_per_instance: threads to use; None leaves it to the framework.
        dataloader: what to run on; None takes the one of the accuracy.
    """

    warmup: int = 5
    iteration: int = 30
    cores_per_instance: int | None = None
    dataloader: Mapping[str, Any] | None = None


@dataclass(frozen=True)
class EvaluationSettings:
    """How accuracy and latency are measured.

    Attributes:
        metrics: one; or several whose weighted sum is the accuracy, or that each have to meet the
            target.
        dataloader: what accuracy is measured on.
        postprocess: transform name → options, applied to predictions and labels.
        performance: how latency is measured.
        max_batches: how many batches accuracy is measured on; None for all.
    """

    metrics: tuple[MetricSettings, ...] = ()
    dataloader: Mapping[str, Any] | None = None
    postprocess: Mapping[str, Any] | None = None
    performance: PerformanceSettings = PerformanceSettings()
    max_batches: int | None = None


@dataclass(frozen=True)
class Settings:
    """A whole tuning file.

    Attributes:
        model: which model.
        device: `cpu` or `gpu`.
        target: what to convert for, a name in `neural_mp.core.hardware.TARGETS`.
        precisions: what ops may run in; None where the file does not say.
        constraints: limits on the whole model, on op types and on single ops.
        amp: which ops may run in 16 bits; None where the file does not say.
        approach: how INT8 ranges are found: `static`, `dynamic`, `weight_only`; None for all.
        calibration: the data that ranges are measured on.
        tuning: the search.
        evaluation: accuracy and latency.
        dialect: whose names datasets, transforms and metrics go by.
        source: the file, to say where in it a mistake is.
        folder: where the file lies; None where its content was given.
        trust: modules beside the user's own whose classes and functions it may name.
    """

    model: ModelSettings = ModelSettings()
    device: str = "cpu"
    target: str = HOST_TARGET
    precisions: tuple[Precision, ...] | None = None
    constraints: Constraints = field(default_factory=Constraints)
    amp: AutoMixedPrecisionOptions | None = None
    approach: str | None = None
    calibration: CalibrationSettings = CalibrationSettings()
    tuning: TuningSettings = field(default_factory=TuningSettings)
    evaluation: EvaluationSettings = EvaluationSettings()
    dialect: Dialect = Dialect.OWN
    source: Source = field(default_factory=lambda: Source("the settings"), compare=False)
    folder: Path | None = field(default=None, compare=False)
    trust: tuple[str, ...] = field(default=(), compare=False)
