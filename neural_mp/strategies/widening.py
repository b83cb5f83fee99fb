"""`widening`: widths of each op for an accelerator, by measured noise and estimated cost."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import inf, log, sqrt

from neural_mp.core.enums import CalibrationAlgorithm
from neural_mp.core.observations import WidthFigures
from neural_mp.core.plan import PrecisionPlan
from neural_mp.core.precision import FP32, OpConfig
from neural_mp.search.widening import (
    LEAST_FALL_RATIO,
    WidthPlan,
    choose_algorithms,
    trace_widening_path,
    with_algorithms,
    with_best_calibration,
)
from neural_mp.space import TuningSpace
from neural_mp.strategies.base import Search, Strategy, TuningProblem
from neural_mp.strategies.basic import Basic
from neural_mp.targets import TargetProfile, Widths
from neural_mp.targets.profile import TargetCosts

#: Maximum number of trials.
MAX_TRIALS = 6
#: Fraction of the tolerated loss that a plan is chosen for: the compiler of the target rounds
#: slightly otherwise than the simulation.
_AIM_RATIO = 0.7
#: A plan must be cheaper by this fraction to be worth a trial.
_LEAST_GAIN_RATIO = 0.01
#: Least power of the noise that the loss is taken to follow.
_LEAST_EXPONENT = 0.1
#: Least noise of a plan that met, over that of one that missed: plans in float have none.
_LEAST_NOISE_RATIO = 1e-4
#: Floor of noises, against the logarithm of 0: outputs that saturate have noises of 1e-25.
_FLOOR = 1e-300


class Widening(Strategy):
    """Search for the cheapest widths that meet the target.

    1. The plan with all ops in their narrowest widths is tried.
    2. If it misses, one run per tensor and weight, with the quantization of that tensor alone,
       gives its noise at the outputs in each width, and by each calibration algorithm.
    3. If other algorithms than `minmax`, or corrections of biases, lower the noise clearly, the
       plan with these is tried. They stay if less is lost.
    4. From the narrowest widths on, steps that widen the ops around a tensor, or a weight, form a
       path of plans, most noise removed per estimated cost first.
    5. Plans of the path between those that missed and those that met are tried: the loss is taken
       to follow a power of the noise, by the last two that missed. At most six trials; none after
       one that loses more than seven tenths of what is tolerated.

    Without an accelerator as the target, the strategy is `basic`.
    """

    name = "widening"

    def search(self, problem: TuningProblem) -> Search:
        """Search as described in the class."""
        space, target = problem.space, problem.target
        if target is None:
            yield from Basic().search(problem)
            return
        if not space.tunable_ops:
            return
        (narrowest,) = yield [space.fastest_plan()]
        figures = None if narrowest.meets_accuracy else problem.probe.width_figures()
        if figures is None:
            return
        choices, trials = _choices_by_width(space, target), MAX_TRIALS - 1
        figures = figures.restricted_to(choices)
        plain = PrecisionPlan({op: own[0] for op, own in choices.items()})
        corrections = _choose_corrections(plain, figures, problem)
        if corrections.changes_plan:
            (trial,) = yield [corrections.apply_to_plan(plain)]
            if trial.meets_accuracy:
                return
            trials -= 1
            loss, reference = trial.loss, narrowest.loss
            if loss is not None and reference is not None and loss < reference:
                narrowest = trial
            else:
                corrections = _Corrections(figures)
        figures = corrections.figures
        costs = TargetCosts(target, figures.macs, figures.elements)
        in_float = sum(costs.of_op(op, FP32) for op in choices) if target.float_type else inf
        path = [
            replace(plan, configs=corrections.apply_to_plan(PrecisionPlan(plan.configs)).configs)
            for plan in trace_widening_path(choices, figures, costs.of_op)
            if plan.cost < in_float
        ]
        yield from _try_path(path, problem, narrowest.loss, trials)


@dataclass(frozen=True)
class _Corrections:
    """Changes of a plan that cost nothing on the target.

    Attributes:
        figures: the noise with the calibration algorithms.
        algorithms: op → its calibration algorithm, if not the default.
        biases: the ops with a corrected bias.
    """

    figures: WidthFigures
    algorithms: Mapping[str, CalibrationAlgorithm] = field(default_factory=dict)
    biases: tuple[str, ...] = ()

    @property
    def changes_plan(self) -> bool:
        """Whether there is a change."""
        return bool(self.algorithms or self.biases)

    def apply_to_plan(self, plan: PrecisionPlan) -> PrecisionPlan:
        """Return a plan with the changes; biases only beside weights of 8 bits."""
        changed = PrecisionPlan(with_best_calibration(plan.configs, self.figures, self.algorithms))
        narrow = [
            op for op in self.biases if (w := changed[op].weight) is not None and w.dtype.bits == 8
        ]
        return changed.replacing(
            {op: replace(changed[op], corrections=("bias_correction",)) for op in narrow}
        )


def _choose_corrections(
    plan: PrecisionPlan, figures: WidthFigures, problem: TuningProblem
) -> _Corrections:
    """Return the changes that lower the noise of the narrowest plan clearly, each by itself."""
    algorithms = _list_offered_algorithms(problem.space, choose_algorithms(figures))
    quieter = with_algorithms(figures, algorithms)
    chosen = _Corrections(figures) if quieter is None else _Corrections(quieter, algorithms)
    corrected = replace(chosen, biases=tuple(op for op in figures.biases if op in plan))
    if not corrected.biases:
        return chosen
    before, after = (problem.probe.output_noise(c.apply_to_plan(plan)) for c in (chosen, corrected))
    if before is None or after is None or after >= (1 - LEAST_FALL_RATIO) * before:
        return chosen
    return corrected


def _list_offered_algorithms(
    space: TuningSpace, algorithms: Mapping[str, CalibrationAlgorithm]
) -> dict[str, CalibrationAlgorithm]:
    """Return op → its calibration algorithm, of ops for which the space has that algorithm."""
    return {
        op: algorithm
        for op, algorithm in algorithms.items()
        if any(c.activation and c.activation.algorithm is algorithm for c in space.choices(op))
    }


def _choices_by_width(space: TuningSpace, target: TargetProfile) -> dict[str, tuple[OpConfig, ...]]:
    """Return op → its best config of each width, the narrowest first, and that of float, if any."""
    choices = {}
    for op in space.tunable_ops:
        by_width: dict[Widths | None, OpConfig] = {}
        for config in space.choices(op):
            widths = Widths.from_config(config)
            is_searched = widths is None or target.is_searched(space.graph[op].type, widths)
            if is_searched and (widths is not None or target.float_type is not None):
                by_width.setdefault(widths, config)
        choices[op] = tuple(by_width.values())
    return choices


def _try_path(
    path: Sequence[WidthPlan], problem: TuningProblem, loss: float | None, trials: int
) -> Search:
    """Try plans between the last that missed, first the narrowest, and the first that met.

    `loss` is that of the narrowest plan, `trials` the most trials. If all others missed, the last
    one is for the widest plan, so that no model stays in float that could meet the target.
    """
    missed, met = 0, len(path)
    losses = {} if loss is None else {0: loss}
    for remaining in reversed(range(trials)):
        if met - missed <= 1:
            return
        if met < len(path) and path[missed + 1].cost > (1 - _LEAST_GAIN_RATIO) * path[met].cost:
            return  # the cheapest plan that was not tried is hardly cheaper than the one that met
        index = _choose_next_index(path, missed, met, losses, problem.tolerance)
        if not remaining and met == len(path):
            index = met - 1
        (trial,) = yield [PrecisionPlan(path[index].configs)]
        if trial.meets_accuracy:
            met = index
            if problem.tolerance and (trial.loss or 0.0) >= _AIM_RATIO * problem.tolerance:
                return  # a narrower plan is likely to miss
            continue
        missed = index
        if trial.loss is not None:
            losses[index] = trial.loss


def _choose_next_index(
    path: Sequence[WidthPlan],
    missed: int,
    met: int,
    losses: Mapping[int, float],
    tolerance: float | None,
) -> int:
    """Return the index of the next plan to try, between one that missed and one that met.

    By the losses of the plans that missed, if nothing has met yet; else the middle in noise.
    """
    inside = range(missed + 1, met)
    noise, loss = max(path[missed].noise, _FLOOR), losses.get(missed)
    if met < len(path):
        fall = sqrt(max(path[met].noise / noise, _LEAST_NOISE_RATIO))
    elif loss and tolerance and loss > 0:
        fall = (_AIM_RATIO * tolerance / loss) ** (1 / _estimate_exponent(path, losses))
    else:
        return inside[len(inside) // 2]
    return next((i for i in inside if path[i].noise <= noise * fall), inside[-1])


def _estimate_exponent(path: Sequence[WidthPlan], losses: Mapping[int, float]) -> float:
    """Return the power of the noise that the loss follows, by the last two plans that missed.

    1 before the second; at least `_LEAST_EXPONENT`, as for a loss that has not fallen.
    """
    if len(losses) < 2:
        return 1.0
    (first, before), (second, after) = list(losses.items())[-2:]
    noise = log(max(path[first].noise, _FLOOR) / max(path[second].noise, _FLOOR))
    if after <= 0 or before <= after or noise <= 0:
        return _LEAST_EXPONENT
    return min(max(log(before / after) / noise, _LEAST_EXPONENT), 1.0)
