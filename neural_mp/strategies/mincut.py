"""`mincut`: the front of time against noise, by minimum cuts, bisected with real evaluations."""

from __future__ import annotations

from math import inf

from neural_mp.plan import PrecisionPlan
from neural_mp.precision import Precision
from neural_mp.search.cut import Cut
from neural_mp.search.front import Point, chord
from neural_mp.search.model import CostModel, cost_model, without_noisy_tensors
from neural_mp.strategies.base import Search, Strategy, TuningProblem
from neural_mp.strategies.basic import Basic

#: A tensor with more noise than this share of its signal is given up in INT8 first.
_NOISY = 0.05
#: Plans that bisecting the front may try.
_STEPS = 4


class MinimumCut(Strategy):
    """A handful of evaluations, however many ops there are.

    Time, noise and conversions of all ops are one cost, of which a minimum cut finds the least for
    any weight of noise against time, exactly: the plans of all weights are the front.

    1. The fastest plan. Most models pass at once.
    2. The tensors with more than 5 % of noise out of INT8.
    3. Between the slowest plan that missed the target and the fastest that met it, the front is
       halved, until nothing lies between, or four more plans were tried.

    Noise is known of INT8 alone: without it in the space, this is `basic`.
    """

    name = "mincut"

    def search(self, problem: TuningProblem) -> Search:
        """See the class."""
        if Precision.INT8 not in problem.space.precisions():
            yield from Basic().search(problem)
            return
        space, model = problem.space, cost_model(problem.space, problem.observations)
        fastest = space.fastest_plan()
        (trial,) = yield [fastest]
        if trial.met:
            return
        cut = Cut(model.assignment)
        missed, met = model.point(fastest), model.at(cut.best(inf))
        tried = {space.resolve(fastest)}
        guess = without_noisy_tensors(model, problem.observations, _NOISY)
        known = space.resolve(guess) in tried
        plan = _between(model, cut, missed, met) if known else guess
        for _ in range(1 + _STEPS):
            if plan is None or not _keeps_some(plan) or (resolved := space.resolve(plan)) in tried:
                return
            tried.add(resolved)
            (trial,) = yield [plan]
            point = model.point(plan)
            missed, met = (missed, point) if trial.met else (point, met)
            plan = _between(model, cut, missed, met)


def _between(model: CostModel, cut: Cut, missed: Point, met: Point) -> PrecisionPlan | None:
    """The plan of the front between two of its points; None if one is better in every way."""
    weight = chord(missed, met)
    return None if weight is None else model.plan(cut.best(weight))


def _keeps_some(plan: PrecisionPlan) -> bool:
    """The model as it was is no plan to try."""
    return any(config.precision is not Precision.FP32 for config in plan.values())
