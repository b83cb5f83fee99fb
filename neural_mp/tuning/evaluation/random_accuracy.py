"""Accuracy of models with random outputs: its spread, and verdicts by a confidence bound."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np

from neural_mp.core.criterion import AccuracyCriterion
from neural_mp.tuning.evaluation.metric_values import is_usable
from neural_mp.util.pytree import as_numpy, tree_leaves

#: Noise-to-signal power ratio between two runs above which outputs are random: below are rounding
#: errors of sums in another order.
_MAX_ROUNDING_NSR = 1e-8
#: Passes over the data with FP32: at least the first number, then up to the second within the time.
FEWEST_PASSES, MOST_PASSES = 3, 5
_REPEAT_SECONDS = 60.0
#: Quantile of 95 % of Student's t distribution by degrees of freedom.
_T_QUANTILES = {1: 6.314, 2: 2.920, 3: 2.353, 4: 2.132}


#: Accuracy of a pass, and its values by name.
Pass: TypeAlias = tuple[float, Mapping[str, float]]


@dataclass(frozen=True)
class AccuracySpread:
    """Spread of FP32's accuracy between passes over the same data.

    Attributes:
        deviation: standard deviation of the accuracy of one pass; 0 for deterministic models.
        passes: number of passes with FP32; its accuracy is their mean.
    """

    deviation: float = 0.0
    passes: int = 1

    def bound(self, criterion: AccuracyCriterion, accuracy: float, passes: int) -> float:
        """Return the 95 % confidence bound of a mean over `passes` passes compared with FP32's."""
        if not self.deviation:
            return accuracy
        quantile = _T_QUANTILES[min(self.passes - 1, max(_T_QUANTILES))]
        margin = quantile * self.deviation * math.sqrt(1 / self.passes + 1 / passes)
        return accuracy - margin if criterion.prefers_higher else accuracy + margin

    def met(
        self, criterion: AccuracyCriterion, baseline: float, accuracy: float, passes: int = 1
    ) -> bool:
        """Whether the confidence bound of an accuracy is within tolerance."""
        return criterion.met(baseline, self.bound(criterion, accuracy, passes))

    def repeated(
        self,
        evaluate: Callable[[], Pass],
        criterion: AccuracyCriterion,
        baseline: float,
    ) -> RepeatedAccuracy:
        """Evaluate a model as often as FP32 if its mean accuracy leaves the verdict in doubt."""
        accuracy = RepeatedAccuracy((evaluate(),))
        while (
            len(accuracy.passes) < self.passes
            and criterion.met(baseline, accuracy.mean)
            and not self.met(criterion, baseline, accuracy.mean, len(accuracy.passes))
        ):
            accuracy = RepeatedAccuracy((*accuracy.passes, evaluate()))
        return accuracy


@dataclass(frozen=True)
class RepeatedAccuracy:
    """Accuracy and metric values by name of each pass over the data."""

    passes: tuple[Pass, ...]

    @property
    def accuracies(self) -> list[float]:
        """Accuracy of each pass."""
        return [accuracy for accuracy, _ in self.passes]

    @property
    def mean(self) -> float:
        """Mean accuracy, that of a single pass exactly."""
        return self.accuracies[0] if len(self.passes) == 1 else float(np.mean(self.accuracies))

    @property
    def values(self) -> dict[str, float]:
        """Mean of each named value."""
        if len(self.passes) == 1:
            return dict(self.passes[0][1])
        return {
            name: float(np.mean([values[name] for _, values in self.passes]))
            for name in self.passes[0][1]
        }


def repeat_baseline(first: Pass, evaluate: Callable[[], Pass]) -> RepeatedAccuracy:
    """Return FP32's accuracy in several passes, the first of which is given."""
    accuracy, started = RepeatedAccuracy((first,)), time.monotonic()
    while len(accuracy.passes) < MOST_PASSES:
        late = time.monotonic() - started > _REPEAT_SECONDS
        if late and len(accuracy.passes) >= FEWEST_PASSES:
            break
        again = evaluate()
        if not is_usable(again[0]):
            break
        accuracy = RepeatedAccuracy((*accuracy.passes, again))
    return accuracy


def is_random(model: Callable[[Any], Any], inputs: Any) -> bool:
    """Whether two runs of a model on the same inputs return different outputs."""
    first, second = (_output_arrays(model(inputs)) for _ in range(2))
    return len(first) != len(second) or any(map(_arrays_differ, first, second))


def _output_arrays(outputs: Any) -> list[np.ndarray]:
    return [as_numpy(leaf) for leaf in tree_leaves(outputs) if hasattr(leaf, "shape")]


def _arrays_differ(first: np.ndarray, second: np.ndarray) -> bool:
    if first.shape != second.shape:
        return True
    if first.dtype.kind != "f":
        return not np.array_equal(first, second)
    finite = np.isfinite(first) & np.isfinite(second)
    if not np.array_equal(first[~finite], second[~finite], equal_nan=True):
        return True
    a, b = first[finite].astype(np.float64), second[finite].astype(np.float64)
    return bool(np.square(a - b).sum() > _MAX_ROUNDING_NSR * np.square(a).sum())
