"""Optimal assignments: of levels to nodes by a minimum cut, and of forms to ops by a knapsack.

Levels are ordered, lowest first: precisions by their bits. A node has a time and a degradation at
every level; shared costs are paid once if any of several nodes lies below, or above, a bound. The
objective is time + weight · degradation. Two levels yield the ordinary s–t cut, several Ishikawa's
construction ("Exact optimization for Markov random fields with convex priors", PAMI 2003): one
variable per node and bound. The cut is exact.

A knapsack chooses one form per op: the least cost for a noise, or the least noise for a cost.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from math import inf, isfinite

import numpy as np
from scipy.sparse import csr_array
from scipy.sparse.csgraph import breadth_first_order, maximum_flow

from neural_mp.core.precision import OpConfig

#: SciPy's flow has 32 bits for capacities and for residuals, reverse flow included. So costs are
#: scaled to the first value, and uncuttable edges have the second, which exceeds the sum of all
#: costs.
_FINITE, _INFINITE = 2**29, 2**30

#: Relative weight of the secondary cost, which only breaks ties.
_TIE_BREAK_WEIGHT = 1e-5

Node = Hashable
#: Time and degradation.
Cost = tuple[float, float]
_FORBIDDEN_COST: Cost = (inf, 0.0)
#: Number of steps that are left out in turn, those with the largest costs.
_LEFT_OUT = 64
#: Savings below this fraction of the cost end the search for steps to leave out, and so do as many
#: steps: the cost may fall in thousands of small savings, each after a search over all steps.
_LEAST_SAVING, MAX_LEFT_OUT = 0.0005, 32


@dataclass(frozen=True)
class SharedCost:
    """A cost that is paid once for several nodes.

    The cost applies if any of `any_of` lies on one side of a bound and `and_not`, if given, lies on
    the other.

    Attributes:
        cost: time and degradation, not negative.
        bound: between the levels `bound - 1` and `bound`.
        any_of: nodes.
        below: whether the side is below the bound, or above.
        and_not: a node that must lie on the other side; None sets no such condition.
    """

    cost: Cost
    bound: int
    any_of: tuple[Node, ...]
    below: bool = True
    and_not: Node | None = None

    def applies_to(self, levels: Mapping[Node, int]) -> bool:
        """Whether an assignment pays the cost."""
        matched = any((levels[node] < self.bound) is self.below for node in self.any_of)
        if self.and_not is None or not matched:
            return matched
        return (levels[self.and_not] < self.bound) is not self.below


@dataclass(frozen=True)
class Assignment:
    """An assignment problem.

    Attributes:
        costs: node → time and degradation at every level; infinite time if the level is forbidden.
        shared: additional costs of several nodes.
    """

    costs: Mapping[Node, tuple[Cost, ...]]
    shared: Sequence[SharedCost] = ()

    def evaluate_cost(self, levels: Mapping[Node, int]) -> Cost:
        """Return the time and the degradation of an assignment."""
        paid = [costs[levels[node]] for node, costs in self.costs.items()]
        paid += [item.cost for item in self.shared if item.applies_to(levels)]
        return sum(time for time, _ in paid), sum(degradation for _, degradation in paid)


class CutSolver:
    """Solves one assignment problem for any weight of the degradation.

    Variable `(node, bound)` is on the source side if the node lies below the bound.

    Args:
        problem: the assignment problem.

    Raises:
        ValueError: all levels of a node are forbidden, or the numbers of levels differ.
    """

    def __init__(self, problem: Assignment) -> None:
        self.nodes = list(problem.costs)
        self.index = {node: index for index, node in enumerate(self.nodes)}
        count = len(problem.costs[self.nodes[0]]) if self.nodes else 1
        for node, costs in problem.costs.items():
            if len(costs) != count or not any(isfinite(time) for time, _ in costs):
                raise ValueError(f"node {node!r} must have {count} costs, one finite, got {costs}")
        self.bounds = count - 1
        self.size = len(self.nodes) * self.bounds + 2
        self.source, self.sink = self.size - 2, self.size - 1
        self._edges: list[tuple[int, int]] = []
        self._costs: list[Cost] = []
        if self.bounds:
            for node, costs in problem.costs.items():
                self._add_node(self.index[node], costs)
            for item in problem.shared:
                if any(item.cost):
                    self._add_shared_cost(item)
        self.ends = np.asarray(self._edges, np.int32).reshape(-1, 2).T
        self.times, self.degradations = np.asarray(self._costs, float).reshape(-1, 2).T

    def find_best_levels(self, weight: float) -> dict[Node, int]:
        """Return node → level with the least time + weight · degradation; ties: highest levels.

        With an infinite weight, the fastest of the assignments with the least degradation; with
        zero, the least degradation of the fastest ones. Exact up to rounding of costs to 2⁻²⁹ of
        their sum.
        """
        if not self.bounds:
            return dict.fromkeys(self.nodes, 0)
        low = self._find_source_side(self._weigh_costs_at(weight))
        below = low[: len(self.nodes) * self.bounds].reshape(-1, self.bounds).sum(axis=1)
        return dict(zip(self.nodes, (self.bounds - below).tolist(), strict=True))

    def _add_edge(self, start: int, end: int, cost: Cost) -> None:
        self._edges.append((start, end))
        self._costs.append(cost)

    def _get_variable_index(self, node: Node, bound: int) -> int:
        return self.index[node] * self.bounds + bound - 1

    def _add_node(self, index: int, costs: tuple[Cost, ...]) -> None:
        """Add source → highest bound → … → lowest bound → sink: cut once, at the node's level."""
        first = index * self.bounds
        chain = [self.sink, *range(first, first + self.bounds), self.source]
        for level, cost in enumerate(costs):
            self._add_edge(chain[level + 1], chain[level], cost)
        for bound in range(1, self.bounds):  # below a bound: also below all higher ones
            self._add_edge(chain[bound], chain[bound + 1], _FORBIDDEN_COST)

    def _add_shared_cost(self, item: SharedCost) -> None:
        """Add an extra variable that any of the nodes pulls to its side, at the shared cost."""
        extra = self.size
        self.size += 1
        end = self.sink if item.below else self.source
        if item.and_not is not None:
            end = self._get_variable_index(item.and_not, item.bound)
        for node in item.any_of:
            mine = self._get_variable_index(node, item.bound)
            self._add_edge(*((mine, extra) if item.below else (extra, mine)), _FORBIDDEN_COST)
        self._add_edge(*((extra, end) if item.below else (end, extra)), item.cost)

    def _weigh_costs_at(self, weight: float) -> np.ndarray:
        costs = np.full(len(self.times), inf)
        finite = np.isfinite(self.times)
        times, degradations = self.times[finite], self.degradations[finite]
        if weight == 0:
            costs[finite] = times + degradations * _tie_break_weight(times, degradations)
        elif weight == inf:
            costs[finite] = degradations + times * _tie_break_weight(degradations, times)
        else:
            costs[finite] = times + weight * degradations
        return costs

    def _find_source_side(self, costs: np.ndarray) -> np.ndarray:
        """Return which variables are on the source side, in the cut with the fewest of them."""
        finite = np.isfinite(costs)
        scale = _FINITE / (float(costs[finite].sum()) or 1.0)
        capacities = np.full(len(costs), _INFINITE)
        capacities[finite] = np.rint(costs[finite] * scale)
        graph = csr_array((capacities, tuple(self.ends)), shape=(self.size, self.size))
        graph.data = np.minimum(graph.data, _INFINITE).astype(np.int32)
        flow = maximum_flow(graph, self.source, self.sink).flow
        residual = graph - flow
        residual.eliminate_zeros()
        reachable = np.zeros(self.size, bool)
        reachable[breadth_first_order(residual, self.source, return_predecessors=False)] = True
        return reachable


def _tie_break_weight(main: np.ndarray, secondary: np.ndarray) -> float:
    """Return the weight at which other costs only break ties of the main ones."""
    return float(main.sum() or 1.0) / float(secondary.sum() or 1.0) * _TIE_BREAK_WEIGHT


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

    @property
    def highest_cost(self) -> float:
        """The cost of the largest form of every op."""
        return self.start.cost + sum(step.added_cost for step in self.steps)

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
