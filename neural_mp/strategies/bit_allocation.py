"""`bit_allocation`: bits of each weight by a knapsack over the Fisher probe's noise."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from itertools import pairwise
from math import inf, sqrt

from neural_mp.core.enums import Objective
from neural_mp.core.observations import OpTimings
from neural_mp.core.plan import PrecisionPlan
from neural_mp.core.precision import OpConfig
from neural_mp.search.cost_model import CostInputs
from neural_mp.strategies.base import Search, Strategy, TuningProblem
from neural_mp.strategies.basic import Basic

#: Maximum number of trials once a plan met the target, and before.
_TRIALS, _TRIALS_AT_MOST = 4, 8
#: Fraction of the tolerated loss that a plan is chosen for: predictions have errors of both signs.
_AIM_RATIO = 0.9
#: A plan must be cheaper by this fraction of FP32's cost to be worth a trial.
_LEAST_GAIN = 0.005
#: Bits of the parameters of a group: scale and offset in float32.
_GROUP_BITS = 64


class BitAllocation(Strategy):
    """Search for the least bits per weight that meet the target, for models of large weights.

    1. The Fisher probe gives the noise of every weight in every form of storage, in one pass.
    2. As weights that leave the inputs in float need no conversions, the least cost for any noise
       is a knapsack: each step replaces one form by a larger one, the steps with the largest
       reduction of noise per cost first.
    3. The cheapest plan is tried. Its loss and noise predict the losses of all others; the cheapest
       plan predicted within the tolerance is tried, and the prediction corrected by each trial: at
       most four.

    Without gradients, the noise at the results of each layer, scaled by one measurement at the
    outputs. Without either, and for ops that have no such form, the strategy is `basic`.
    """

    name = "bit_allocation"

    def search(self, problem: TuningProblem) -> Search:
        """Search as described in the class."""
        noise = problem.probe.weight_noise()
        knapsack = _knapsack(problem, noise)
        yield from Basic().search(problem) if knapsack is None else _descend(problem, knapsack)


@dataclass(frozen=True)
class _Point:
    """A plan with its cost, as a fraction of FP32's, and its noise."""

    plan: PrecisionPlan
    cost: float
    noise: float


@dataclass(frozen=True)
class _Form:
    """A configuration of an op with its cost and its noise."""

    config: OpConfig
    cost: float
    noise: float


@dataclass(frozen=True)
class _Step:
    """The replacement of one form of an op by the next larger one."""

    op: str
    before: _Form
    after: _Form

    @property
    def cost(self) -> float:
        """Additional cost."""
        return self.after.cost - self.before.cost

    @property
    def gain(self) -> float:
        """Reduction of noise."""
        return self.before.noise - self.after.noise

    @property
    def slope(self) -> float:
        """Reduction of noise per cost."""
        return _slope(self.before, self.after)


def _descend(problem: TuningProblem, knapsack: _Knapsack) -> Search:
    """Try the cheapest plan, then plans between those that missed and those that met the target."""
    missed: _Point | None = None
    loss = inf
    met: _Point | None = None
    point: _Point | None = knapsack.start
    trials = 0
    while point is not None and trials < (_TRIALS_AT_MOST if met is None else _TRIALS):
        (trial,) = yield [point.plan]
        trials += 1
        if trial.meets_accuracy:
            met = point
        else:
            missed, loss = point, trial.ranking_loss
        aim = None if missed is None else _aim(missed, loss, met, problem.tolerance)
        found = None if aim is None else knapsack.cheapest(aim)
        limit = inf if met is None else met.cost - _LEAST_GAIN
        is_new = found is not None and found not in (met, missed) and found.cost < limit
        point = found if is_new else None


def _aim(missed: _Point, loss: float, met: _Point | None, tolerance: float | None) -> float:
    """Return the noise of the next plan, from the losses of the last that missed the target."""
    if tolerance and 0 < loss < inf:
        aim = missed.noise * min(_AIM_RATIO * tolerance / loss, _AIM_RATIO)
    else:
        aim = missed.noise / 4
    # A plan met the target already: halve the interval where the prediction leaves it.
    return aim if met is None or aim > met.noise else sqrt(missed.noise * met.noise)


@dataclass(frozen=True)
class _Knapsack:
    """The cheapest plan, and the steps to more bits, with the largest gains per cost first."""

    start: _Point
    steps: tuple[_Step, ...]

    def cheapest(self, noise: float) -> _Point:
        """Return a plan with at most this noise, of the least cost that greedy searches find.

        As long as a search without one of the steps is cheaper, that step is left out.
        """
        best, banned = self._greedy(noise, frozenset()), frozenset[_Step]()
        while True:
            others = [(self._greedy(noise, banned | {step}), step) for step in best[1]]
            cheapest = min(others, key=lambda entry: entry[0][0].cost, default=None)
            if cheapest is None or cheapest[0][0].cost >= best[0].cost - _LEAST_GAIN / 10:
                return best[0]
            best, banned = cheapest[0], banned | {cheapest[1]}

    def _greedy(self, noise: float, banned: frozenset[_Step]) -> tuple[_Point, list[_Step]]:
        """Return a plan and its steps: in order until the noise is reached, less unneeded ones.

        The cost is infinite if the other steps do not suffice.
        """
        left, taken = self.start.noise, list[_Step]()
        reached: dict[str, _Form] = {}
        for step in self.steps:
            if left <= noise:
                break
            if step in banned or reached.get(step.op, step.before) is not step.before:
                continue
            reached[step.op] = step.after
            taken.append(step)
            left -= step.gain
        for step in sorted(taken, key=lambda step: step.cost, reverse=True):
            if reached[step.op] is step.after and left + step.gain <= noise:
                reached[step.op] = step.before
                taken.remove(step)
                left += step.gain
        plan = self.start.plan.replacing({op: form.config for op, form in reached.items()})
        cost = self.start.cost + sum(step.cost for step in taken) if left <= noise else inf
        return _Point(plan, cost, max(left, 0.0)), taken


def _knapsack(problem: TuningProblem, noise: Mapping[str, Mapping[str, float]]) -> _Knapsack | None:
    """Return the choices of all ops; None if no op has several forms."""
    figures = CostInputs(
        {},
        problem.objectives,
        problem.probe.times() if Objective.PERFORMANCE in problem.objectives else OpTimings(),
        {op.name: op.weights for op in problem.space.graph},
    )
    fractions = figures.fractions(problem.space.tunable_ops)
    forms = {
        op: _forms(problem, op, figures, fractions[op], noise[op])
        for op in problem.space.tunable_ops
        if op in noise
    }
    steps = [_Step(op, *pair) for op, found in forms.items() for pair in pairwise(found)]
    if not steps:
        return None
    plan = problem.space.fastest_plan()
    plan = plan.replacing({op: found[0].config for op, found in forms.items()})
    first = [found[0] for found in forms.values()]
    start = _Point(plan, sum(form.cost for form in first), sum(form.noise for form in first))
    return _Knapsack(start, tuple(sorted(steps, key=lambda step: step.slope, reverse=True)))


def _forms(
    problem: TuningProblem,
    op: str,
    figures: CostInputs,
    fractions: tuple[float, float],
    noise: Mapping[str, float],
) -> list[_Form]:
    """Return the forms of an op on the lower convex hull of noise over cost, cheapest first."""
    capability = problem.space.capabilities[op]
    importance = problem.objectives.get(Objective.PERFORMANCE, 0.0)
    found = []
    for config in problem.space.choices(op):
        if config.activation is not None:
            continue
        spec = config.weight
        ratio = figures.time_ratio(op, config.precision, config.precision in capability.emulated)
        bits = float(config.precision.bits if spec is None else spec.dtype.bits)
        if spec is not None and spec.group_size is not None:
            bits += _GROUP_BITS / spec.group_size
        cost = importance * fractions[0] * ratio + (1 - importance) * fractions[1] * bits / 32
        harm = 0.0 if spec is None else noise.get(str(spec))
        if harm is not None:
            found.append(_Form(config, cost, harm))
    return _lower_hull(found)


def _lower_hull(forms: Iterable[_Form]) -> list[_Form]:
    """Return the forms that some price of noise makes the best, cheapest first."""
    hull: list[_Form] = []
    for form in sorted(forms, key=lambda form: (form.cost, form.noise)):
        if hull and form.noise >= hull[-1].noise:
            continue
        while len(hull) > 1 and _slope(hull[-2], hull[-1]) <= _slope(hull[-1], form):
            hull.pop()
        hull.append(form)
    return hull


def _slope(before: _Form, after: _Form) -> float:
    """Return the reduction of noise per cost."""
    return (before.noise - after.noise) / max(after.cost - before.cost, 1e-300)
