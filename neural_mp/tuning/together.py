"""How the values of several metrics become the one number that a search goes by."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace

from neural_mp.errors import MetricError
from neural_mp.tuning.criterion import AccuracyCriterion


def _higher(name: str) -> bool:
    return True


@dataclass(frozen=True)
class Together:
    """How the values of several metrics become one number.

    Either that is their weighted sum. Or every one of them has to meet the target, each in its own
    direction; then the number is a score that falls short of 1, which FP32 has, by the largest of
    their losses: 0.993 where the accuracy lost 0.7 % of FP32's and the F1 score less. (It exceeds 1
    by as much where the criterion says that lower is better.) It meets the target when all do.

    Attributes:
        names: what the metrics are called, in their order.
        every: whether every one has to meet the target.
        criterion: what that is, for each of them.
        higher: name → whether its larger value is the better one.
        direction: the same, of a value that a metric or `eval_func` gives under a name of its own.
        baseline: name → FP32's value; empty before it was measured.
    """

    names: tuple[str, ...] = ()
    every: bool = False
    criterion: AccuracyCriterion = AccuracyCriterion()
    higher: Mapping[str, bool] = field(default_factory=dict)
    direction: Callable[[str], bool] = _higher
    baseline: Mapping[str, float] = field(default_factory=dict)

    def with_baseline(self, values: Mapping[str, float], every: bool) -> Together:
        """The same, with FP32's values known, and whether each of them has to be met."""
        return replace(self, baseline=dict(values), every=self.every or every)

    def score(self, values: Mapping[str, float]) -> float:
        """1 less the largest loss; NaN where a value is not finite.

        Raises:
            MetricError: the values have other names than FP32's.
            ConfigurationError: it is not known which way is better.
        """
        if not values:
            raise MetricError("a metric must return a number, got a dict without any")
        baseline = self.baseline or values
        if baseline.keys() != values.keys():
            raise MetricError(
                f"the metric gives {', '.join(values)}, but for FP32 it gave {', '.join(baseline)}"
            )
        losses = [self.criterion_of(name).loss(baseline[name], values[name]) for name in values]
        if not all(map(math.isfinite, (*values.values(), *losses))):
            return math.nan
        return 1 - max(losses) if self.criterion.prefers_higher else 1 + max(losses)

    def targets(self) -> dict[str, float]:
        """Name → the worst value that is accepted, of the metrics that have a target each."""
        return {
            name: self.criterion_of(name).target(value) for name, value in self.baseline.items()
        }

    def criterion_of(self, name: str) -> AccuracyCriterion:
        """The criterion in the direction of a metric."""
        higher = self.higher[name] if name in self.higher else self.direction(name)
        return replace(self.criterion, higher_is_better=higher)
