"""The measurement of latency or throughput by the options of a run."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from neural_mp.adaptors.loaded_model import AnyModel
from neural_mp.api import config_objects
from neural_mp.config import Settings
from neural_mp.core import hardware as machine
from neural_mp.core.workload import Workload
from neural_mp.errors import ConfigurationError
from neural_mp.tuning.evaluation.batches import Batches
from neural_mp.tuning.measurement.objectives import Measurement, is_throughput, parse_objectives


def streams_of(settings: Settings, objective: str | Mapping[str, float]) -> int | None:
    """Return the number of concurrent callers; None if latency is measured."""
    if not is_throughput(objective):
        return None
    performance = settings.evaluation.performance
    return performance.streams or performance.cores_per_instance or machine.detect().cores


def measurement_of(
    settings: Settings,
    objective: str | Mapping[str, float],
    min_speedup: Any,
    model: AnyModel,
    data: Batches | None,
    workload: Workload | None = None,
) -> Measurement:
    """Return the measurement on the data of the tuning file, or else on the first batch of `data`.

    Without data, the example inputs of the model are used.
    """
    performance = settings.evaluation.performance
    loader = config_objects.loader(settings, config_objects.PERFORMANCE)
    if loader is not None:
        data = Batches(loader, "performance.dataloader").tried_on(model)
    return Measurement(
        data.first_inputs if data is not None else model.example_inputs(),
        parse_objectives(objective),
        performance.warmup,
        performance.iteration,
        threads=performance.cores_per_instance,
        min_speedup=float(min_speedup),
        streams=streams_of(settings, objective),
        workload=None if workload is None else checked_workload(workload, model),
    )


def checked_workload(workload: Workload, model: AnyModel) -> Workload:
    """Return a workload that fits the model.

    Raises:
        ConfigurationError: the layers of the model do not run alone, as those of a decoder do.
    """
    if not model.layer_shapes:
        raise ConfigurationError(
            "workload requires a decoder in PyTorch that is captured layer by layer, got another "
            "model; set capture to 'layers', or remove the workload"
        )
    return workload
