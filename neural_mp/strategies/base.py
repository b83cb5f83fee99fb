"""Interface of strategies: proposed plans out, trials in; without framework, files or clock."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Generator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, ClassVar

from neural_mp.core.enums import Objective
from neural_mp.core.observations import Observations, WidthFigures
from neural_mp.core.op_timings import FormTimes, OpTimings, Workload
from neural_mp.core.plan import PrecisionPlan
from neural_mp.core.precision import Precision
from neural_mp.core.trial import Trial
from neural_mp.space import TuningSpace

if TYPE_CHECKING:
    from neural_mp.targets.profile import TargetProfile

#: Generator of `Strategy.search`: yields rounds of independent plans and receives their trials.
Search = Generator[list[PrecisionPlan], list[Trial], None]


class Probe:
    """Measurements beyond calibration that cost no evaluation.

    Each is made on first use and stored with the run. This base class measures nothing, and
    strategies must work without any measurement.
    """

    def output_noise(self, plan: PrecisionPlan, unit: str | None = None) -> float | None:
        """Return the NSR at the outputs of a plan's model, on a few calibration samples.

        1e9 for a plan that cannot be converted or yields NaN. None if measurement is impossible, or
        its budget is spent.

        Args:
            plan: the plan.
            unit: the only tensor or op in lower precision, for later reports on its noise; None if
                there are several.
        """
        return None

    def reconstructable_ops(self) -> frozenset[str]:
        """Return the ops whose INT8 weight can be learned from calibration samples."""
        return frozenset()

    def times(self) -> OpTimings:
        """Return the times of ops and conversions; empty if not measured."""
        return OpTimings()

    def times_within(self, plan: PrecisionPlan) -> OpTimings | None:
        """Return the times of ops and conversions, with a plan's ops timed within its model.

        None if measurement is impossible.
        """
        return None

    def latencies(self, plans: Sequence[PrecisionPlan]) -> list[float] | None:
        """Return seconds per batch of every plan's model, interleaved; infinite if not convertible.

        None if measurement is impossible.
        """
        return None

    def first_latencies(self, plans: Sequence[PrecisionPlan]) -> list[float] | None:
        """Return the latencies of plans that a search starts from, roughly if time is short.

        None if measurement is impossible.
        """
        return self.latencies(plans)

    def weight_sensitivity(self) -> Mapping[str, float]:
        """Return op → sensitivity to INT8 rounding of its weight, by second derivatives (HAWQ-V2).

        Raises:
            ConversionError: the framework has no gradients.
        """
        return {}

    def weight_noise(self) -> Mapping[str, Mapping[str, float]]:
        """Return op → quantization of its weight as text → divergence, by the Fisher probe.

        The divergence of the outputs due to the rounding, in nats per prediction; without
        gradients, noise at the outputs. For ops whose weight can be stored in integers while their
        inputs stay float; empty if the framework offers neither.
        """
        return {}

    def width_figures(self) -> WidthFigures | None:
        """Return the noise of tensors and weights by width, for a target; None if not measured."""
        return None

    def form_times(self, workload: Workload) -> Mapping[str, FormTimes]:
        """Return op → form → rows per call → seconds; empty if not measured."""
        return {}


@dataclass(frozen=True)
class TuningProblem:
    """The input of a strategy.

    Attributes:
        space: the supported configurations of every op.
        observations: the result of calibration.
        precisions: the precisions that the user requested, besides FP32.
        seed: for random strategies.
        objectives: objective to minimize → weight: `performance`, `footprint`, `modelsize`.
        probe: further measurements.
        tolerance: tolerated loss, in the unit of the losses of trials; None if unknown.
        workload: shares of decode and prefill that `performance` counts; None counts the time of a
            batch.
        target: the accelerator whose estimated cost counts; None for this machine's times.
    """

    space: TuningSpace
    observations: Observations
    precisions: tuple[Precision, ...]
    seed: int = 0
    objectives: Mapping[Objective, float] = field(
        default_factory=lambda: {Objective.PERFORMANCE: 1.0}
    )
    probe: Probe = field(default_factory=Probe)
    tolerance: float | None = None
    workload: Workload | None = None
    target: TargetProfile | None = None


class Strategy(ABC):
    """A search method for the fastest plan that meets the target."""

    name: ClassVar[str]
    #: Whether the search needs gradients, which some frameworks lack.
    needs_gradients: ClassVar[bool] = False

    @abstractmethod
    def search(self, problem: TuningProblem) -> Search:
        """Yield rounds of independent plans and receive their trials.

        The generator returns when it expects no better plan. It may repeat plans: the tuner answers
        repeated plans from history.

        Proposals must depend on the problem, the seed and the trials only, so that a resumed run
        repeats the proposals of the interrupted one.
        """
