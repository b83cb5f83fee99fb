"""Decisions (groups of ops with one precision): sensitivity, fallback and enumeration."""

from __future__ import annotations

import itertools
import logging
from collections.abc import Generator, Iterable, Iterator, Sequence

from neural_mp.core.plan import PrecisionPlan
from neural_mp.core.precision import Precision
from neural_mp.core.trial import Trial
from neural_mp.space import ResolvedPlan, TuningSpace
from neural_mp.strategies.base import TuningProblem
from neural_mp.strategies.basic import list_lowered_ops, set_op_precision

logger = logging.getLogger(__name__)

#: Ops that change precision together (see `TuningSpace.decision_groups`).
Decision = tuple[str, ...]
#: Least weights of a layer that may end a branch of the head; fixed sums of boxes have fewer.
_MIN_LAYER_WEIGHTS = 64


def list_low_decisions(problem: TuningProblem, plan: PrecisionPlan) -> list[Decision]:
    """Return the decisions with an op in a lower precision, in the graph's order."""
    low = set(list_lowered_ops(problem, plan))
    return [ops for ops in problem.space.decision_groups if not low.isdisjoint(ops)]


def sum_input_noise(problem: TuningProblem, ops: Iterable[str]) -> float:
    """Return the summed NSR of the quantized tensors that some ops read."""
    readers = set(ops)
    return sum(
        problem.observations.nsr.get(tensor.name, 0.0)
        for tensor in problem.space.tensors
        if not readers.isdisjoint(tensor.consumers)
    )


def measure_output_noises(
    problem: TuningProblem, plans: Iterable[PrecisionPlan], units: Iterable[str | None] = ()
) -> list[float] | None:
    """Return the output noise of every plan; None if that of any plan is unavailable.

    All or none, because output noise is not comparable with any other measure. `units` names the
    only tensor or op in lower precision for every plan (see `Probe.output_noise`).
    """
    noises = []
    for plan, name in itertools.zip_longest(plans, units):
        noise = problem.probe.output_noise(plan, name)
        if noise is None:
            return None
        noises.append(noise)
    return noises


def fall_back_one_by_one(
    problem: TuningProblem, base: PrecisionPlan, order: Sequence[Decision], target: Precision
) -> Generator[list[PrecisionPlan], list[Trial], bool]:
    """Let one decision after the other fall back, cumulatively, until the target is met.

    Returns:
        Whether a plan met the target.
    """
    plan = base
    previous = problem.space.resolve(base)
    for ops in order:
        plan = set_op_precision(problem.space, plan, ops, target)
        resolved = problem.space.resolve(plan)
        if not resolved.has_low_precision:
            return False
        if resolved == previous:
            continue
        previous = resolved
        (trial,) = yield [plan]
        if trial.met:
            return True
    return False


#: The precision of every decision, in the order of `TuningSpace.decision_groups`.
Combination = tuple[Precision, ...]


def decision_levels(space: TuningSpace, ops: Decision) -> tuple[Precision, ...]:
    """Return the precisions that any op of a decision supports, lowest first."""
    supported = {p for op in ops for p in space.capabilities[op].precisions} | {Precision.FP32}
    return tuple(precision for precision in Precision if precision in supported)


def plan_of(space: TuningSpace, combination: Combination) -> PrecisionPlan:
    """Return the plan with every decision in its precision.

    An op without support for the precision of its decision runs in FP32; an op that can only follow
    its neighbours is left out.
    """
    plan = PrecisionPlan()
    for precision in dict.fromkeys(combination):
        chosen = (
            op
            for ops, level in zip(space.decision_groups, combination, strict=True)
            if level is precision
            for op in ops
        )
        plan = set_op_precision(space, plan, chosen, precision)
    return plan


#: Combinations in a row without a new plan after which an enumeration ends: each decision that has
#: no effect of its own, as of an op with no neighbour to follow, doubles the repetitions.
MAX_REPEATED_COMBINATIONS = 1000


class NewPlans:
    """The plans of combinations, each plan once, as far as some op runs in a lower precision.

    Two combinations are the same plan if they differ only in ops with no neighbour to follow.
    """

    def __init__(self, space: TuningSpace) -> None:
        self._space = space
        self._tried: set[ResolvedPlan] = set()
        self._repeated = 0

    def make_new_plan(self, combination: Combination) -> PrecisionPlan | None:
        """Return the plan of a combination; None if it is not new, or all of FP32."""
        plan = plan_of(self._space, combination)
        resolved = self._space.resolve(plan)
        if resolved in self._tried or not resolved.has_low_precision:
            self._repeated += 1
            if self.is_exhausted:
                logger.warning(
                    "the search ended after %d combinations of precisions in a row without a new "
                    "plan",
                    self._repeated,
                )
            return None
        self._tried.add(resolved)
        self._repeated = 0
        return plan

    @property
    def is_exhausted(self) -> bool:
        """Whether too many combinations in a row were not new."""
        return self._repeated >= MAX_REPEATED_COMBINATIONS


def iterate_combinations(choices: Sequence[tuple[Precision, ...]]) -> Iterator[Combination]:
    """Yield all combinations: the lowest first, then with one decision raised, with two, and so on.

    `choices` holds the levels of every decision, lowest first.
    """
    lowest = [levels[0] for levels in choices]
    for raised in range(len(choices) + 1):
        for positions in itertools.combinations(range(len(choices)), raised):
            for higher in itertools.product(*(choices[position][1:] for position in positions)):
                combination = list(lowest)
                for position, precision in zip(positions, higher, strict=True):
                    combination[position] = precision
                yield tuple(combination)


def list_head_branches(space: TuningSpace) -> list[frozenset[str]]:
    """Return the ops of each branch of the head, such as the boxes and the scores of a detector.

    The last layers end the branches; those of one type and number of weights are one branch, such
    as the boxes of all levels. A branch has the ops whose results reach its ends only. Empty for a
    model with a single branch.
    """
    graph = space.graph
    layers = {
        op
        for op in space.tunable_ops
        if graph[op].weights >= _MIN_LAYER_WEIGHTS
        and not (graph[op].joins_int8 or graph[op].quantize_agnostic)
    }
    ends: dict[str, frozenset[tuple[str, int]]] = {}
    for op in reversed(list(graph)):
        reached = [ends.get(name, frozenset()) for name in graph.consumer_names(op.name)]
        own = {(op.type, op.weights)} if op.name in layers else ()
        ends[op.name] = frozenset().union(*reached) or frozenset(own)
    branches: dict[tuple[str, int], set[str]] = {}
    for name, kinds in ends.items():
        if len(kinds) == 1:
            branches.setdefault(next(iter(kinds)), set()).add(name)
    return list(map(frozenset, branches.values())) if len(branches) > 1 else []
