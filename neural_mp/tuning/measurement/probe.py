"""Measurements of plans beyond calibration, without the evaluation data."""

from __future__ import annotations

import hashlib
import json
import logging
import math
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from statistics import median
from typing import Any, TypeVar

import numpy as np

from neural_mp.adaptors.loaded_model import AnyModel, AnyTunableModel
from neural_mp.core.enums import Objective
from neural_mp.core.observations import WidthFigures
from neural_mp.core.op_timings import (
    BRIEF_PROFILE,
    FULL_PROFILE,
    Duration,
    FormTimes,
    OpRuns,
    OpTimings,
    ProfileRuns,
    Workload,
)
from neural_mp.core.plan import PrecisionPlan
from neural_mp.core.precision import CORRECTIONS, Precision, make_weight_only
from neural_mp.core.quant_spec import QuantSpec
from neural_mp.errors import one_line
from neural_mp.io.measurement_cache import NO_CACHE, MeasurementCache
from neural_mp.runs.report import NO_CORRECTION, OUTPUT_NSR, TIMES
from neural_mp.search.corrections import without_reconstruction
from neural_mp.space import ResolvedPlan
from neural_mp.strategies.base import Probe
from neural_mp.tuning.job import TuningJob
from neural_mp.tuning.measurement.op_timing import (
    Timed,
    combine_op_timings,
    loses_in_int8,
    plan_in_precision,
    seconds_per_element,
    time_layer_forms,
    time_ops,
    update_times,
    weights_in_int8,
    with_conversions,
)
from neural_mp.tuning.measurement.sqnr import TimedRun
from neural_mp.util.fingerprint import compute_data_digest
from neural_mp.util.noise import MAX_NSR, compute_mean_nsr
from neural_mp.util.validators import (
    Validator,
    anything,
    keep_original_value,
    list_of,
    mapping_of,
    number,
    optional,
    positive_float,
    string,
)

logger = logging.getLogger(__name__)
T = TypeVar("T")

#: Minimum CPU seconds per thread for measurements, if an evaluation costs less.
LEAST_ALLOWANCE = 4.0
#: Kind of measurement, beside `TIMES`; key of the history for the reason of missing op timings.
_NOISE, _UNTIMED = "noise", "why ops were not timed"
#: Key of the noise by widths.
_WIDTHS = "noise by widths"


@dataclass(frozen=True)
class Effort:
    """The number of runs that measurements consist of.

    Attributes:
        profile: runs of a profile of ops.
        profiled_runs, whole_runs: runs of a batch for op timings, and of whole models.
        passes: interleaved profiles, if time permits.
        longer: duration of latency measurements, as a multiple of the usual one, if time permits.
    """

    profile: ProfileRuns
    profiled_runs: int
    whole_runs: int
    passes: int
    longer: int


#: The effort of a search, and that of a run which only converts.
THOROUGH, BRIEF = Effort(FULL_PROFILE, 24, 3, 2, 4), Effort(BRIEF_PROFILE, 10, 3, 1, 1)


@dataclass
class MeasuringProbe(Probe):
    """Measures with the job's model: noise on calibration data, times on the latency batch.

    Measurements, and those skipped for lack of time, are stored in the run's history, so that a
    resumed run obtains identical values. A measurement of time that would exceed the allowance,
    judged by the longest so far, is skipped, and one of noise once the allowance is spent. Time is
    CPU time over all threads, whatever else is running.

    Attributes:
        model: the FP32 model, calibrated.
        run_cache: measurements of this run.
        cache: measurements of earlier runs under the same conditions.
        allowance: maximum CPU seconds for times, and again for noise: however long the times of ops
            took, a plan that misses its target narrowly needs it.
        spent: kind of measurement → CPU seconds spent so far.
        seconds: wall-clock seconds spent so far.
        untimed: reason for missing op timings; empty if complete or not requested.
        has_cache_hits: whether any measurement was taken from an earlier run.
        effort: the number of runs.
        converted: plan → its model, kept for further use; None keeps those of the latest times.
        widths: noise of tensors and weights by width, if a strategy asked for these.
        gauge: the run of the FP32 model that took too long to time its ops, if it did.
        fp32_profile: op → seconds of the FP32 model in its last profile; empty without one.
        end_time: moment on the monotonic clock after which no measurement begins, of the time
            limit of a run.
    """

    job: TuningJob
    model: AnyTunableModel
    run_cache: MeasurementCache
    allowance: float
    spent: defaultdict[str, float] = field(default_factory=lambda: defaultdict(float))
    seconds: float = 0.0
    untimed: str = ""
    has_cache_hits: bool = False
    cache: MeasurementCache = NO_CACHE
    effort: Effort = THOROUGH
    converted: dict[ResolvedPlan, AnyModel] | None = field(default=None, repr=False)
    widths: WidthFigures | None = None
    gauge: TimedRun | None = None
    fp32_profile: Mapping[str, float] = field(default_factory=dict, repr=False)
    end_time: float = math.inf
    _longest: float = 0.0
    #: Models of the latest times, which further measurements and a trial use.
    _latest: list[AnyModel] = field(default_factory=list, repr=False)
    _reference: list[Any] | None = field(default=None, repr=False)

    def output_noise(self, plan: PrecisionPlan, unit: str | None = None) -> float | None:
        """See the base class."""
        resolved = self.job.space.resolve(plan)
        key = f"noise {_digest_plans([resolved])}"
        noise = self._recall_or_measure(
            key, optional(number), lambda: self._measure_noise(resolved), of=_NOISE
        )
        if unit is not None and noise is not None:
            used = {name for config in resolved.plan.values() for name in config.corrections}
            corrections = " ".join(name for name in CORRECTIONS if name in used) or NO_CORRECTION
            self.run_cache.put_entry(f"{OUTPUT_NSR}{corrections}: {unit}", noise)
        return noise

    def _measure_noise(self, plan: ResolvedPlan) -> float:
        data = self.job.calibration
        inputs = self.job.measurement.inputs if data is None else data.batches.first_inputs
        if self._reference is None:
            self._reference = self.model.run_float_outputs(inputs)
        outputs = self._outputs_or_none(plan, inputs)
        return MAX_NSR if outputs is None else compute_mean_nsr(self._reference, outputs)

    def width_figures(self) -> WidthFigures | None:
        """See the base class."""
        if self.job.target is None:
            return None
        data = self.job.calibration
        inputs = self.job.measurement.inputs if data is None else data.batches.first_inputs
        stored = self._whatever_the_time(
            _WIDTHS,
            mapping_of(anything),
            lambda: self.model.measure_width_figures(inputs).to_dict(),
        )
        self.widths = WidthFigures.from_dict(stored)
        return self.widths

    def reconstructable_ops(self) -> frozenset[str]:
        """See the base class."""
        return self.model.reconstructable_layers

    def times(self) -> OpTimings:
        """See the base class."""
        if Objective.PERFORMANCE not in self.job.objectives:
            return OpTimings()
        stored = self._recall_or_measure(
            TIMES, optional(keep_original_value(OpTimings.from_dict)), self._measure_times
        )
        cached, reason = self.run_cache.get_entry(_UNTIMED, string)
        if not cached or reason is None:
            reason = self.untimed or ("" if stored else "the time limit does not suffice")
            self.run_cache.put_entry(_UNTIMED, reason)
        self.untimed = reason
        return OpTimings() if stored is None else OpTimings.from_dict(stored)

    def times_within(self, plan: PrecisionPlan) -> OpTimings | None:
        """See the base class."""
        previous, resolved = self.times(), self.job.space.resolve(without_reconstruction(plan))
        if not previous.ops:
            return None
        kind, untimed = optional(keep_original_value(OpTimings.from_dict)), self.untimed

        def measure_times() -> dict[str, Any] | None:
            timings = self._time_ops(lambda: {resolved: self.model.convert_by_plan(resolved)}, True)
            return None if timings is None else update_times(previous, timings).to_dict()

        timings = self._recall_or_measure(
            f"times within {_digest_plans([resolved])}", kind, measure_times
        )
        self.untimed = untimed  # `untimed` refers to `times()`
        return None if timings is None else OpTimings.from_dict(timings)

    def _measure_times(self) -> dict[str, Any] | None:
        times = self._time_ops(self._make_lowered_models)
        return None if times is None else times.to_dict()

    def _make_lowered_models(self) -> dict[ResolvedPlan, AnyModel]:
        """Return, for every precision, the model with as many ops in it as possible."""
        models: dict[ResolvedPlan, AnyModel] = {}
        started = time.process_time()
        for precision in self.job.space.usable_precisions:
            if precision is not Precision.FP32:
                if not self._has_time(started):
                    self.untimed = f"the time limit does not suffice from {precision} on"
                    break
                plan = plan_in_precision(precision, self.job.space)
                models[plan] = self._convert_plan(plan)
        self._latest = list(models.values())
        return models

    def _time_ops(
        self, lowered: Callable[[], Mapping[ResolvedPlan, AnyModel]], in_place: bool = False
    ) -> OpTimings | None:
        """Return the times of ops in FP32 and in some models; None if they cannot be timed."""
        space, measurement, effort = self.job.space, self.job.measurement, self.effort
        with measurement.limit_threads([self.model]):
            self.model.prepare()
            run = TimedRun.run_timed(self.model, measurement.inputs)
        needed = effort.profiled_runs * run.cpu_seconds
        if needed > self.allowance:
            limit, self.gauge = self.allowance, run
            self.untimed = f"timing needs {needed:.2g} CPU seconds, the limit is {limit:.2g}"
            return None
        passes = effort.passes if needed * 2 * effort.passes <= self.allowance else 1
        try:
            fp32 = plan_in_precision(Precision.FP32, space)
            reference, *candidates = self._profile_models(
                lambda: {fp32: self.model, **lowered()}, passes
            )
        except Exception as error:
            # Frameworks raise arbitrary errors; times are then estimated.
            logger.debug("Timing ops failed", exc_info=True)
            self.untimed = one_line(error)
            return None
        per_element = seconds_per_element() * measurement.batch_size
        elements = self.model.observations.elements
        times = combine_op_timings(space, reference, candidates, per_element, elements, in_place)
        return times if in_place else self._with_conversion_times(times, passes)

    def _with_conversion_times(self, times: OpTimings, passes: int) -> OpTimings:
        """Return times with those of single conversions, if these decide on the fastest plan."""
        plan = weights_in_int8(self.job.space) if loses_in_int8(times) else None
        if plan is None or not plan.has_low_precision:
            return times
        try:
            (mixed,) = self._profile_models(lambda: {plan: self._convert_plan(plan)}, passes)
        except Exception:
            # Frameworks raise arbitrary errors; conversions are then estimated.
            logger.debug("Timing conversions failed", exc_info=True)
            return times
        return with_conversions(self.job.space, times, mixed, self.model.observations.elements)

    def _profile_models(
        self, models: Callable[[], Mapping[ResolvedPlan, AnyModel]], passes: int
    ) -> list[Timed]:
        """Return models, made for the threads of the measurement, with the times of their ops."""
        measurement, effort, by_plan = self.job.measurement, self.effort, models()
        started = time.process_time()

        def affords_another() -> bool:
            spent = self.spent[TIMES] + 2 * (time.process_time() - started)
            return spent < self.allowance and time.monotonic() < self.end_time

        def profile_model(model: AnyModel) -> OpRuns:
            runs = model.profile_ops(measurement.inputs, effort.profile)
            if model is self.model:
                self.fp32_profile = {op: Duration.from_runs(r).seconds for op, r in runs.items()}
            return runs

        with self.model.adaptor.threads(measurement.threads):
            return time_ops(
                by_plan,
                profile_model,
                lambda converted: measurement.time_fastest_of(converted, effort.whole_runs),
                passes,
                affords_another,
            )

    def latencies(self, plans: Sequence[PrecisionPlan]) -> list[float] | None:
        """See the base class."""
        resolved = [self.job.space.resolve(without_reconstruction(plan)) for plan in plans]
        key = f"latencies {_digest_plans(resolved)}"
        kind = optional(list_of(optional(number)))
        seconds = self._recall_or_measure(
            key, kind, lambda: self._measure_latencies(resolved), len(resolved)
        )
        return None if seconds is None else [float("inf") if s is None else s for s in seconds]

    def first_latencies(self, plans: Sequence[PrecisionPlan]) -> list[float]:
        """See the base class."""
        seconds = self.latencies(plans)
        if seconds is not None:
            return seconds
        resolved = [self.job.space.resolve(without_reconstruction(plan)) for plan in plans]
        measurement, rounds = self.job.measurement, self.effort.whole_runs
        rough = self._whatever_the_time(
            f"first latencies {_digest_plans(resolved)}",
            list_of(optional(number)),
            lambda: self._in_turn(
                [self._converted_or_none(plan) for plan in resolved],
                lambda sound: measurement.time_fastest_of(sound, rounds),
            ),
        )
        return [float("inf") if s is None else s for s in rough]

    def _measure_latencies(self, plans: Sequence[ResolvedPlan]) -> list[float | None] | None:
        started, models = time.process_time(), list[AnyModel | None]()
        for plan in plans:
            if not self._has_time(started):
                self._latest = [model for model in models if model is not None]
                return None
            models.append(self._converted_or_none(plan))

        return self._in_turn(
            models,
            lambda sound: self.job.measurement.side_by_side(
                sound, self._choose_affordable_multiple(sound, started)
            ),
        )

    def _in_turn(
        self,
        models: Sequence[AnyModel | None],
        measure: Callable[[Sequence[AnyModel]], list[float]],
    ) -> list[float | None]:
        """Return the seconds of models, None for None; the models stay for further use."""
        self._latest = [model for model in models if model is not None]
        seconds = iter(measure(self._latest) if self._latest else ())
        return [None if model is None else next(seconds) for model in models]

    def _choose_affordable_multiple(self, models: Sequence[AnyModel], started: float) -> int:
        """Return the multiple of the usual rounds for which half of the time left suffices.

        The other half is for the plans that the strategy measures next.
        """
        now, measurement = time.process_time(), self.job.measurement
        for model in models:
            model(measurement.inputs)
        rounds = measurement.iterations * (time.process_time() - now)
        remaining = self.allowance - self.spent[TIMES] - (now - started)
        remaining = min(remaining, self.end_time - time.monotonic())
        return max(1, min(self.effort.longer, int(remaining / 2 / rounds))) if rounds else 1

    def weight_sensitivity(self) -> Mapping[str, float]:
        """See the base class."""
        data = self.job.calibration
        batches = [] if data is None else [data.batches.first_inputs]
        return self._whatever_the_time(
            "weight sensitivity",
            mapping_of(number),
            lambda: self.model.measure_weight_sensitivity(batches),
        )

    def weight_noise(self) -> Mapping[str, Mapping[str, float]]:
        """See the base class."""
        data = self.job.calibration
        noise = self._whatever_the_time(
            "divergence of weights",
            mapping_of(mapping_of(number)),
            lambda: self.model.measure_weight_noise([] if data is None else data.iterate_inputs()),
        )
        has_gradients = self.model.adaptor.gradients is not None
        return noise if has_gradients else propagate_to_outputs(noise, self.output_noise)

    def form_times(self, workload: Workload) -> Mapping[str, FormTimes]:
        """See the base class."""
        rows, threads = " and ".join(map(str, workload.row_counts)), self.job.measurement.threads
        with self.model.adaptor.threads(threads):
            times = self._whatever_the_time(
                f"times of forms for {rows} rows",
                mapping_of(mapping_of(mapping_of(positive_float))),
                lambda: time_layer_forms(self.model, workload),
            )
        return {
            op: {
                form: {int(rows): s for rows, s in seconds.items()} for form, seconds in by.items()
            }
            for op, by in times.items()
        }

    def _whatever_the_time(self, key: str, kind: Validator[T], measure: Callable[[], T]) -> T:
        """Return a stored measurement, or make and store one that strategies cannot go without."""
        cached, value = self._recall_value(key, kind)
        if not cached or value is None:
            with self._count_time():
                value = measure()
            self._shared_cache.put_entry(key, value)
            self.run_cache.put_entry(key, value)
        return value

    def _outputs_or_none(self, plan: ResolvedPlan, inputs: object) -> list[np.ndarray] | None:
        """Return the outputs of a plan's model; None if the model does not run."""
        try:
            return self._convert_plan(plan).run_float_outputs(inputs)
        except Exception:
            # Frameworks raise arbitrary errors.
            logger.debug("Measuring a plan failed", exc_info=True)
            return None

    def _converted_or_none(self, plan: ResolvedPlan) -> AnyModel | None:
        """Return a model that runs, or None: the plan's trial will report the reason."""
        try:
            model = self._convert_plan(plan)
            model(self.job.measurement.inputs)
        except Exception:
            # Frameworks raise arbitrary errors.
            logger.debug("Measuring a plan failed", exc_info=True)
            return None
        return model

    def _convert_plan(self, plan: ResolvedPlan) -> AnyModel:
        if self.converted is None:
            return self.model.convert_by_plan(plan)
        if plan not in self.converted:
            self.converted[plan] = self.model.convert_by_plan(plan)
        return self.converted[plan]

    def _recall_or_measure(
        self,
        key: str,
        kind: Validator[T],
        measure: Callable[[], Any],
        plans: int = 1,
        of: str = TIMES,
    ) -> T | None:
        """Return a cached value, or measure it if there is time for `plans` plans."""
        cached, recalled = self._recall_value(key, kind)
        if cached:
            return recalled
        spent = self.spent[of]
        with self._count_time(of):
            value = measure() if self._has_time(time.process_time(), plans, of) else None
        # Op timings run several models several times: no estimate for one plan.
        if key != TIMES:
            self._longest = max(self._longest, (self.spent[of] - spent) / plans)
        if value is not None and not self.untimed:
            self._shared_cache.put_entry(key, value)
        self.run_cache.put_entry(key, value)
        return kind(value)

    def _recall_value(self, key: str, kind: Validator[T]) -> tuple[bool, T | None]:
        """Return whether this run or an earlier one has a cached result, and the result."""
        looked, value = self.run_cache.get_entry(key, kind)
        if not looked:
            looked, value = self._shared_cache.get_entry(key, kind)
            if looked:
                self.has_cache_hits = True
                self.run_cache.put_entry(key, value)
        return looked, value

    @cached_property
    def _shared_cache(self) -> MeasurementCache:
        """The cache of earlier runs for the same batches."""
        return self.cache.scope_to(data=lambda: self._measured_on)

    @cached_property
    def _measured_on(self) -> str | None:
        """Digest of the batches used in measurements."""
        data = self.job.calibration
        first = None if data is None else data.batches.first_inputs
        return compute_data_digest([self.job.measurement.inputs, [] if first is None else first])

    @contextmanager
    def _count_time(self, of: str = TIMES) -> Iterator[None]:
        started, clock = time.process_time(), time.perf_counter()
        yield
        self.spent[of] += time.process_time() - started
        self.seconds += time.perf_counter() - clock

    def _has_time(self, started: float, plans: int = 1, of: str = TIMES) -> bool:
        """Whether the allowance suffices for `plans` more plans, given the time since `started`."""
        if time.monotonic() >= self.end_time:
            return False
        passed = self.spent[of] + time.process_time() - started
        if of == _NOISE:  # the first includes the FP32 outputs: it says little of the next
            return passed < self.allowance
        return passed + plans * self._longest < self.allowance


def _digest_plans(plans: Sequence[ResolvedPlan]) -> str:
    text = json.dumps([plan.plan.to_dict() for plan in plans], sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def propagate_to_outputs(
    noise: Mapping[str, Mapping[str, float]], measure: Callable[[PrecisionPlan], float | None]
) -> dict[str, dict[str, float]]:
    """Return the noise of weights at the results of their layers as noise at the outputs.

    To first order, the noise of all forms of a layer reaches the outputs with the same factor, so
    one measurement per layer suffices: that of its noisiest form. Layers that `measure` returns no
    noise for get the median factor.
    """
    factors = {}
    for op, scores in noise.items():
        text, most = max(scores.items(), key=lambda item: item[1])
        measured = measure(PrecisionPlan({op: make_weight_only(QuantSpec.parse(text))}))
        if measured is not None and most > 0:
            factors[op] = measured / most
    middle = median(factors.values()) if factors else 1.0
    return {
        op: {text: score * factors.get(op, middle) for text, score in scores.items()}
        for op, scores in noise.items()
    }
