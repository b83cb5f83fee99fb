"""What can be measured of plans beyond calibration, and without the evaluation data."""

from __future__ import annotations

import hashlib
import json
import logging
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, TypeVar

import numpy as np

from neural_mp.adaptors.loaded_model import AnyModel, AnyTunableModel
from neural_mp.core.enums import Objective
from neural_mp.core.observations import Observations, OpTimings
from neural_mp.core.plan import PrecisionPlan
from neural_mp.core.precision import FP32, Precision
from neural_mp.errors import one_line
from neural_mp.io.measurement_cache import NO_CACHE, MeasurementCache
from neural_mp.profiling import interleaved_medians
from neural_mp.runs.record import OUTPUT_NSR, TIMES, repairs_in
from neural_mp.space import ResolvedPlan
from neural_mp.strategies.base import Probe
from neural_mp.tuning.job import TuningJob
from neural_mp.tuning.op_timing import timed, times_of, updated
from neural_mp.tuning.sqnr import MAX_NSR, relative_noise
from neural_mp.util.digest import digest_of
from neural_mp.util.validators import (
    Validator,
    checked,
    list_of,
    mapping_of,
    number,
    optional,
    string,
)

logger = logging.getLogger(__name__)
T = TypeVar("T")

#: CPU seconds of each thread that may be spent on measuring where an evaluation takes less.
LEAST_ALLOWANCE = 4.0
#: Key of the run's history under which it is kept why single ops were not timed.
_UNTIMED = "why ops were not timed"
#: Enough not to fit into the caches of a core.
_MANY_VALUES = 1 << 21
#: Timing ops runs a batch so many times; where this does not fit, they are not timed.
_PROFILED_RUNS = 24
#: How often models are profiled in turn where there is time, and run as wholes.
_PASSES, _WHOLE_RUNS = 2, 3
#: How many times as long as usual plans are measured side by side where there is time.
_LONGER = 4


@dataclass
class MeasuringProbe(Probe):
    """Measures with the job's model: noise on calibration data, times on the batch for latency.

    What was measured, and what was not for want of time, is kept in the run's history, so that a
    run taken up again finds the same. A measurement that would not end in time, by what the
    longest so far took, is not begun. Time is the CPU time of this process, over all threads: what
    else runs on the machine must not decide what is measured.

    Attributes:
        job: the run.
        model: the FP32 model, calibrated.
        run_cache: what this run measured.
        cache: what earlier runs measured under the same conditions.
        allowance: CPU seconds that may be spent.
        spent: CPU seconds spent so far.
        seconds: the same by the clock on the wall.
        untimed: why single ops were not timed, or not in every precision; empty where they were,
            or nobody asked for it.
        reused: whether anything was not measured, since an earlier run had.
    """

    job: TuningJob
    model: AnyTunableModel
    run_cache: MeasurementCache
    allowance: float
    spent: float = 0.0
    seconds: float = 0.0
    untimed: str = ""
    reused: bool = False
    cache: MeasurementCache = NO_CACHE
    _longest: float = 0.0
    _reference: list[Any] | None = field(default=None, repr=False)

    def output_noise(self, plan: PrecisionPlan, alone: str | None = None) -> float | None:
        """See the contract."""
        resolved = self.job.space.resolve(plan)
        key = f"noise {_digest([resolved])}"
        found = self._kept(key, optional(number), lambda: self._noise(resolved))
        if alone is not None and found is not None:
            self.run_cache.put(f"{OUTPUT_NSR}{repairs_in(resolved.plan)}: {alone}", found)
        return found

    def _noise(self, plan: ResolvedPlan) -> float:
        data = self.job.calibration
        inputs = self.job.measurement.inputs if data is None else data.batches.first_inputs
        if self._reference is None:
            self._reference = self.model.float_outputs(inputs)
        model = self._converted_or_none(plan)
        if model is None:
            return MAX_NSR
        return relative_noise(self._reference, model.float_outputs(inputs))

    def times(self) -> OpTimings:
        """See the contract."""
        if Objective.PERFORMANCE not in self.job.objectives:
            return OpTimings()
        stored = self._kept(TIMES, optional(checked(OpTimings.from_dict)), self._times)
        known, words = self.run_cache.get(_UNTIMED, string)
        if not known or words is None:
            words = self.untimed or ("" if stored else "no time is left for it")
            self.run_cache.put(_UNTIMED, words)
        self.untimed = words
        return OpTimings() if stored is None else OpTimings.from_dict(stored)

    def times_within(self, plan: PrecisionPlan) -> OpTimings | None:
        """See the contract."""
        before, resolved = self.times(), self.job.space.resolve(plan)
        if not before.ops:
            return None
        kind, untimed = optional(checked(OpTimings.from_dict)), self.untimed

        def measure() -> dict[str, Any] | None:
            found = self._timed_in(lambda: {resolved: self.model.converted(resolved)}, True)
            return None if found is None else updated(before, found).to_dict()

        found = self._kept(f"times within {_digest([resolved])}", kind, measure)
        self.untimed = untimed  # that is said of the times at first
        return None if found is None else OpTimings.from_dict(found)

    def _times(self) -> dict[str, Any] | None:
        found = self._timed_in(self._lowered_models)
        return None if found is None else found.to_dict()

    def _lowered_models(self) -> dict[ResolvedPlan, AnyModel]:
        """For every precision, the model that has as much in it as can be."""
        found: dict[ResolvedPlan, AnyModel] = {}
        started = time.process_time()
        for precision in self.job.space.usable_precisions:
            if precision is not Precision.FP32:
                if not self._has_time(started):
                    self.untimed = f"no time is left for {precision} and what comes after it"
                    break
                plan = self._all_in(precision)
                found[plan] = self.model.converted(plan)
        return found

    def _timed_in(
        self, lowered: Callable[[], Mapping[ResolvedPlan, AnyModel]], in_place: bool = False
    ) -> OpTimings | None:
        """Return the times of ops in FP32 and in some models; None where they cannot be timed."""
        job, inputs = self.job, self.job.measurement.inputs
        started = time.process_time()
        self.model(inputs)
        needed = _PROFILED_RUNS * (time.process_time() - started)
        if needed > self.allowance:
            self.untimed = (
                f"it takes {needed:.2g} CPU seconds, and {self.allowance:.2g} may be spent"
            )
            return None
        passes = _PASSES if needed * 2 * _PASSES <= self.allowance else 1
        try:
            with self.model.adaptor.threads(job.measurement.threads):
                models: dict[ResolvedPlan, AnyModel] = {self._all_in(Precision.FP32): self.model}
                models.update(lowered())
                before, *after = timed(
                    models,
                    lambda model: model.profile(inputs),
                    lambda found: job.measurement.briefly(found, _WHOLE_RUNS),
                    passes,
                )
        except Exception as error:
            # Whatever a framework raises: times are then estimated.
            logger.debug("ops could not be timed", exc_info=True)
            self.untimed = one_line(error)
            return None
        value = _seconds_a_value() * job.measurement.batch_size
        return times_of(job.space, before, after, value, in_place)

    def _all_in(self, precision: Precision) -> ResolvedPlan:
        """Every op in a precision that can run in it, the rest in FP32."""
        space = self.job.space
        chosen = {op: space.choice(op, precision) or FP32 for op in space.tunable_ops}
        return space.resolve(PrecisionPlan(chosen))

    def latencies(self, plans: Sequence[PrecisionPlan]) -> list[float] | None:
        """See the contract."""
        resolved = [self.job.space.resolve(plan) for plan in plans]
        key = f"latencies {_digest(resolved)}"
        kind = optional(list_of(optional(number)))
        found = self._kept(key, kind, lambda: self._latencies(resolved), len(resolved))
        return None if found is None else [float("inf") if s is None else s for s in found]

    def _latencies(self, plans: Sequence[ResolvedPlan]) -> list[float | None] | None:
        started, models = time.process_time(), []
        for plan in plans:
            if not self._has_time(started):
                return None
            models.append(self._converted_or_none(plan))
        sound = [model for model in models if model is not None]
        longer = _LONGER if self._has_time(started, _LONGER * len(plans)) else 1
        seconds = iter(self.job.measurement.side_by_side(sound, longer) if sound else [])
        return [None if model is None else next(seconds) for model in models]

    def weight_sensitivity(self) -> Mapping[str, float]:
        """See the contract."""
        data = self.job.calibration
        batches = [] if data is None else [data.batches.first_inputs]
        key = "weight sensitivity"
        known, found = self._recalled(key, mapping_of(number))
        if not known or found is None:
            with self._counted():
                found = self.model.weight_sensitivity(batches)
            self._shared.put(key, found)
            self.run_cache.put(key, found)
        return dict(found)

    def _converted_or_none(self, plan: ResolvedPlan) -> AnyModel | None:
        """A model that runs; None where there is none: the plan's trial will say why."""
        try:
            model = self.model.converted(plan)
            model(self.job.measurement.inputs)
        except Exception:
            # Whatever a framework raises.
            logger.debug("a plan failed as it was measured", exc_info=True)
            return None
        return model

    def _kept(
        self, key: str, kind: Validator[T], measure: Callable[[], Any], plans: int = 1
    ) -> T | None:
        """What is known from before, or is measured now if there is time for so many plans."""
        known, recalled = self._recalled(key, kind)
        if known:
            return recalled
        before = self.spent
        with self._counted():
            value = measure() if self._has_time(time.process_time(), plans) else None
        # Single ops are timed in several runs of several models, which says nothing of a plan's.
        if key != TIMES:
            self._longest = max(self._longest, (self.spent - before) / plans)
        if value is not None and not self.untimed:
            self._shared.put(key, value)
        self.run_cache.put(key, value)
        return kind(value)

    def _recalled(self, key: str, kind: Validator[T]) -> tuple[bool, T | None]:
        """Whether this run or an earlier one has looked at something, and what it found."""
        looked, value = self.run_cache.get(key, kind)
        if not looked:
            looked, value = self._shared.get(key, kind)
            if looked:
                self.reused = True
                self.run_cache.put(key, value)
        return looked, value

    @cached_property
    def _shared(self) -> MeasurementCache:
        """What earlier runs measured on the same batches."""
        return self.cache.scoped(data=lambda: self._measured_on)

    @cached_property
    def _measured_on(self) -> str | None:
        """A digest of the batches that are measured on."""
        data = self.job.calibration
        first = None if data is None else data.batches.first_inputs
        return digest_of([self.job.measurement.inputs, [] if first is None else first])

    @contextmanager
    def _counted(self) -> Iterator[None]:
        """Count as spent what is done within."""
        started, clock = time.process_time(), time.perf_counter()
        yield
        self.spent += time.process_time() - started
        self.seconds += time.perf_counter() - clock

    def _has_time(self, started: float, plans: int = 1) -> bool:
        """Whether so many more plans can be measured, some time after a measurement started."""
        passed = self.spent + time.process_time() - started
        return passed + plans * self._longest < self.allowance


def cache_of_probes(job: TuningJob, observations: Observations) -> MeasurementCache:
    """What earlier runs measured of the same model, calibrated to the same."""
    seen = json.dumps(observations.to_dict(), sort_keys=True)
    return job.cache.scoped(
        space=job.space.digest,
        observations=hashlib.sha256(seen.encode()).hexdigest(),
        threads=str(job.measurement.threads),
    )


def _digest(plans: Sequence[ResolvedPlan]) -> str:
    said = json.dumps([plan.plan.to_dict() for plan in plans], sort_keys=True)
    return hashlib.sha256(said.encode()).hexdigest()[:16]


def _seconds_a_value() -> float:
    """How long this machine takes to read a float32 and write a byte, of many."""
    values = np.zeros(_MANY_VALUES, np.float32)

    def run() -> None:
        values.astype(np.uint8)

    return interleaved_medians([run], iterations=7)[0] / _MANY_VALUES
