"""Quantization-aware training: a trainable model from a plan, and the result of the training."""

from __future__ import annotations

import time
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from neural_mp.adaptors.common.optional import needed
from neural_mp.adaptors.common.simulation import TrainingSchedule
from neural_mp.adaptors.loaded_model import LoadedModel
from neural_mp.api.loading import load_source
from neural_mp.api.optimized_model import OptimizedModel
from neural_mp.api.replay import OpenedPlan, open_plan
from neural_mp.core.enums import Capture
from neural_mp.core.hardware import Hardware
from neural_mp.core.observations import Observations
from neural_mp.core.plan import PrecisionPlan, load_plan_file
from neural_mp.errors import ConfigurationError, ConversionError, DataError, PlanError


@dataclass(frozen=True)
class _Origin:
    """The model and plan that a simulation was made from; shared by its copies."""

    opened: OpenedPlan

    def __deepcopy__(self, memo: dict[int, Any]) -> _Origin:
        return self


def untrainable(framework: str) -> str:
    """Return the message for a framework without training, with what there is instead."""
    return (
        f"training with a plan is for PyTorch and TensorFlow models, got a model of {framework}: "
        f"its weights are reconstructed without labels only; name the corrections 'adaround' and "
        f"'learned_scale' in the plan"
    )


def quantization_aware(
    model: object,
    plan: PrecisionPlan | OptimizedModel | str | Path,
    *,
    calibration: Iterable[Any] | None = None,
    observations: Observations | None = None,
    observe_steps: int = 0,
    learn_scales: bool = True,
    norm_steps: int = 0,
    inputs: object = None,
    framework: str | None = None,
    hardware: Hardware | None = None,
    capture: Capture = Capture.WHOLE,
) -> Any:
    """Return a model that computes with the rounding of a plan, to train in the user's own loop.

    The model stays unchanged; the returned one holds copies of its weights, and is in inference
    mode until the loop calls `train`. `finish` converts it after training.

    Args:
        model: the FP32 model: object, path or `module:attribute`.
        plan: a plan, the file of a plan, or a result, whose plan and calibration results are used.
        calibration: batches of inputs, to calibrate if neither `plan` nor `observations` has
            calibration results.
        observations: calibration results, if `plan` is only a plan.
        observe_steps: number of first steps in which ranges follow the data; frozen or learned
            afterwards. A step is one call in training mode.
        learn_scales: whether the optimizer learns the scales with the weights (LSQ).
        norm_steps: number of first steps in which batch norms that were folded into convolutions
            use the statistics of the batch; frozen afterwards. Norms of a model from a file, or of
            a layer that a correction rescales, are always frozen.
        inputs: example inputs, if the model requires them.
        framework: framework of the model; default: detected.
        hardware: hardware of this machine; default: detected.
        capture: see `MixedPrecision`.

    Raises:
        ConfigurationError: the plan quantizes nothing, the model has no weight to train, or an
            option is invalid.
        ConversionError: the framework does not offer training with a plan.
        DataError: calibration data are needed and missing.
        PlanError: the plan is malformed or does not fit the model or the hardware.
    """
    schedule = TrainingSchedule(observe_steps, learn_scales, norm_steps)
    if isinstance(plan, OptimizedModel):
        observations, plan = observations or plan.observations, plan.plan
    elif isinstance(plan, str | Path):
        plan, stored = load_plan_file(plan)
        observations = observations or stored
    if not isinstance(plan, PrecisionPlan):
        raise PlanError(
            f"plan must be a PrecisionPlan, the path of a plan file or an OptimizedModel, got a "
            f"{type(plan).__name__}"
        )
    data = None if calibration is None else list(calibration)
    example = data[0] if data and inputs is None else None
    loaded = load_source(model, framework, inputs, example=example, capture=capture)
    if loaded.adaptor.simulation is None:
        raise ConversionError(untrainable(loaded.adaptor.framework))
    opened = open_plan(loaded, plan, observations, data, hardware=hardware)
    if not opened.resolved.has_low_precision:
        raise ConfigurationError(
            "the plan must have at least one op in a lower precision, got none; train the model "
            "itself"
        )
    if opened.needs_ranges and not opened.tunable.observations.ranges:
        if data is None:
            raise DataError(
                "a plan with calibrated ranges requires calibration data, got none; set "
                "calibration to batches of inputs, or give the result of a run as the plan"
            )
        tunable = opened.tunable.calibrated(data)
        resolved = tunable.space.resolve(opened.resolved.plan)
        warnings = (*opened.warnings, *tunable.observations.notes)
        opened = OpenedPlan(loaded, tunable, resolved, warnings)
    simulation = opened.tunable.simulated(opened.resolved, schedule)
    simulation.record = _Origin(opened)
    return simulation


def finish(model: Any) -> OptimizedModel:
    """Return the converted model with the weights and scales of a trained simulation.

    Args:
        model: a model made by `quantization_aware`, also wrapped by `torch.compile` or
            `DistributedDataParallel`; stays unchanged.

    Raises:
        ConfigurationError: the model was not made by `quantization_aware`.
    """
    started = time.perf_counter()
    simulation = model
    while not isinstance(getattr(simulation, "record", None), _Origin):
        simulation = getattr(simulation, "_orig_mod", None) or getattr(simulation, "module", None)
        if simulation is None:
            raise ConfigurationError(
                f"finish requires a model made by quantization_aware, got a {type(model).__name__}"
            )
    opened: OpenedPlan = simulation.record.opened
    adaptor = opened.loaded.adaptor
    offered = needed(adaptor.simulation, adaptor.framework, "training with a plan")
    converted = LoadedModel(adaptor, offered.finished(simulation), boundary=opened.loaded.boundary)
    return opened.result(converted, started)
