"""The inputs of a tuning run, and of its strategy."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property

from neural_mp.adaptors.loaded_model import AnyModel, AnyTunableModel
from neural_mp.core.criterion import AccuracyCriterion, Deadline, ExitPolicy
from neural_mp.core.enums import Objective
from neural_mp.core.hardware import Hardware
from neural_mp.core.observations import Observations
from neural_mp.core.precision import Precision
from neural_mp.core.trial import Outcome, Trial
from neural_mp.io.measurement_cache import NO_CACHE, MeasurementCache
from neural_mp.runs.history import History
from neural_mp.runs.report import RunSource, RuntimeFigures, RuntimeHint, Setting
from neural_mp.space import ResolvedPlan, TuningSpace
from neural_mp.strategies.base import Probe, Strategy, TuningProblem
from neural_mp.targets.profile import TargetCosts, TargetProfile
from neural_mp.tuning.evaluation.calibration_batches import Calibration
from neural_mp.tuning.evaluation.evaluator import Evaluator
from neural_mp.tuning.executors.contract import Workers
from neural_mp.tuning.listener import RunLog
from neural_mp.tuning.measurement.objectives import (
    Footprints,
    Measurement,
    judge_gain,
    measure_size_figures,
)
from neural_mp.tuning.size_limit import SizeLimit


@dataclass(frozen=True)
class SearchSettings:
    """The user's settings for a search.

    Attributes:
        precisions: requested precisions that this machine supports.
        for_numbers: precisions used regardless of latency: forced on (`FORCE_BF16=1`), or native on
            the target machine only.
        criterion: the accuracy criterion.
        exit_policy: limits of the search.
        seed: for random strategies.
        workers: workers that try the plans of a round in parallel.
        early_stopping: whether evaluations that will miss the target are stopped.
        size_limit: limit of the size of the weights; if set, accuracy is not evaluated.
    """

    precisions: tuple[Precision, ...] = ()
    for_numbers: frozenset[Precision] = frozenset()
    criterion: AccuracyCriterion = AccuracyCriterion()
    exit_policy: ExitPolicy = ExitPolicy()
    seed: int = 0
    workers: Workers = Workers()
    early_stopping: bool = True
    size_limit: SizeLimit = field(default_factory=SizeLimit)


@dataclass(frozen=True)
class RunDescription:
    """Descriptions shown with the figures of a run.

    Attributes:
        model: the user's name of the model.
        settings: option → its value and origin.
        hardware: the target machine.
        source: the options as text, if all of them have one.
    """

    model: str = "model"
    settings: Mapping[str, Setting] = field(default_factory=dict)
    hardware: Hardware = field(default_factory=Hardware)
    source: RunSource | None = None


@dataclass(frozen=True)
class TuningJob:
    """The inputs of a tuning run.

    Attributes:
        model: the FP32 model, in the space after user constraints.
        load: loads the model again, in another process.
        strategy: proposes plans.
        evaluator: measures accuracy.
        calibration: calibration data; None without data.
        measurement: latency measurement.
        open_history: opens the run's history; only called if accuracy is evaluated.
        settings: settings of the search.
        amp: the user's auto mixed precision setting, as text.
        cache: measurements of earlier runs of this model on this machine.
        description: shown in reports.
        runtimes: figures of the runtimes that were compared.
        alternatives: the verified FP32 models in other runtimes that the result is compared with.
        hint: seconds of each phase, and per batch in FP32 → another runtime that is faster in
            FP32, if any; None for no search.
        target: the accelerator to plan for; None for this machine, or another CPU.
        train: FP32 model, plan, seconds → the converted model, trained with the rounding of the
            plan: for the most promising plan if none meets the target; None without training.
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
    description: RunDescription = field(default_factory=RunDescription)
    runtimes: tuple[RuntimeFigures, ...] = ()
    alternatives: tuple[AnyModel, ...] = ()
    hint: Callable[[Mapping[str, float], float], RuntimeHint | None] | None = None
    train: Callable[[AnyTunableModel, ResolvedPlan, float], AnyModel] | None = None
    target: TargetProfile | None = None

    @property
    def space(self) -> TuningSpace:
        """The supported configurations of every op."""
        return self.model.space

    def in_space(self, space: TuningSpace) -> TuningJob:
        """Return the job with a space reduced by calibration."""
        return self if space is self.space else replace(self, model=self.model.in_space(space))

    @property
    def objectives(self) -> Mapping[Objective, float]:
        """Objective to minimize → its weight."""
        return self.measurement.objectives

    def limit_by_effort(self, deadline: Deadline, fp32_seconds: float, log: RunLog) -> Deadline:
        """Return the deadline after calibration: the given one, or that of the effort if earlier.

        `fp32_seconds` are those of an evaluation of FP32, or of loading if none is evaluated.
        """
        limits = self.measurement.limits
        seconds = log.seconds.get("calibrate", 0.0) + fp32_seconds
        bounded = limits.start_deadline(seconds)
        earliest = min(deadline, bounded, key=lambda item: item.end_time)
        if earliest is not deadline:
            log.report_limit(earliest.seconds, limits.effort)
        return earliest

    @property
    def source_name(self) -> str:
        """The precision of the given model as a name, such as `FP32`."""
        return self.space.graph.source_name

    @cached_property
    def footprints(self) -> Footprints:
        """Computes the memory footprint of a run."""
        return Footprints(self.model, self.measurement.inputs)

    def measure_objectives(self, candidate: AnyModel, plan: ResolvedPlan) -> dict[str, float]:
        """Return the objectives of a converted model, measured against FP32; smaller is better."""
        sizes = self.measure_sizes(candidate, plan)
        if self.target_costs is not None:
            return {**self.target_costs.estimate_objectives(plan.plan), **sizes}
        return {**self.measurement(self.model, candidate), **sizes}

    @cached_property
    def target_costs(self) -> TargetCosts | None:
        """The estimated costs on the target; None without an accelerator."""
        if self.target is None:
            return None
        return TargetCosts(self.target, *self.model.count_op_work(self.measurement.inputs))

    def measure_sizes(self, candidate: AnyModel, plan: ResolvedPlan) -> dict[str, float]:
        """Return the size and the memory footprint of a converted model, also against FP32."""
        figures = measure_size_figures(self.model, candidate)
        figures["footprint"] = float(self.footprints(candidate, plan))
        figures["relative_footprint"] = figures["footprint"] / (self.footprints.baseline_bytes or 1)
        return figures

    @property
    def evaluates_accuracy(self) -> bool:
        """Whether accuracy is evaluated."""
        is_chosen_otherwise = self.settings.exit_policy.performance_only
        is_chosen_otherwise = is_chosen_otherwise or self.settings.size_limit.is_set
        return self.evaluator.is_available and not is_chosen_otherwise

    def claims_speed(self, plan: ResolvedPlan) -> bool:
        """Whether a plan must be faster than FP32 in the framework's own kernels.

        False if the plan holds a precision used regardless of latency, or emulated ones only: those
        are used for their numerics.
        """
        if not self.settings.for_numbers.isdisjoint(plan.effective.values()):
            return False
        return any(config.kernel for config in plan.plan.values()) or any(
            precision is not Precision.FP32
            and precision not in self.space.capabilities[op].emulated
            for op, precision in plan.effective.items()
        )

    def rate_trial(self, trial: Trial, plan: ResolvedPlan) -> Trial:
        """Return a trial that met the accuracy target, rated by its gain over FP32."""
        if not trial.meets_accuracy:
            return trial
        if not self.claims_speed(plan):
            return replace(trial, outcome=Outcome.MET)
        gain = judge_gain(self.objectives, trial.objectives, self.measurement.min_speedup)
        return replace(trial, outcome=gain)


def make_tuning_problem(job: TuningJob, model: AnyTunableModel, probe: Probe) -> TuningProblem:
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
        job.target,
    )


def cache_of_probes(job: TuningJob, observations: Observations) -> MeasurementCache:
    """Return the cache of earlier runs of the model with the same observations."""
    content = json.dumps(observations.to_dict(), sort_keys=True)
    return job.cache.scope_to(
        space=job.space.digest,
        observations=hashlib.sha256(content.encode()).hexdigest(),
        **job.measurement.cache_conditions,
    )
