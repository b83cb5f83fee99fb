"""Trials: plans with their measured results."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any

from neural_mp.core.enums import Objective
from neural_mp.core.plan import PrecisionPlan, parse_plan
from neural_mp.core.precision import Precision
from neural_mp.util.json_fields import Count, JsonFields, NonNegative
from neural_mp.util.optional_packages import create_data_frame
from neural_mp.util.string_enum import StringEnum
from neural_mp.util.text import Displayed

#: Objective → key of its value as a fraction of FP32's. Relative latencies rank plans, since
#: machine speed drifts.
RELATIVE_FIGURES: Mapping[Objective, str] = {
    Objective.PERFORMANCE: "relative_latency",
    Objective.FOOTPRINT: "relative_footprint",
    Objective.MODELSIZE: "relative_modelsize",
    Objective.TARGET: "relative_target",
}


class Outcome(StringEnum):
    """Outcome of a trial."""

    MET = "met"
    MISSED = "missed"
    SLOW = "slow"  #: accuracy target met, but too little gain over FP32 by the objective
    UNCERTAIN = "uncertain"  #: accuracy target met, gain over FP32 within the noise of the times
    PRUNED = "pruned"  #: evaluation stopped early: target out of reach
    FAILED = "failed"


def compute_relative_cost(
    objectives: Mapping[Objective, float], figures: Mapping[str, float]
) -> float:
    """Return the weighted cost as a fraction of FP32's; infinite if not measured."""
    return sum(w * figures.get(RELATIVE_FIGURES[n], float("inf")) for n, w in objectives.items())


@dataclass(frozen=True)
class Trial(JsonFields):
    """A plan with its measurements.

    Attributes:
        outcome: target met, target missed, or failed with an error.
        accuracy: the user's metric; None if the trial failed or nothing could be evaluated; if
            pruned, over the data seen.
        loss: degradation from the FP32 baseline, in the criterion's unit (a fraction for a relative
            criterion, an amount for an absolute one); negative if better than FP32.
        objectives: objective → value, smaller is better: `performance` in seconds per batch,
            `footprint` and `modelsize` in bytes; `relative_latency`, `relative_footprint` and
            `relative_modelsize` as fractions of FP32's; for an accelerator, the estimated costs
            `target` and `relative_target`, and no latency.
        seconds: duration of conversion and evaluation.
        error: error of a failed trial; if the model produced NaN or Inf, the op of origin.
        number: index in the run's history, from 0.
        metrics: name → value, if there are several metrics; `accuracy` is then their weighted sum,
            or the score of a target that each must meet.
        node: node of a cluster that evaluated the plan; empty for this machine.
        loss_bound: for a language model, the 99 % bound of the loss on other texts, in
            the same unit, which decides whether the target is met; None if unknown.
        trained: whether the weights were trained with the rounding of the plan.
    """

    plan: Annotated[PrecisionPlan, parse_plan]
    outcome: Outcome
    accuracy: float | None = None
    loss: float | None = None
    objectives: Mapping[str, NonNegative] = field(default_factory=dict)
    seconds: float = 0.0
    error: str | None = None
    number: Count = 0
    metrics: Mapping[str, float] = field(default_factory=dict)
    node: str = ""
    loss_bound: float | None = None
    trained: bool = False

    @property
    def met(self) -> bool:
        """Whether the plan meets the accuracy target, with enough gain over FP32."""
        return self.outcome is Outcome.MET

    @property
    def meets_accuracy(self) -> bool:
        """Whether the plan meets the accuracy target, regardless of speed."""
        return self.outcome is Outcome.MET or self.lacks_gain

    @property
    def lacks_gain(self) -> bool:
        """Whether the plan meets the accuracy target, without a proven gain over FP32."""
        return self.outcome in (Outcome.SLOW, Outcome.UNCERTAIN)

    @property
    def speedup(self) -> float | None:
        """Speedup over FP32; None if not measured."""
        latency = self.objectives.get("relative_latency")
        return 1 / latency if latency else None

    @property
    def speedup_interval(self) -> tuple[float, float] | None:
        """Confidence interval of `speedup`, which decides whether a trial is slow; or None."""
        bounds = [self.objectives.get(f"relative_latency_{end}") for end in ("high", "low")]
        low, high = (1 / bound if bound else None for bound in bounds)
        return None if low is None or high is None else (low, high)

    def relative_cost(self, objectives: Mapping[Objective, float]) -> float:
        """Return the weighted cost as a fraction of FP32's; infinite if not measured."""
        return compute_relative_cost(objectives, self.objectives)

    @property
    def ranking_loss(self) -> float:
        """The loss that decides, for ranking: its bound, if known; infinite if None."""
        if self.loss is None:
            return float("inf")
        return self.loss if self.loss_bound is None else max(self.loss, self.loss_bound)


class Trials(tuple[Trial, ...], Displayed):
    """Trials of a run, oldest first: a tuple that notebooks show as a table."""

    __slots__ = ()

    def to_dataframe(self) -> Any:
        """Return a `pandas.DataFrame` with one row per trial, indexed by `trial` (from 1).

        Columns: outcome, accuracy, each of several metrics, loss, speedup with its bounds, each
        objective, seconds, the number of ops per precision, error, node, trained, plan. Values that
        were not measured are missing (NaN or None).

        Raises:
            MissingFrameworkError: pandas is not installed.
        """
        intervals = [trial.speedup_interval or (None, None) for trial in self]
        counts = [trial.plan.counts() for trial in self]
        precisions = [p for p in Precision if any(p in by for by in counts)]
        columns: dict[str, list[Any]] = {
            "trial": [trial.number + 1 for trial in self],
            "outcome": [trial.outcome.value for trial in self],
            "accuracy": [trial.accuracy for trial in self],
            **_values_per_trial("metrics", self),
            "loss": [trial.loss for trial in self],
            "speedup": [trial.speedup for trial in self],
            "speedup_low": [low for low, _ in intervals],
            "speedup_high": [high for _, high in intervals],
            **_values_per_trial("objectives", self),
            "seconds": [trial.seconds for trial in self],
            **{f"{p} ops": [by.get(p, 0) for by in counts] for p in precisions},
            "error": [trial.error for trial in self],
            "node": [trial.node for trial in self],
            "trained": [trial.trained for trial in self],
            "plan": [trial.plan for trial in self],
        }
        return create_data_frame(columns, "trial")


def _values_per_trial(attribute: str, trials: Iterable[Trial]) -> dict[str, list[float | None]]:
    """Return name → its value in each trial, for a mapping of figures."""
    figures: list[Mapping[str, float]] = [getattr(trial, attribute) for trial in trials]
    names = dict.fromkeys(name for by in figures for name in by)
    return {name: [by.get(name) for by in figures] for name in names}
