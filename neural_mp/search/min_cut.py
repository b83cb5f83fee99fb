"""Exact minimum-cost assignment of levels to nodes, by minimum cut.

Levels are ordered, lowest first: precisions by their bits. A node has a time and a degradation at
every level; shared costs are paid once if any of several nodes lies below, or above, a bound. The
objective is time + weight · degradation. Two levels yield the ordinary s–t cut, several Ishikawa's
construction ("Exact optimization for Markov random fields with convex priors", PAMI 2003): one
variable per node and bound.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from math import inf, isfinite

import numpy as np
from scipy.sparse import csr_array
from scipy.sparse.csgraph import breadth_first_order, maximum_flow

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
