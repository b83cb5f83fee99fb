"""What a tuning run needs to know."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property

from neural_mp.adaptors.loaded_model import AnyModel, AnyTunableModel
from neural_mp.core.enums import Objective
from neural_mp.core.hardware import Hardware
from neural_mp.core.precision import Precision
from neural_mp.core.trial import Outcome, Trial
from neural_mp.io.measurement_cache import NO_CACHE, MeasurementCache
from neural_mp.runs.history import History
from neural_mp.runs.record import Setting
from neural_mp.space import ResolvedPlan, TuningSpace
from neural_mp.strategies.base import Strategy
from neural_mp.tuning.calibration_batches import Calibration
from neural_mp.tuning.criterion import AccuracyCriterion, ExitPolicy
from neural_mp.tuning.evaluator import Evaluator
from neural_mp.tuning.executors.options import Workers
from neural_mp.tuning.objectives import Footprints, Measurement, is_slow


@dataclass(frozen=True)
class SearchSettings:
    """How a search goes about its work, as the user set it.

    Attributes:
        precisions: those asked for that this machine supports.
        for_numbers: precisions wanted whatever they cost here: forced on (`FORCE_BF16=1`), or not
            native on this machine and yet on the one that is converted for.
        criterion: what the accuracy has to meet.
        exit_policy: when the search ends at the latest.
        seed: for strategies that draw at random.
        workers: what tries the plans of a round side by side.
        early_stopping: whether an evaluation that is lost is stopped.
    """

    precisions: tuple[Precision, ...] = ()
    for_numbers: frozenset[Precision] = frozenset()
    criterion: AccuracyCriterion = AccuracyCriterion()
    exit_policy: ExitPolicy = ExitPolicy()
    seed: int = 0
    workers: Workers = Workers()
    early_stopping: bool = True


@dataclass(frozen=True)
class Described:
    """What people are told of a run beside its figures.

    Attributes:
        model: what the user called the model.
        settings: option → what holds, and who set it.
        hardware: the machine that is converted for.
    """

    model: str = "model"
    settings: Mapping[str, Setting] = field(default_factory=dict)
    hardware: Hardware = field(default_factory=Hardware)


@dataclass(frozen=True)
class TuningJob:
    """What a run needs to know.

    Attributes:
        model: the FP32 model, in the space that the user's constraints leave.
        load: makes the model once more, in another process.
        strategy: proposes plans.
        evaluator: measures accuracy.
        calibration: data for calibration; None where there is none.
        measurement: how latency is measured.
        open_history: opens the run's record; only called where accuracy is evaluated.
        settings: how the search goes about its work.
        amp: what the user said of auto mixed precision, in words.
        cache: what earlier runs measured of this model on this machine.
        described: what people are told of the run.
    """

    model: AnyTunableModel
    load: Callable[[], AnyModel]
    strategy: Strategy
    evaluator: Evaluator
    calibration: Calibration | None
    measurement: Measurement
    open_history: Callable[[], History]
    settings: SearchSettings = SearchSettings()
    amp: tuple[str, ...] = ()
    cache: MeasurementCache = NO_CACHE
    described: Described = field(default_factory=Described)

    @property
    def space(self) -> TuningSpace:
        """What every op may run in."""
        return self.model.space

    def in_space(self, space: TuningSpace) -> TuningJob:
        """The job with a space that calibration has cut down."""
        return self if space is self.space else replace(self, model=self.model.in_space(space))

    @property
    def objectives(self) -> Mapping[Objective, float]:
        """What is made small → its weight."""
        return self.measurement.objectives

    @cached_property
    def footprints(self) -> Footprints:
        """Tells the memory that a run takes."""
        return Footprints(self.model, self.measurement.inputs)

    def figures(self, candidate: AnyModel, plan: ResolvedPlan) -> dict[str, float]:
        """The objectives of a converted model, measured beside FP32; smaller is better."""
        found = self.measurement(self.model, candidate)
        found["footprint"] = float(self.footprints(candidate, plan))
        found["relative_footprint"] = found["footprint"] / (self.footprints.baseline or 1)
        return found

    @property
    def evaluates(self) -> bool:
        """Whether accuracy is evaluated at all."""
        return self.evaluator.available and not self.settings.exit_policy.performance_only

    def claims_speed(self, plan: ResolvedPlan) -> bool:
        """Whether a plan is to be faster than FP32.

        It is not where it holds a precision that is wanted whatever it costs, or none but emulated
        ones: those are there for their numbers.
        """
        if not self.settings.for_numbers.isdisjoint(plan.effective.values()):
            return False
        return any(
            precision is not Precision.FP32
            and precision not in self.space.capabilities[op].emulated
            for op, precision in plan.effective.items()
        )

    def judged(self, trial: Trial, plan: ResolvedPlan) -> Trial:
        """A trial that met the target, told apart by whether it is too slow for what is wanted."""
        if not trial.meets_accuracy:
            return trial
        slow = is_slow(self.objectives, trial.objectives, self.measurement.min_speedup)
        slow = slow and self.claims_speed(plan)
        return replace(trial, outcome=Outcome.SLOW if slow else Outcome.MET)
