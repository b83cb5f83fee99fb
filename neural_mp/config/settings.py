"""Settings of a tuning file as dataclasses."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from neural_mp.amp import AutoMixedPrecisionOptions
from neural_mp.config.source import Source
from neural_mp.core.criterion import MIN_SPEEDUP, AccuracyCriterion, ExitPolicy
from neural_mp.core.enums import Dialect
from neural_mp.core.hardware import HOST_TARGET
from neural_mp.core.precision import Precision
from neural_mp.core.quant_spec import ROUNDING_STEPS
from neural_mp.space.capability import Constraints


@dataclass(frozen=True)
class ModelSettings:
    """Settings of the model.

    Attributes:
        name: a path or `module:attribute`; only a label if Python sets the model.
        framework: `pytorch`, `tensorflow`, `onnxrt` or `openvino`; None detects it from the model.
        inputs, outputs: names of the model's tensors, if the framework does not know them.
        capture: `whole` (default), `modules` for a model whose graph cannot be captured as a whole,
            or `layers` for a language model.
        runtime: `source`, `auto`, or the name of the runtime of the result; None if unset.
    """

    name: str | None = None
    framework: str | None = None
    inputs: tuple[str, ...] = ()
    outputs: tuple[str, ...] = ()
    capture: str | None = None
    runtime: str | None = None


@dataclass(frozen=True)
class CalibrationSettings:
    """Settings of calibration.

    Attributes:
        sampling_size: number of samples.
        dataloader: the mapping as written: dataset, transform, batch_size,
            last_batch, shuffle, seed.
    """

    sampling_size: int = 100
    dataloader: Mapping[str, Any] | None = None


@dataclass(frozen=True)
class TrainSettings:
    """Settings of the training of the most promising plan.

    Attributes:
        dataloader: the mapping as written; its batches are inputs and targets.
        loss: name of the loss → its options.
        optimizer: name of the optimizer → its options, with the learning rate; None for Adam.
        epochs: number of passes over the batches; None uses the default.
        max_batches: number of batches of an epoch; None for all.
    """

    dataloader: Mapping[str, Any] | None = None
    loss: Mapping[str, Mapping[str, Any]] | None = None
    optimizer: Mapping[str, Mapping[str, Any]] | None = None
    epochs: int | None = None
    max_batches: int | None = None


@dataclass(frozen=True)
class TuningSettings:
    """Settings of the search.

    Attributes:
        strategy: name of the strategy; None uses the default.
        criterion: accepted loss of accuracy.
        objective: `latency` (also `performance`; default), `throughput`, `footprint` or
            `modelsize`; or several with weights.
        exit_policy: limits of the search, whether or not the target is met.
        random_seed: seed of all random numbers.
        rounding_steps: steps per decoder block of learned rounding.
        workspace: folder of the history; None uses the default.
        resume: whether to continue the run in the workspace.
        storage: an Optuna storage URL instead of the file in the workspace.
        early_stopping: whether to stop an evaluation that can no longer meet the target.
        cache: whether to use and extend the measurement cache of the workspace.
        workers: number of processes that run trials in parallel; or input of `read_workers`.
        min_speedup: required speedup over FP32, with confidence, if only speed is tuned.
        max_bytes, max_bits: limit of the bytes of all weights, or of their mean bits; None for no
            limit.
        workload: shares of decode and prefill of a decoder; None to measure batches.
    """

    strategy: str | None = None
    criterion: AccuracyCriterion = field(default_factory=AccuracyCriterion)
    objective: str | Mapping[str, float] | None = None
    exit_policy: ExitPolicy = field(default_factory=ExitPolicy)
    random_seed: int = 0
    workspace: str | None = None
    resume: bool = False
    storage: str | None = None
    early_stopping: bool = True
    cache: bool = True
    workers: int | str | Mapping[str, Any] = 1
    min_speedup: float = MIN_SPEEDUP
    max_bytes: int | None = None
    max_bits: float | None = None
    workload: Mapping[str, Any] | None = None
    rounding_steps: int = ROUNDING_STEPS


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
        max_batches: number of batches for the accuracy; None for all.
        label_key: key of the labels in batches that are dicts; None for the reserved names.
    """

    metrics: tuple[MetricSettings, ...] = ()
    dataloader: Mapping[str, Any] | None = None
    postprocess: Mapping[str, Any] | None = None
    performance: PerformanceSettings = PerformanceSettings()
    max_batches: int | None = None
    label_key: str | None = None


@dataclass(frozen=True)
class Settings:
    """A whole tuning file.

    Attributes:
        model: the model.
        device: `cpu` or `gpu`.
        target: hardware target, a name in `neural_mp.core.hardware.TARGETS`.
        precisions: allowed precisions; None if not given.
        constraints: limits on the whole model, on op types and on single ops.
        amp: ops allowed in 16 bits; None if not given.
        approach: source of INT8 ranges: `static`, `dynamic`, `weight_only`; None for all.
        calibration: settings of calibration.
        train: settings of the training; None if the file requests none.
        tuning: settings of the search.
        evaluation: settings of accuracy and latency measurements.
        dialect: vocabulary of datasets, transforms and metrics.
        source: the file, to locate errors.
        folder: folder of the file; None if the content was passed directly.
        trust: further modules whose classes and functions the file may name.
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
    train: TrainSettings | None = None
    dialect: Dialect = Dialect.OWN
    source: Source = field(default_factory=lambda: Source("the settings"), compare=False)
    folder: Path | None = field(default=None, compare=False)
    trust: tuple[str, ...] = field(default=(), compare=False)
