"""A plan that was tried, and its result."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from neural_mp.core.enums import Objective
from neural_mp.core.plan import PrecisionPlan, parse_plan
from neural_mp.util.string_enum import StringEnum
from neural_mp.util.validators import (
    checked,
    enum_of,
    mapping_of,
    non_negative_float,
    non_negative_integer,
    number,
    optional,
    record,
    string,
)

#: Objective → the figure of a trial that says how well it does, as a share of FP32's. Of latencies
#: the share counts and not the seconds, since machines drift.
RELATIVE_FIGURES: Mapping[Objective, str] = {
    Objective.PERFORMANCE: "relative_latency",
    Objective.FOOTPRINT: "relative_footprint",
    Objective.MODELSIZE: "relative_modelsize",
}


class Outcome(StringEnum):
    """How a trial ended."""

    MET = "met"
    MISSED = "missed"
    SLOW = "slow"  #: met the target, but gains too little over FP32, and speed is what is wanted
    PRUNED = "pruned"  #: was lost already when its evaluation was stopped
    FAILED = "failed"


@dataclass(frozen=True)
class Trial:
    """A plan and what was measured of it.

    Attributes:
        plan: what was tried.
        outcome: whether it met the accuracy target, missed it, or failed with an error.
        accuracy: the user's metric; None if the trial failed or nothing could be evaluated; on the
            data seen until then, if it was pruned.
        loss: how much worse than the FP32 baseline, in the criterion's own terms (a share for a
            relative criterion, an amount for an absolute one); negative is better than FP32.
        objectives: objective name → value, smaller is better: `performance` in seconds a batch,
            `footprint` and `modelsize` in bytes; `relative_latency`, `relative_footprint` and
            `relative_modelsize` as shares of FP32's.
        seconds: how long conversion and evaluation took.
        error: for a failed trial, its error; for one that produced NaN or Inf, the op it began at.
        number: its place in the run's history, from 0.
        metrics: name → value, where several metrics were evaluated; `accuracy` is then their
            weighted sum, or the score by which every one of them has to meet the target.
        node: the machine that evaluated it; empty where that was not kept.
    """

    plan: PrecisionPlan
    outcome: Outcome
    accuracy: float | None = None
    loss: float | None = None
    objectives: Mapping[str, float] = field(default_factory=dict)
    seconds: float = 0.0
    error: str | None = None
    number: int = 0
    metrics: Mapping[str, float] = field(default_factory=dict)
    node: str = ""

    @property
    def met(self) -> bool:
        """Whether the plan meets the target, and gains enough where speed is wanted."""
        return self.outcome is Outcome.MET

    @property
    def meets_accuracy(self) -> bool:
        """Whether the plan meets the accuracy target, however slow it is."""
        return self.outcome in (Outcome.MET, Outcome.SLOW)

    @property
    def speedup(self) -> float | None:
        """How many times faster than FP32; None where that was not measured."""
        share = self.objectives.get("relative_latency")
        return 1 / share if share else None

    def relative_cost(self, objectives: Mapping[Objective, float]) -> float:
        """What the plan takes as a share of what FP32 takes; infinite where it was not measured.

        Args:
            objectives: objective → its weight.
        """
        return sum(
            weight * self.objectives.get(RELATIVE_FIGURES[name], float("inf"))
            for name, weight in objectives.items()
        )

    @property
    def ranking_loss(self) -> float:
        """`loss` for ranking: infinite where there is none."""
        return float("inf") if self.loss is None else self.loss

    def to_dict(self) -> dict[str, Any]:
        """Plain numbers, strings, lists and dicts."""
        return {
            "plan": self.plan.to_dict(),
            "outcome": self.outcome.value,
            "accuracy": self.accuracy,
            "loss": self.loss,
            "objectives": dict(self.objectives),
            "seconds": self.seconds,
            "error": self.error,
            "number": self.number,
            "metrics": dict(self.metrics),
            "node": self.node,
        }

    @classmethod
    def from_dict(cls, data: object) -> Trial:
        """Read back what `to_dict` wrote; what is left out is as for a new trial.

        Raises:
            NeuralMPError: it was not written so.
        """
        return cls(**_TRIAL(data))


_TRIAL = record(
    {
        "plan": parse_plan,
        "outcome": enum_of(Outcome),
    },
    {
        "accuracy": optional(number),
        "loss": optional(number),
        "objectives": mapping_of(checked(non_negative_float)),
        "seconds": number,
        "error": optional(string),
        "number": non_negative_integer,
        "metrics": mapping_of(number),
        "node": string,
    },
)
