"""What is better among plans that meet the target: faster, or smaller in memory or on disk."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from numbers import Real
from types import MappingProxyType
from typing import Any

from neural_mp.adaptors.loaded_model import AnyModel, AnyTunableModel
from neural_mp.core.enums import Objective, is_latency_only
from neural_mp.core.plan import PrecisionPlan
from neural_mp.core.trial import Trial
from neural_mp.errors import ConfigurationError
from neural_mp.profiling import interleaved_rounds, ratio, undisturbed
from neural_mp.space import ResolvedPlan, peak_activation_bytes
from neural_mp.tuning.criterion import MIN_SPEEDUP
from neural_mp.util.pytree import batch_size_of

#: Figures closer than this are the same: latencies are noisy.
_TIE_RATIO = 1.005
#: Seconds for which models are measured beside each other at least: short runs need more rounds.
_LEAST_SECONDS = 0.2
#: Runs shorter than this are timed several in a row, so that what ran before counts for little.
_BLOCK_SECONDS = 0.002
#: How many times the time limit may be taken to tell whether a plan gains enough.
_PATIENCE = 6.0
#: Fewer rounds than this decide only where each of them says the same.
_FEW_ROUNDS = 20
#: A spread narrower than this, as a share, is not worth more rounds, whatever lies within it.
_RESOLUTION = 0.005
#: Trials within this of the best are measured again, side by side.
_FINALIST_RATIO = 1.25


def parse_objectives(value: str | Mapping[str, float]) -> Mapping[Objective, float]:
    """Read `"performance"` or `{"performance": 0.7, "modelsize": 0.3}`.

    Returns:
        Objective → its weight; weights add up to 1.

    Raises:
        ConfigurationError: there is no such objective, or a weight is no positive number.
    """
    given = {value: 1.0} if isinstance(value, str) else value
    if not isinstance(given, Mapping) or not given:
        raise ConfigurationError(
            f"objective must be a name, or a mapping of names to weights, got {value!r}"
        )
    for name, weight in given.items():
        Objective.parse(name, "objective")
        number = isinstance(weight, Real) and not isinstance(weight, bool)
        if not number or not math.isfinite(weight) or weight <= 0:
            raise ConfigurationError(
                f"objective: the weight of {name!r} must be a positive number, got {weight!r}"
            )
    total = sum(given.values())
    shares = {Objective(name): float(weight) / total for name, weight in given.items()}
    return MappingProxyType(shares)


@dataclass(frozen=True)
class Measurement:
    """Measures a candidate beside the FP32 model.

    Attributes:
        inputs: one batch.
        objectives: what the run is after → its weight.
        warmup, iterations: runs not counted, and counted; of models that take very little, more.
        time_limit: seconds after which no further run starts.
        threads: threads the framework may use meanwhile; None leaves that to it.
        min_speedup: how many times as fast as FP32 a plan must be for sure, where speed is all that
            is wanted.
    """

    inputs: Any
    objectives: Mapping[Objective, float] = field(
        default_factory=lambda: {Objective.PERFORMANCE: 1.0}
    )
    warmup: int = 5
    iterations: int = 30
    time_limit: float = 5.0
    threads: int | None = None
    min_speedup: float = MIN_SPEEDUP

    def __call__(self, baseline: AnyModel, candidate: AnyModel) -> dict[str, float]:
        """Latency and size of a candidate, smaller is better."""
        found = {"modelsize": float(candidate.size)}
        found["relative_modelsize"] = found["modelsize"] / (baseline.size or 1)
        found.update(latency_figures(*self.rounds([baseline, candidate])))
        return found

    @property
    def batch_size(self) -> int:
        """Samples in the batch that is measured."""
        return batch_size_of(self.inputs)

    def side_by_side(self, models: Sequence[AnyModel], longer: int = 1) -> list[float]:
        """Seconds a batch of each of several models, measured in turn.

        Args:
            models: what to measure, all of one framework.
            longer: how many times as long as usual.
        """
        return [undisturbed(seconds) for seconds in self._timed(models, longer)]

    def briefly(self, models: Sequence[AnyModel], rounds: int) -> list[float]:
        """The same, of so few rounds that the fastest run of each counts."""
        brief = replace(self, warmup=1, iterations=rounds)
        return [min(seconds) for seconds in brief._timed(models)]

    def rounds(self, models: Sequence[AnyModel], longer: int = 1) -> list[list[float]]:
        """Seconds a batch of each of several models, measured in turn, one for every round.

        Where speed is all that is wanted, rounds are added until each model is either faster than
        the first one by `min_speedup` or not, beyond the spread, or until that takes too long.

        Args:
            models: what to measure, all of one framework, the FP32 model first.
            longer: how many times as long as usual.
        """
        judged = is_latency_only(self.objectives) and len(models) > 1
        return self._timed(models, longer, self._decides if judged else None)

    def _timed(
        self,
        models: Sequence[AnyModel],
        longer: int = 1,
        decides: Callable[[list[list[float]]], bool] | None = None,
    ) -> list[list[float]]:
        runs = [partial(model, self.inputs) for model in models]
        with models[0].adaptor.threads(self.threads):
            return interleaved_rounds(
                runs,
                warmup=self.warmup,
                iterations=self.iterations * longer,
                least_seconds=_LEAST_SECONDS * longer,
                time_limit=self.time_limit * longer,
                block_seconds=_BLOCK_SECONDS,
                decides=decides,
                patience=_PATIENCE,
            )

    def _decides(self, taken: list[list[float]]) -> bool:
        """Whether each model's share of FP32's time lies on one side of what is asked for."""
        before, *after = taken
        return all(self._is_decided(before, seconds) for seconds in after)

    def _is_decided(self, before: Sequence[float], after: Sequence[float]) -> bool:
        share, least = ratio(after, before), 1 / self.min_speedup
        faster = [one <= least * other for one, other in zip(after, before, strict=True)]
        if len(faster) < _FEW_ROUNDS and any(faster) and not all(faster):
            return False
        narrow = share.high - share.low < _RESOLUTION * share.value
        return narrow or not share.low <= least < share.high


def latency_figures(baseline: Sequence[float], candidate: Sequence[float]) -> dict[str, float]:
    """The figures of a candidate that was timed in turn with the FP32 model, round by round."""
    found = ratio(candidate, baseline)
    return {
        "performance": undisturbed(candidate),
        "relative_latency": found.value,
        "relative_latency_low": found.low,
        "relative_latency_high": found.high,
    }


def is_slow(
    objectives: Mapping[Objective, float],
    figures: Mapping[str, float],
    min_speedup: float = MIN_SPEEDUP,
) -> bool:
    """Whether speed is all that is wanted, and these figures do not show enough of it for sure.

    What is within the spread of the measurement counts for FP32: the lower bound of the speed-up
    has to exceed 1, and to reach `min_speedup`.
    """
    share = figures.get("relative_latency_high", figures.get("relative_latency", 0.0))
    return is_latency_only(objectives) and (share >= 1 or share * min_speedup > 1)


def finalists(
    trials: Sequence[Trial], objectives: Mapping[Objective, float], most: int
) -> list[Trial]:
    """The best of those that met the target, best first: those that noise may have misordered."""
    met = sorted(
        (t for t in trials if t.met), key=lambda t: (t.relative_cost(objectives), t.number)
    )
    return [
        t
        for t in met
        if t.relative_cost(objectives) <= met[0].relative_cost(objectives) * _FINALIST_RATIO
    ][:most]


def best_trial(trials: Sequence[Trial], objectives: Mapping[Objective, float]) -> Trial | None:
    """The best of those that met the target; None if none did.

    Among trials whose figures cannot be told apart, the one with the fewest bits in its plan,
    then the earliest.
    """
    met = [trial for trial in trials if trial.met]
    if not met:
        return None
    best = min(trial.relative_cost(objectives) for trial in met)
    close = [trial for trial in met if trial.relative_cost(objectives) <= best * _TIE_RATIO]
    return min(close, key=lambda trial: (_bits(trial), trial.number))


def _bits(trial: Trial) -> int:
    return sum(config.precision.bits for config in trial.plan.values())


@dataclass(frozen=True, eq=False)
class Footprints:
    """Tells what a model and its converted forms take in memory, the same on every call.

    Attributes:
        model: the FP32 model.
        inputs: one batch.
    """

    model: AnyTunableModel
    inputs: Any

    def __call__(self, candidate: AnyModel, plan: ResolvedPlan) -> int:
        """Bytes of a candidate's weights, and of its activations at their most.

        Args:
            candidate: the model.
            plan: what it runs in.
        """
        return candidate.size + peak_activation_bytes(self.model.space, plan, self.values)

    @cached_property
    def baseline(self) -> int:
        """Bytes of the FP32 model."""
        return self(self.model, self.model.space.resolve(PrecisionPlan()))

    @cached_property
    def values(self) -> Mapping[str, float]:
        """Op or graph input → how many numbers it holds in a run of the batch."""
        return self.model.tensor_values(self.inputs)
