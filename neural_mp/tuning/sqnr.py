"""SQNR of a converted model's outputs relative to FP32, for runs without a metric."""

from __future__ import annotations

import math
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from neural_mp.adaptors.loaded_model import AnyModel
from neural_mp.tuning.job import TuningJob
from neural_mp.tuning.listener import RunLog
from neural_mp.util.pytree import float_arrays
from neural_mp.util.text import shape_words

#: NSR of non-finite outputs, since files have no infinity.
MAX_NSR = 1e9
#: SQNR in dB below which outputs may be unusable: noise of a tenth of the amplitude.
MIN_SQNR_DB = 20.0
#: A first run that takes longer than any later one by this factor warmed the model up.
_COLD = 1.2


def decibels(nsr: float) -> float:
    """Return the SQNR of an NSR in dB; infinite without noise."""
    return -10 * math.log10(nsr) if nsr > 0 else math.inf


def mean_nsr(reference: list[Any], found: list[Any]) -> float:
    """Return the NSR, at most 1e9, which also stands for NaN.

    Mean over the outputs, so that outputs with large values do not dominate.
    """
    nsrs = []
    for expected, got in zip(reference, found, strict=True):
        power = float(np.mean(np.square(expected, dtype=np.float64)))
        error = np.mean(np.square(np.subtract(got, expected, dtype=np.float64)))
        if not np.isfinite(error):
            return MAX_NSR
        if power > 0:
            nsrs.append(float(error) / power)
    return min(float(np.mean(nsrs)), MAX_NSR) if nsrs else 0.0


@dataclass
class OutputNoise:
    """Noise of a candidate's outputs, with the durations of both models' runs.

    Attributes:
        reference: the FP32 model.
        candidate: the compared model.
        layout: dtypes and shapes of the batches to time, as text.
        seconds: seconds of both models for every such batch, without a cold start.
    """

    reference: AnyModel
    candidate: AnyModel
    layout: str = ""
    seconds: tuple[list[float], list[float]] = field(default_factory=lambda: ([], []))
    _nsrs: list[float] = field(default_factory=list)
    _first: Any = None

    def sqnr_db(self, batches: Iterable[Any]) -> float | None:
        """Return the SQNR of the candidate's outputs over all batches, in dB.

        Infinite without differences; None if the outputs hold no floating-point numbers.
        """
        for inputs in batches:
            expected, found = self._run(inputs)
            if not expected:
                return None
            self._nsrs.append(mean_nsr(expected, found))
        if not self._nsrs:
            return None
        self._time_cold_again()
        return decibels(float(np.mean(self._nsrs)))

    def _time_cold_again(self) -> None:
        """Time the first batch again for a model that was cold, as if not run before."""
        for model, taken in zip((self.reference, self.candidate), self.seconds, strict=True):
            if taken and taken[0] > _COLD * max(taken[1:], default=0.0):
                started = time.perf_counter()
                model(self._first)
                taken[0] = time.perf_counter() - started

    def _run(self, inputs: Any) -> tuple[list[Any], list[Any]]:
        """Return the outputs of both models, which begin in turn."""
        models = [self.reference, self.candidate]
        order = [0, 1] if len(self._nsrs) % 2 == 0 else [1, 0]
        outputs, seconds = [None, None], [0.0, 0.0]
        for index in order:
            started = time.perf_counter()
            outputs[index] = models[index](inputs)
            seconds[index] = time.perf_counter() - started
        if shape_words(inputs) == self.layout:
            if not self.seconds[0]:
                self._first = inputs
            for kept, taken in zip(self.seconds, seconds, strict=True):
                kept.append(taken)
        expected, found = map(float_arrays, outputs)
        return expected, found


def output_sqnr_db(
    reference: AnyModel, candidate: AnyModel, batches: Iterable[Any]
) -> float | None:
    """Return the SQNR of a candidate's outputs over all batches; see `OutputNoise.sqnr_db`."""
    return OutputNoise(reference, candidate).sqnr_db(batches)


def compared_with_fp32(
    job: TuningJob, converted: AnyModel, log: RunLog
) -> tuple[float | None, Sequence[Sequence[float]]]:
    """Return the SQNR of the outputs relative to FP32 on calibration samples, in dB.

    Also the seconds of both models for every batch with the layout of the measured one.
    """
    if job.calibration is None:
        return None, ()
    models = job.model, converted
    noise = OutputNoise(*models, shape_words(job.measurement.inputs))
    with log.phase("compare", "Comparing with FP32"), job.measurement.limited(models):
        sqnr_db = noise.sqnr_db(job.calibration.inputs(log.step))
    return sqnr_db, noise.seconds if noise.seconds[0] else ()


def warn_of_noise(sqnr_db: float | None, log: RunLog) -> None:
    """Warn about an SQNR so low that the outputs may be unusable."""
    if sqnr_db is not None and sqnr_db < MIN_SQNR_DB:
        log.warn(
            f"the outputs differ from those of FP32: their SQNR is {sqnr_db:.1f} dB on calibration "
            f"samples, below {MIN_SQNR_DB:g} dB; set a metric and evaluation data to limit the "
            f"loss of accuracy"
        )
