"""The contract of a strategy: plans out, trials in; no framework, no files, no clock."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Generator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import ClassVar

from neural_mp.core.enums import Objective
from neural_mp.core.observations import Observations, OpTimings
from neural_mp.core.plan import PrecisionPlan
from neural_mp.core.precision import Precision
from neural_mp.core.trial import Trial
from neural_mp.space import TuningSpace

#: What `Strategy.search` is: it yields rounds of independent plans and is sent their trials.
Search = Generator[list[PrecisionPlan], list[Trial], None]


class Probe:
    """What can be measured beyond calibration, without spending an evaluation.

    It is taken when first asked for, and kept with the run. This one knows nothing: what a strategy
    finds unknown it must do without.
    """

    def output_noise(self, plan: PrecisionPlan, alone: str | None = None) -> float | None:
        """The power of a plan's errors at the outputs, as a share of FP32's outputs' power.

        On a few calibration samples; 1e9 for a plan that cannot be converted or gives NaN.
        None where nothing can be measured, or what may be spent on it is.

        Args:
            plan: the plan.
            alone: the tensor or op that alone is in a lower precision, for people who ask later
                what its noise does; None where there are several.
        """
        return None

    def times(self) -> OpTimings:
        """How long ops and conversions take; empty where that was not measured."""
        return OpTimings()

    def times_within(self, plan: PrecisionPlan) -> OpTimings | None:
        """The same, with the ops of a plan timed within the model that it comes to.

        None where that cannot be measured.
        """
        return None

    def latencies(self, plans: Sequence[PrecisionPlan]) -> list[float] | None:
        """Seconds a batch of every plan's model, in turn; infinite for one that cannot be made.

        None where that cannot be measured.
        """
        return None

    def weight_sensitivity(self) -> Mapping[str, float]:
        """Op → harm of rounding its weight to INT8, by second derivatives (HAWQ-V2).

        Raises:
            ConversionError: the framework has no gradients.
        """
        return {}


@dataclass(frozen=True)
class TuningProblem:
    """What a strategy is given.

    Attributes:
        space: what every op may run in.
        observations: what calibration saw.
        precisions: what the user asked for, FP32 aside.
        seed: for strategies that draw at random.
        objectives: what is made small → its weight: `performance`, `footprint`, `modelsize`.
        probe: what else can be measured.
    """

    space: TuningSpace
    observations: Observations
    precisions: tuple[Precision, ...]
    seed: int = 0
    objectives: Mapping[Objective, float] = field(
        default_factory=lambda: {Objective.PERFORMANCE: 1.0}
    )
    probe: Probe = field(default_factory=Probe)


class Strategy(ABC):
    """One way to search for the fastest plan that meets the target."""

    name: ClassVar[str]

    @abstractmethod
    def search(self, problem: TuningProblem) -> Search:
        """Yield plans that can be tried side by side; receive their trials.

        The generator returns when it cannot hope for a better plan. It need not remember what it
        tried before: the tuner answers a repeated plan from history.

        What it proposes follows from the problem, the seed and the trials alone, so that a run that
        was cut off proposes the same again.
        """
