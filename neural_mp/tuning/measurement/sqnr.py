"""SQNR of a converted model's outputs relative to FP32, for runs without a metric."""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from neural_mp.adaptors.loaded_model import AnyModel
from neural_mp.core.observations import KeptOutputs
from neural_mp.profiling import bound_ratio
from neural_mp.tuning.job import TuningJob
from neural_mp.tuning.listener import RunLog
from neural_mp.tuning.measurement.objectives import Measurement
from neural_mp.util.fingerprint import compute_data_digest
from neural_mp.util.noise import MAX_NSR, compute_output_nsrs, mean_signal_nsr, nsr_to_decibels
from neural_mp.util.pytree import list_float_arrays
from neural_mp.util.text import describe_value_shape

#: SQNR in dB below which outputs may be unusable: noise of a tenth of the amplitude.
MIN_SQNR_DB = 20.0
#: Minimum number of timed runs of FP32: memory is allocated in the first two.
_LEAST_FP32_RUNS = 3
#: A first run that takes longer than any later one by this factor warmed the model up.
_COLD = 1.2


@dataclass(frozen=True)
class Fidelity:
    """Agreement of a candidate's outputs with those of FP32.

    Attributes:
        sqnr_db: SQNR of all outputs, in dB.
        output_sqnrs_db: SQNR of each floating-point output, in dB; infinite without a signal.
    """

    sqnr_db: float
    output_sqnrs_db: tuple[float, ...] = ()


@dataclass(frozen=True)
class TimedRun:
    """A run of one batch.

    Attributes:
        outputs: the floating-point arrays among the outputs.
        seconds, cpu_seconds: wall-clock and CPU seconds.
    """

    inputs: Any = field(repr=False)
    outputs: list[np.ndarray] = field(repr=False)
    seconds: float
    cpu_seconds: float

    @classmethod
    def run_timed(cls, model: AnyModel, inputs: object) -> TimedRun:
        """Run a model on a batch."""
        clock, started = time.process_time(), time.perf_counter()
        outputs = model(inputs)
        seconds, cpu_seconds = time.perf_counter() - started, time.process_time() - clock
        return cls(inputs, list_float_arrays(outputs), seconds, cpu_seconds)

    def is_on(self, inputs: object) -> bool:
        """Whether the run was on these inputs, or on equal ones."""
        if inputs is self.inputs:
            return True
        digest = compute_data_digest(self.inputs)
        return digest is not None and digest == compute_data_digest(inputs)


@dataclass
class OutputNoise:
    """Noise of a candidate's outputs, with the durations of both models' runs.

    FP32 runs on every batch, but on those of known outputs only until the candidate is far faster.

    Attributes:
        reference: the FP32 model.
        candidate: the compared model.
        measurement: the measurement whose batches are timed; None for no times.
        earlier: the last run of any model, if of the FP32 model: the first batch is not run again.
        kept: outputs of the FP32 model, from calibration.
        seconds: seconds of both models for every batch with the layout of the measured one, without
            a cold start; of more runs of the candidate than of FP32 if these make the verdict
            clear (`Measurement.is_clear`).
    """

    reference: AnyModel
    candidate: AnyModel
    measurement: Measurement | None = None
    earlier: TimedRun | None = None
    kept: KeptOutputs = field(default_factory=KeptOutputs)
    seconds: tuple[list[float], list[float]] = field(default_factory=lambda: ([], []))
    _alone: list[float] = field(default_factory=list)
    _nsrs: list[list[float]] = field(default_factory=list)
    _first: Any = None

    def measure_fidelity(self, batches: Iterable[Any]) -> Fidelity | None:
        """Return the SQNRs of the candidate's outputs over all batches.

        Infinite without differences; None if the outputs hold no floating-point numbers.
        """
        for inputs in batches:
            expected, actual = self._run_output_pair(inputs)
            if not expected:
                return None
            if any(array.size for array in expected):  # an empty batch has neither noise nor signal
                self._nsrs.append(compute_output_nsrs(expected, actual))
        if not self._nsrs:
            return None
        if self._alone and len(self.seconds[0]) < _LEAST_FP32_RUNS:
            self._run_round(self._first)
        self._time_cold_again()
        if self.measurement is not None:
            self._count_isolated_runs(self.measurement)
        return _average_batch_fidelity(self._nsrs)

    def _run_output_pair(self, inputs: object) -> tuple[list[np.ndarray], list[np.ndarray]]:
        """Return the outputs of both models; FP32 runs if these or its time are not known."""
        is_timed = self._is_timed(inputs)
        cached = None if is_timed and not self._is_far_faster() else self.kept.get_outputs(inputs)
        if cached is None:
            expected, actual = self._run_round(inputs)
            return expected.outputs, actual.outputs
        actual = TimedRun.run_timed(self.candidate, inputs)
        if is_timed:
            self._alone.append(actual.seconds)
        return cached, actual.outputs

    def _is_timed(self, inputs: object) -> bool:
        measurement = self.measurement
        return measurement is not None and describe_value_shape(inputs) == describe_value_shape(
            measurement.inputs
        )

    def _is_far_faster(self) -> bool:
        """Whether the fastest of several runs are far apart: the first ones may be cold."""
        baseline, candidate = self.seconds
        if self.measurement is None or len(baseline) < _LEAST_FP32_RUNS - 1:
            return False
        return self.measurement.is_far_faster([min(baseline)], [min(candidate + self._alone)])

    def _run_round(self, inputs: object) -> tuple[TimedRun, TimedRun]:
        """Run both models, which begin in turn."""
        earlier, self.earlier = self.earlier, None
        if earlier is not None and earlier.is_on(inputs):
            expected, actual = earlier, TimedRun.run_timed(self.candidate, inputs)
        elif len(self._nsrs) % 2 == 0:
            expected = TimedRun.run_timed(self.reference, inputs)
            actual = TimedRun.run_timed(self.candidate, inputs)
        else:
            actual = TimedRun.run_timed(self.candidate, inputs)
            expected = TimedRun.run_timed(self.reference, inputs)
        if self._is_timed(inputs):
            if not self.seconds[0]:
                self._first = inputs
            for seconds, run in zip(self.seconds, (expected, actual), strict=True):
                seconds.append(run.seconds)
        return expected, actual

    def _time_cold_again(self) -> None:
        """Time the first batch again for a model that was cold, as if not run before."""
        baseline, candidate = self.seconds
        for model, seconds, more in (
            (self.reference, baseline, []),
            (self.candidate, candidate, self._alone),
        ):
            if seconds and seconds[0] > _COLD * max([*seconds[1:], *more], default=0.0):
                seconds[0] = TimedRun.run_timed(model, self._first).seconds

    def _count_isolated_runs(self, measurement: Measurement) -> None:
        """Count the runs of the candidate without FP32 if further ones make the verdict clear.

        They take less time than further rounds. In doubt, only rounds count.
        """
        baseline, candidate = self.seconds
        isolated, self._alone = self._alone, []
        while isolated and measurement.is_far_faster(baseline, candidate + isolated):
            if measurement.is_clear([baseline, candidate + isolated]):
                candidate += isolated
                return
            if bound_ratio(len(baseline), len(candidate + isolated)):
                return  # short runs: rounds cost nothing
            isolated.append(TimedRun.run_timed(self.candidate, self._first).seconds)


def _average_batch_fidelity(nsrs: list[list[float]]) -> Fidelity:
    mean = nsr_to_decibels(float(np.mean([mean_signal_nsr(batch) for batch in nsrs])))
    if len({len(batch) for batch in nsrs}) > 1:
        return Fidelity(mean)
    outputs = zip(*nsrs, strict=True)
    return Fidelity(mean, tuple(nsr_to_decibels(mean_signal_nsr(output)) for output in outputs))


def output_sqnr_db(
    reference: AnyModel, candidate: AnyModel, batches: Iterable[Any]
) -> float | None:
    """Return the SQNR of a candidate's outputs; see `OutputNoise.measure_fidelity`."""
    fidelity = OutputNoise(reference, candidate).measure_fidelity(batches)
    return None if fidelity is None else fidelity.sqnr_db


def compared_with_fp32(
    job: TuningJob,
    converted: AnyModel,
    log: RunLog,
    cached: KeptOutputs,
    earlier: TimedRun | None = None,
) -> tuple[Fidelity | None, Sequence[Sequence[float]]]:
    """Return the SQNRs of the outputs relative to FP32 on calibration samples.

    Also the seconds of both models for batches with the layout of the measured one, if single calls
    are measured. `cached` are the outputs of calibration, `earlier` the last run before, if one of
    the FP32 model.
    """
    if job.calibration is None:
        return None, ()
    models, measurement = (job.model, converted), job.measurement
    timed = measurement if measurement.streams is None and measurement.workload is None else None
    noise = OutputNoise(*models, timed, earlier, cached)
    with log.time_phase("compare", "Comparing with FP32"), measurement.limit_threads(models):
        for model in models:
            model.prepare()
        fidelity = noise.measure_fidelity(
            job.model.drop_damaged_samples(job.calibration.iterate_inputs(log.report_step))
        )
    return fidelity, noise.seconds if noise.seconds[0] else ()


def warn_of_noise(fidelity: Fidelity, log: RunLog) -> None:
    """Warn about an SQNR so low that the outputs, or one of them, may be unusable."""
    levels = fidelity.output_sqnrs_db
    lowest = min(levels, default=fidelity.sqnr_db)
    remedy = "set a metric and evaluation data to limit the loss of accuracy"
    if lowest <= nsr_to_decibels(MAX_NSR):
        which = f"output {levels.index(lowest) + 1} of {len(levels)}" if levels else "an output"
        log.add_warning(
            f"{which} has another shape than in FP32, or NaN or Inf elsewhere, on calibration "
            f"samples; {remedy}"
        )
        return
    if fidelity.sqnr_db < MIN_SQNR_DB:
        subject = f"the outputs differ from those of FP32: their SQNR is {fidelity.sqnr_db:.1f} dB"
    elif lowest < MIN_SQNR_DB:
        subject = (
            f"output {levels.index(lowest) + 1} of {len(levels)} floating-point outputs differs "
            f"from that of FP32: its SQNR is {lowest:.1f} dB"
        )
    else:
        return
    log.add_warning(f"{subject} on calibration samples, below {MIN_SQNR_DB:g} dB; {remedy}")
