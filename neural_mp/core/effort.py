"""Effort of a run, and the limits that follow from it."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

from neural_mp.core.criterion import Deadline
from neural_mp.util.string_enum import StringEnum


class Effort(StringEnum):
    """Time that a run may take for a faster result, as a word."""

    QUICK = "quick"
    NORMAL = "normal"
    THOROUGH = "thorough"


@dataclass(frozen=True)
class EffortLimits:
    """Limits of a run.

    Seconds after calibration and the evaluation of FP32 are limited to a multiple of the seconds
    of both, or of calibration and loading if no accuracy is evaluated, plus a fixed number: a
    search is worth more seconds where every step of it takes longer.

    Attributes:
        effort: the effort that the limits belong to.
        multiple, extra_seconds: this multiple, and this number; infinite for no limit.
        duration: multiple of the usual duration of latency measurements.
        patience: maximum seconds of a measurement that decides, as a multiple of its time limit.
        low_precision_runtimes: runtimes timed in lower precisions before one is chosen.
    """

    effort: Effort
    multiple: float = math.inf
    extra_seconds: float = math.inf
    duration: float = 1.0
    patience: float = 6.0
    low_precision_runtimes: int = 2

    def start_deadline(self, known_seconds: float) -> Deadline:
        """Return the deadline of a run from now on, by its seconds so far."""
        if math.isinf(self.multiple):
            return Deadline()
        seconds = math.ceil(self.multiple * known_seconds + self.extra_seconds)
        efforts = list(Effort)
        higher = efforts[efforts.index(self.effort) + 1]
        return Deadline(
            seconds, cause=f"effort '{self.effort}'", remedy=f"set effort to '{higher}'"
        )


#: Effort → its limits.
EFFORT_LIMITS: Mapping[Effort, EffortLimits] = MappingProxyType(
    {
        Effort.QUICK: EffortLimits(
            Effort.QUICK, 3.0, 10.0, duration=0.25, patience=1.0, low_precision_runtimes=0
        ),
        Effort.NORMAL: EffortLimits(Effort.NORMAL, 30.0, 300.0),
        Effort.THOROUGH: EffortLimits(Effort.THOROUGH, duration=2.0),
    }
)
#: Limits unless an effort is set.
NORMAL_LIMITS = EFFORT_LIMITS[Effort.NORMAL]
