"""Objectives of plans that meet the target: latency, memory footprint, model size."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from typing import Any

from neural_mp.adaptors.loaded_model import AnyModel, AnyTunableModel
from neural_mp.core.criterion import MIN_SPEEDUP, NORMAL_LIMITS, EffortLimits
from neural_mp.core.enums import Objective, is_latency_only
from neural_mp.core.hardware import detect
from neural_mp.core.op_timings import Workload
from neural_mp.core.plan import PrecisionPlan
from neural_mp.core.trial import RELATIVE_FIGURES, Outcome, Trial, compute_relative_cost
from neural_mp.errors import ConfigurationError
from neural_mp.profiling import (
    CALLS_PER_CALLER,
    bound_ratio,
    estimate_latency_ratio,
    estimate_uncontended_latency,
    make_concurrent_runs,
    measure_cpu_share,
    read_other_cpu_seconds,
    time_interleaved_rounds,
)
from neural_mp.space import ResolvedPlan, peak_activation_bytes
from neural_mp.util.pytree import batch_size_of, build_output_structure, tree_leaves, tree_unflatten
from neural_mp.util.system.environment import read_omp_threads

#: Figures within this ratio are ties: latencies are noisy.
_TIE_RATIO = 1.005
#: Latencies within this ratio need not be told apart.
_AS_FAST_RATIO = 1.01
#: Minimum duration of an interleaved measurement: short runs need more rounds.
_LEAST_SECONDS = 0.2
#: Shorter runs are timed in blocks, to reduce the effect of the previous run.
_BLOCK_SECONDS = 0.002
#: With fewer rounds, a decision must be unanimous.
_FEW_ROUNDS = 20
#: Seconds of runs from which a ratio beyond the required one by this factor is clear.
_CLEAR_SECONDS, _CLEAR_RATIO = 0.5, 1.5
#: Models slower than the fastest by this factor in every run take no further part.
_LOSING_RATIO = 1.3
#: Patience of a measurement of threads that wait for other processes: more rounds hardly help.
_BUSY_PATIENCE = 2.0
#: Confidence intervals narrower than this fraction need no more rounds.
_RESOLUTION = 0.005
#: Minimum number of rounds in which several callers run at a time.
_LEAST_BURSTS = 10
#: Fraction of a CPU below which other processes slow the runs, and the seconds that one holds.
_LEAST_SHARE, _SHARE_HOLDS_SECONDS = 0.9, 5.0
#: Minimum seconds of a measurement in which the CPU time of others is counted; the system counts
#: it in hundredths of a second.
_LEAST_WATCH_SECONDS = 0.2
#: Seconds of the rounds in which CPU seconds are counted.
_CPU_SECONDS = 0.1


@dataclass
class Contention:
    """Other processes on the CPUs, looked for every few seconds.

    Attributes:
        was_seen: whether a measurement of one thread was affected.
        delays_threads: whether several threads had to wait for their CPUs in a measurement.
    """

    was_seen: bool = False
    delays_threads: bool = False
    _is_present: bool = False
    _until: float = 0.0

    def is_present(self) -> bool:
        """Whether this thread gets clearly less than a whole CPU."""
        if time.monotonic() > self._until:
            self._is_present = measure_cpu_share() < _LEAST_SHARE
            self._until = time.monotonic() + _SHARE_HOLDS_SECONDS
        self.was_seen = self.was_seen or self._is_present
        return self._is_present

    @contextmanager
    def watch_threads(self, threads: int) -> Iterator[None]:
        """Notice if others leave fewer CPUs than these threads during a measurement."""
        begun, others = time.perf_counter(), read_other_cpu_seconds()
        yield
        seconds = time.perf_counter() - begun
        if seconds >= _LEAST_WATCH_SECONDS:
            load = (read_other_cpu_seconds() - others) / seconds
            if detect().cores - load < _LEAST_SHARE * threads:
                self.delays_threads = True

    @property
    def contention_warnings(self) -> tuple[str, ...]:
        """Warnings if a measurement was affected."""
        warnings = []
        if self.was_seen:
            warnings.append(
                "other processes used the CPU during the run, so latencies measured meanwhile are "
                "CPU seconds of one thread, without waiting; stop these processes to measure by "
                "the clock"
            )
        if self.delays_threads:
            warnings.append(
                "other processes used the CPUs during the run, so the threads of the models waited "
                "for each other; compare the CPU times in the report, or stop these processes"
            )
        return tuple(warnings)


@dataclass(frozen=True)
class Measurement:
    """Measures a candidate against the FP32 model.

    Attributes:
        inputs: one batch.
        objectives: objective → its weight.
        warmup, iterations: uncounted and counted runs; more for very fast models.
        time_limit: seconds after which no further run starts.
        threads: threads of the framework; None for its default.
        streams: concurrent callers, which share the threads; None for one call at a time. Seconds
            per batch are then those of all calls, divided by their number.
        min_speedup: minimum speed-up over FP32 beyond noise, if latency is the only objective.
        workload: shares of decode and prefill of a decoder; seconds are then those of a mean token,
            from calls with one token and with a prompt. None for seconds of the batch.
        limits: the duration and the patience of the measurement, by the effort of the run.
        contention: other processes on the CPUs. Runs of one thread are then timed in CPU seconds;
            several threads wait for each other, and use up CPU seconds meanwhile.
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
    streams: int | None = None
    workload: Workload | None = None
    limits: EffortLimits = NORMAL_LIMITS
    contention: Contention = field(default_factory=Contention, compare=False)

    def __call__(self, baseline: AnyModel, candidate: AnyModel) -> dict[str, float]:
        """Return latency and size of a candidate; smaller is better."""
        fp32_seconds, seconds = self.measure_rounds([baseline, candidate])
        return {
            **measure_size_figures(baseline, candidate),
            **make_latency_figures(fp32_seconds, seconds),
        }

    @property
    def cache_conditions(self) -> dict[str, str]:
        """The conditions that times depend on, for caches.

        Times by the clock and in CPU seconds are not distinguished: on one thread they are equal,
        but for the wait for a CPU, which is noise.
        """
        streams = {} if self.streams is None else {"streams": str(self.streams)}
        workload = {} if self.workload is None else {"workload": str(self.workload)}
        return {"threads": str(self.threads), **streams, **workload}

    @property
    def uses_cpu_seconds(self) -> bool:
        """Whether runs are timed in CPU seconds now: on one thread, beside other processes."""
        is_single = self.num_threads == 1 and self.streams is None
        return is_single and self.contention.is_present()

    @property
    def num_threads(self) -> int:
        """The number of threads of a model, or of all concurrent callers together."""
        return self.threads or read_omp_threads() or detect().cores

    @property
    def batch_size(self) -> int:
        """Number of samples in the measured batch."""
        return batch_size_of(self.inputs)

    def side_by_side(self, models: Sequence[AnyModel], longer: int = 1) -> list[float]:
        """Return seconds per batch of warm models of one framework, by interleaved rounds.

        Rounds are added, up to `longer` times the usual ones, until the fastest model is certain.
        """
        decides = _is_fastest_certain if self.workload is None else None
        rounds = self._time_models(models, longer, decides, is_warm=True, drops=True, extends=True)
        return [estimate_uncontended_latency(seconds) for seconds in rounds]

    def time_fastest_of(self, models: Sequence[AnyModel], rounds: int) -> list[float]:
        """Return seconds per batch of the fastest of few interleaved rounds."""
        brief = replace(self, warmup=1, iterations=rounds)
        return [min(seconds) for seconds in brief._time_models(models)]

    def measure_rounds(
        self,
        models: Sequence[AnyModel],
        longer: int = 1,
        earlier: Sequence[Sequence[float]] = (),
        is_patient: bool = True,
    ) -> list[list[float]]:
        """Return seconds per batch of several models, FP32 first, in every interleaved round.

        If latency is the only objective, rounds are added until each model is either faster than
        the first one by `min_speedup` or not, beyond noise, or until the time limit.

        Args:
            models: the models.
            longer: multiple of the usual duration.
            earlier: for each of two models, the seconds of rounds just measured, or of further runs
                if the verdict `is_clear`. Further rounds of slow models are made only until then.
            is_patient: whether rounds are added until the verdict is certain.
        """
        judged = is_latency_only(self.objectives) and len(models) > 1 and is_patient
        decides = self._all_decided if judged else None
        return self._time_models(models, longer, decides, earlier, drops=True)

    def measure_interleaved(
        self,
        models: Sequence[AnyModel],
        decides: Callable[[list[list[float]]], bool] | None = None,
        is_warm: bool = False,
    ) -> list[list[float]]:
        """Return seconds per batch of models of any framework in every interleaved round.

        Rounds are added until they are conclusive by `decides`, or until the time limit. Models
        that all ran just before, as `is_warm` says, are warmed up less if they are slow. A model
        that is surely slower than the fastest has fewer rounds, the first of them.
        """
        return self._time_models(models, decides=decides, is_warm=is_warm, drops=True)

    def measure_until_decided(
        self,
        models: Sequence[AnyModel],
        decides: Callable[[list[list[float]]], bool] = lambda rounds: True,
    ) -> list[list[float]]:
        """Return seconds per batch of models of any framework in every interleaved round.

        Rounds are added until the last model is either faster than each of the others by
        `min_speedup` or not, beyond noise, and the rounds are conclusive by `decides`, or until the
        time limit.
        """
        return self.measure_interleaved(
            models,
            lambda rounds: (
                all(self._is_decided(r, rounds[-1]) for r in rounds[:-1]) and decides(rounds)
            ),
        )

    def count_cpu_seconds(self, models: Sequence[AnyModel]) -> list[float]:
        """Return the CPU seconds of all threads per batch of warm models, in few rounds.

        Threads that wait for each other use the CPU, too: if other processes delay them, the models
        run on one thread.
        """
        if self.contention.delays_threads:
            return replace(
                self, threads=1, streams=None, contention=Contention()
            ).count_cpu_seconds(models)
        runs = [partial(model, self.inputs) for model in models]
        with self.limit_threads(models):
            rounds = time_interleaved_rounds(
                runs,
                in_cpu_seconds=True,
                warmup=0,
                iterations=1,
                least_seconds=_CPU_SECONDS,
                time_limit=_CPU_SECONDS,
            )
        return [min(seconds) for seconds in rounds]

    def _time_models(
        self,
        models: Sequence[AnyModel],
        longer: int = 1,
        decides: Callable[[list[list[float]]], bool] | None = None,
        earlier: Sequence[Sequence[float]] = (),
        is_warm: bool = False,
        drops: bool = False,
        extends: bool = False,
    ) -> list[list[float]]:
        """Return the seconds of models in interleaved rounds.

        With `extends`, `longer` limits the duration while the rounds are not conclusive; otherwise,
        the rounds last as long, and longer if they are not.
        """
        if self.workload is not None:
            return self._timed_per_token(models, longer, self.workload)
        runs: Sequence[Callable[[], Any]] = [partial(model, self.inputs) for model in models]
        calls = 1 if self.streams is None else self.streams * CALLS_PER_CALLER
        least = 1 if extends else longer
        duration = least * self.limits.duration
        iterations = round(self.iterations * max(least, duration))
        if calls != 1:
            iterations = max(min(iterations, _LEAST_BURSTS), iterations // calls)
        in_cpu_seconds = self.uses_cpu_seconds
        earlier = () if in_cpu_seconds else earlier
        with self.limit_threads(models), ExitStack() as callers:
            if self.num_threads > 1:
                callers.enter_context(self.contention.watch_threads(self.num_threads))
            if self.streams is not None:
                for run in runs:
                    run()
                runs = callers.enter_context(make_concurrent_runs(runs, self.streams))
            seconds = time_interleaved_rounds(
                runs,
                in_cpu_seconds=in_cpu_seconds,
                warmup=min(self.warmup, 1) if calls > 1 else self.warmup,
                is_warm=is_warm,
                iterations=iterations,
                least_seconds=_LEAST_SECONDS * duration,
                time_limit=self.time_limit * duration,
                block_seconds=_BLOCK_SECONDS,
                decides=decides,
                patience=longer if extends else self._patience,
                most_iterations=longer * iterations if extends else None,
                earlier=earlier,
                suffices=self.is_clear if earlier else None,
                loses=_loses if drops else None,
            )
        return (
            seconds
            if calls == 1
            else [[duration / calls for duration in rounds] for rounds in seconds]
        )

    @property
    def _patience(self) -> float:
        patience = self.limits.patience
        return min(patience, _BUSY_PATIENCE) if self.contention.delays_threads else patience

    def _timed_per_token(
        self, models: Sequence[AnyModel], longer: int, workload: Workload
    ) -> list[list[float]]:
        """Return the seconds per token in rounds, as many as the longer calls had."""
        seconds = {
            rows: replace(self, inputs=with_tokens(self.inputs, rows), workload=None)._time_models(
                models, longer
            )
            for rows in workload.row_counts
        }
        rounds = [
            zip(*(seconds[rows][index] for rows in workload.row_counts), strict=False)
            for index in range(len(models))
        ]
        return [
            [
                workload.seconds_per_token(dict(zip(workload.row_counts, d, strict=True)))
                for d in model_rounds
            ]
            for model_rounds in rounds
        ]

    @contextmanager
    def limit_threads(self, models: Iterable[AnyModel]) -> Iterator[None]:
        """Run these models with the number of threads of the measurement."""
        adaptors = {model.adaptor.framework: model.adaptor for model in models}
        with ExitStack() as limits:
            for adaptor in adaptors.values():
                threads = self.threads
                if self.streams is not None and not adaptor.offers("with_streams"):
                    # The runtime does not divide the threads among the streams.
                    threads = max(1, (self.threads or detect().cores) // self.streams)
                limits.enter_context(adaptor.threads(threads))
            yield

    def is_clear(self, rounds: Sequence[Sequence[float]]) -> bool:
        """Whether slow runs of two models, FP32 first, leave no doubt about `min_speedup`.

        Every run of one model is far faster than every run of the other, in as many runs as noise
        cannot explain.
        """
        baseline, candidate = rounds
        if (
            not bound_ratio(len(baseline), len(candidate))
            or sum(baseline) + sum(candidate) < _CLEAR_SECONDS
        ):
            return False
        least = 1 / self.min_speedup
        return self.is_far_faster(baseline, candidate) or min(
            candidate
        ) > _CLEAR_RATIO * least * max(baseline)

    def is_far_faster(self, baseline: Sequence[float], candidate: Sequence[float]) -> bool:
        """Whether every run of a model gains far more over every run of FP32 than required."""
        return _CLEAR_RATIO * max(candidate) < min(baseline) / self.min_speedup

    def _all_decided(self, rounds: list[list[float]]) -> bool:
        """Whether each model's relative latency is clearly on one side of the required one."""
        baseline, *candidates = rounds
        return all(self._is_decided(baseline, seconds) for seconds in candidates)

    def _is_decided(self, baseline: Sequence[float], candidate: Sequence[float]) -> bool:
        relative, least = estimate_latency_ratio(candidate, baseline), 1 / self.min_speedup
        faster = [s <= least * f for s, f in zip(candidate, baseline, strict=False)]
        if len(faster) < _FEW_ROUNDS and any(faster) and not all(faster):
            return False
        narrow = relative.high - relative.low < _RESOLUTION * relative.value
        return narrow or not relative.low <= least < relative.high


def _loses(seconds: Sequence[float], fastest: Sequence[float]) -> bool:
    """Whether slow runs of a model leave no doubt that another is faster, and by far."""
    return (
        bound_ratio(len(seconds), len(fastest))
        and sum(seconds) + sum(fastest) >= _CLEAR_SECONDS
        and min(seconds) > _LOSING_RATIO * max(fastest)
    )


def _is_fastest_certain(rounds: Sequence[Sequence[float]]) -> bool:
    """Whether each model is surely slower than the fastest, or surely as fast."""
    fastest = min(rounds, key=estimate_uncontended_latency)
    ratios = (
        estimate_latency_ratio(seconds, fastest) for seconds in rounds if seconds is not fastest
    )
    return all(ratio.low > 1 or ratio.high < _AS_FAST_RATIO for ratio in ratios)


def measure_size_figures(baseline: AnyModel, candidate: AnyModel) -> dict[str, float]:
    """Return the size of a candidate, in bytes and as a fraction of the FP32 model's."""
    size = float(candidate.size)
    return {"modelsize": size, "relative_modelsize": size / (baseline.size or 1)}


def make_latency_figures(
    baseline: Sequence[float], candidate: Sequence[float], earlier: float | None = None
) -> dict[str, float]:
    """Return the figures of a candidate timed in interleaved rounds with the FP32 model.

    The interval of the relative latency contains the value of an `earlier` measurement, if any.
    """
    relative = estimate_latency_ratio(candidate, baseline)
    if earlier is not None:
        relative = relative.widen_to(earlier)
    return {
        "performance": estimate_uncontended_latency(candidate),
        "relative_latency": relative.value,
        "relative_latency_low": relative.low,
        "relative_latency_high": relative.high,
    }


def judge_gain(
    objectives: Mapping[Objective, float],
    figures: Mapping[str, float],
    min_speedup: float = MIN_SPEEDUP,
) -> Outcome:
    """Return the outcome of a plan that meets the accuracy target, by its gain over FP32.

    If latency is the only objective, the lower bound of the speed-up must exceed 1 and reach
    `min_speedup`; the gain is uncertain if only the upper bound does. Otherwise, the weighted cost
    must be lower than FP32's; unmeasured figures are not judged.
    """
    if is_latency_only(objectives):
        value = figures.get("relative_latency", 0.0)
        low, high = (figures.get(f"relative_latency_{end}", value) for end in ("low", "high"))
        if high < 1 and high * min_speedup <= 1:
            return Outcome.MET
        return Outcome.UNCERTAIN if low < 1 and low * min_speedup <= 1 else Outcome.SLOW
    measured = all(RELATIVE_FIGURES[name] in figures for name in objectives)
    is_costly = measured and compute_relative_cost(objectives, figures) >= 1
    return Outcome.SLOW if is_costly else Outcome.MET


def find_best_trial(trials: Sequence[Trial], objectives: Mapping[Objective, float]) -> Trial | None:
    """Return the best trial that met the target; None if none did.

    Of trials with indistinguishable figures, the one with the fewest bits in its plan, then the
    earliest.
    """
    met = [trial for trial in trials if trial.met]
    if not met:
        return None
    best = min(trial.relative_cost(objectives) for trial in met)
    tied = [trial for trial in met if trial.relative_cost(objectives) <= best * _TIE_RATIO]
    return min(tied, key=lambda t: (sum(c.precision.bits for c in t.plan.values()), t.number))


@dataclass(frozen=True, eq=False)
class Footprints:
    """Computes the memory footprint of a model and its converted forms for one batch."""

    model: AnyTunableModel
    inputs: Any

    def __call__(self, candidate: AnyModel, plan: ResolvedPlan) -> int:
        """Return the bytes of a candidate's weights plus its peak activation memory."""
        return candidate.size + peak_activation_bytes(self.model.space, plan, self.element_counts)

    @cached_property
    def baseline_bytes(self) -> int:
        """Memory footprint of the FP32 model, in bytes."""
        return self(self.model, self.model.space.resolve(PrecisionPlan()))

    @cached_property
    def element_counts(self) -> Mapping[str, float]:
        """Op or graph input → number of elements for the batch."""
        return self.model.count_tensor_values(self.inputs)


def with_tokens(inputs: object, count: int) -> Any:
    """Return the inputs of a decoder for one sequence of this many tokens, repeated if needed.

    Raises:
        ConfigurationError: the inputs are not tokens.
    """
    leaves = tree_leaves(inputs)
    shapes = {tuple(getattr(leaf, "shape", ())) for leaf in leaves}
    if len(shapes) != 1 or any(len(shape) != 2 or 0 in shape for shape in shapes):
        raise ConfigurationError(
            f"workload requires a decoder whose inputs are tokens [batch, tokens], got inputs of "
            f"shapes {sorted(map(list, shapes))}; remove the workload"
        )

    structure, _ = build_output_structure(inputs)
    ((_, length),) = shapes
    order = [index % length for index in range(count)]
    return tree_unflatten(structure, [leaf[:1][:, order] for leaf in leaves])
