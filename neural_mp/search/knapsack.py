"""Choice of one form per op by a knapsack: least cost for a noise, or least noise for a cost."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from itertools import pairwise
from math import inf

from neural_mp.core.precision import OpConfig

#: Number of steps that are left out in turn, those with the largest costs.
_LEFT_OUT = 64
#: Savings below this fraction of the cost end the search for steps to leave out, and so do as many
#: steps: the cost may fall in thousands of small savings, each after a search over all steps.
_LEAST_SAVING, MAX_LEFT_OUT = 0.0005, 32


@dataclass(frozen=True)
class Form:
    """A configuration of an op with its cost and its noise."""

    config: OpConfig
    cost: float
    noise: float


@dataclass(frozen=True)
class Step:
    """The replacement of one form of an op by the next larger one."""

    op: str
    before: Form
    after: Form

    @property
    def added_cost(self) -> float:
        """Additional cost."""
        return self.after.cost - self.before.cost

    @property
    def noise_reduction(self) -> float:
        """Reduction of noise."""
        return self.before.noise - self.after.noise

    @property
    def slope(self) -> float:
        """Reduction of noise per cost."""
        return _gain_per_cost(self.before, self.after)


@dataclass(frozen=True)
class Filling:
    """One form of every op, with the sums of cost and noise."""

    forms: Mapping[str, Form]
    cost: float
    noise: float

    @property
    def configs(self) -> dict[str, OpConfig]:
        """Op → its configuration."""
        return {op: form.config for op, form in self.forms.items()}


@dataclass(frozen=True)
class Knapsack:
    """The cheapest filling, and the steps to larger forms, with the largest gains per cost first.

    Only forms on the lower convex hull of an op's noise over cost take part.
    """

    start: Filling
    steps: tuple[Step, ...]

    @classmethod
    def from_forms(cls, forms: Mapping[str, Iterable[Form]]) -> Knapsack:
        """Return the knapsack of op → its forms."""
        hulls = {op: _lower_hull(points) for op, points in forms.items()}
        first = {op: points[0] for op, points in hulls.items() if points}
        start = Filling(
            first,
            sum(form.cost for form in first.values()),
            sum(form.noise for form in first.values()),
        )
        steps = (Step(op, *pair) for op, points in hulls.items() for pair in pairwise(points))
        return cls(start, tuple(sorted(steps, key=lambda step: step.slope, reverse=True)))

    def find_cheapest_filling(self, noise: float) -> Filling:
        """Return a filling with at most this noise, of the least cost that greedy searches find.

        As long as a search without one of the steps is cheaper, that step is left out, up to
        `MAX_LEFT_OUT` steps.
        """
        best, banned = self._fill_greedily(noise, frozenset()), frozenset[Step]()
        for _ in range(MAX_LEFT_OUT):
            largest = sorted(best[1], key=lambda step: step.added_cost)[-_LEFT_OUT:]
            alternatives = [(self._fill_greedily(noise, banned | {step}), step) for step in largest]
            cheapest = min(alternatives, key=lambda entry: entry[0][0].cost, default=None)
            if cheapest is None or cheapest[0][0].cost >= best[0].cost * (1 - _LEAST_SAVING):
                return best[0]
            best, banned = cheapest[0], banned | {cheapest[1]}
        return best[0]

    def _fill_greedily(self, noise: float, banned: frozenset[Step]) -> tuple[Filling, list[Step]]:
        """Return a filling and its steps: in order until the noise is reached, less unneeded ones.

        The cost is infinite if the other steps do not suffice.
        """
        remaining, chosen = self.start.noise, list[Step]()
        reached: dict[str, Form] = {}
        for step in self.steps:
            if remaining <= noise:
                break
            if step in banned or reached.get(step.op, step.before) is not step.before:
                continue
            reached[step.op] = step.after
            chosen.append(step)
            remaining -= step.noise_reduction
        for step in sorted(chosen, key=lambda step: step.added_cost, reverse=True):
            if reached[step.op] is step.after and remaining + step.noise_reduction <= noise:
                reached[step.op] = step.before
                chosen.remove(step)
                remaining += step.noise_reduction
        cost = (
            self.start.cost + sum(step.added_cost for step in chosen) if remaining <= noise else inf
        )
        return Filling({**self.start.forms, **reached}, cost, max(remaining, 0.0)), chosen

    def find_most_accurate(self, cost: float) -> Filling | None:
        """Return a filling of at most this cost with little noise: steps in order, where they fit.

        None if the cheapest filling costs more.
        """
        spent, remaining = self.start.cost, self.start.noise
        if spent > cost:
            return None
        reached = dict(self.start.forms)
        for step in self.steps:
            if reached[step.op] is step.before and spent + step.added_cost <= cost:
                reached[step.op] = step.after
                spent, remaining = spent + step.added_cost, remaining - step.noise_reduction
        return Filling(reached, spent, max(remaining, 0.0))


def _lower_hull(forms: Iterable[Form]) -> list[Form]:
    """Return the forms that some price of noise makes the best, cheapest first."""
    hull: list[Form] = []
    for form in sorted(forms, key=lambda form: (form.cost, form.noise)):
        if hull and form.noise >= hull[-1].noise:
            continue
        while len(hull) > 1 and _gain_per_cost(hull[-2], hull[-1]) <= _gain_per_cost(
            hull[-1], form
        ):
            hull.pop()
        hull.append(form)
    return hull


def _gain_per_cost(start: Form, end: Form) -> float:
    return (start.noise - end.noise) / max(end.cost - start.cost, 1e-300)
