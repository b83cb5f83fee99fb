"""Input of a strategy: a calibrated model, its measurements, and those of earlier runs."""

from __future__ import annotations

import hashlib
import json

from neural_mp.adaptors.loaded_model import AnyTunableModel
from neural_mp.core.observations import Observations
from neural_mp.io.measurement_cache import MeasurementCache
from neural_mp.strategies.base import Probe, TuningProblem
from neural_mp.tuning.job import TuningJob


def problem_of(job: TuningJob, model: AnyTunableModel, probe: Probe) -> TuningProblem:
    """Return the input of a strategy for a calibrated model."""
    settings = job.settings
    return TuningProblem(
        job.space,
        model.observations,
        settings.precisions,
        settings.seed,
        job.objectives,
        probe,
        settings.criterion.tolerance,
        job.measurement.workload,
    )


def cache_of_probes(job: TuningJob, observations: Observations) -> MeasurementCache:
    """Return the cache of earlier runs of the model with the same observations."""
    content = json.dumps(observations.to_dict(), sort_keys=True)
    return job.cache.scoped(
        space=job.space.digest,
        observations=hashlib.sha256(content.encode()).hexdigest(),
        **job.measurement.conditions,
    )
