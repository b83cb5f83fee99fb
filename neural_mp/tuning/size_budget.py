"""The most accurate plan within a limit of size: one pass of the Fisher probe, no evaluation."""

from __future__ import annotations

from dataclasses import dataclass

from neural_mp.adaptors.loaded_model import AnyModel, AnyTunableModel
from neural_mp.errors import ConfigurationError
from neural_mp.io.measurement_cache import RunCache
from neural_mp.search.assignment import Filling
from neural_mp.space import ResolvedPlan
from neural_mp.strategies.bit_allocation import find_shared_floats, weights_by_bytes
from neural_mp.tuning.job import TuningJob, make_tuning_problem
from neural_mp.tuning.listener import RunLog
from neural_mp.tuning.measurement.probe import BRIEF, LEAST_ALLOWANCE, MeasuringProbe
from neural_mp.tuning.size_limit import SizeLimit

#: Maximum number of conversions: predicted sizes leave out biases and the factors of inputs.
_ATTEMPTS = 8
_FLOAT_BYTES = 4


@dataclass(frozen=True)
class SizedModel:
    """A plan and its model within the limit."""

    plan: ResolvedPlan
    model: AnyModel


def find_plan_within_limit(
    job: TuningJob, model: AnyTunableModel, limit: SizeLimit, log: RunLog
) -> SizedModel:
    """Return the most accurate plan within a limit of size, by the divergences of its weights.

    Raises:
        ConfigurationError: no plan is that small, or the weights of no op have several forms.
    """
    probe = MeasuringProbe(job, model, RunCache(), LEAST_ALLOWANCE, effort=BRIEF)
    problem = make_tuning_problem(job, model, probe)
    with log.time_phase("probe", "Measuring the noise of weights"):
        scored = probe.weight_noise()
    if not scored:
        raise ConfigurationError(
            f"{limit} requires ops whose weights can be stored in fewer bits, and a framework that "
            f"scores them, found none in {job.description.model!r}; remove the limit"
        )
    most = limit.limit_in_bytes(model.size)
    replaceable = scored.keys() - find_shared_floats(job.space, scored)
    rest = model.size - _FLOAT_BYTES * sum(job.space.graph[op].weights for op in replaceable)
    aim, knapsack = float(most - rest), weights_by_bytes(problem)
    with log.time_phase("convert", "Converting"):
        for _ in range(_ATTEMPTS):
            choice = knapsack.find_most_accurate(aim)
            if choice is None:
                break
            sized = _convert_filling(job, model, choice)
            if sized.model.size <= most:
                return sized
            aim = min(choice.cost, most - (sized.model.size - choice.cost)) - 1
    least = _convert_filling(job, model, knapsack.start).model.size
    raise ConfigurationError(
        f"{limit} must be at least the size of the smallest model in "
        f"{', '.join(job.settings.precisions)}, {least} bytes, got {most} bytes; raise the limit, "
        f"or add a lower precision"
    )


def _convert_filling(job: TuningJob, model: AnyTunableModel, filling: Filling) -> SizedModel:
    plan = job.space.resolve(job.space.fp32_plan().replacing(filling.configs))
    return SizedModel(plan, model.convert_by_plan(plan))
