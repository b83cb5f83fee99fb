"""All plans of a space, by the precision of every decision."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence

from neural_mp.core.plan import PrecisionPlan
from neural_mp.core.precision import Precision
from neural_mp.space import TuningSpace
from neural_mp.strategies.basic import at_precision
from neural_mp.strategies.fallback import Decision

#: The precision of every decision, in the order of `TuningSpace.decisions`.
Combination = tuple[Precision, ...]


def levels(space: TuningSpace, ops: Decision) -> tuple[Precision, ...]:
    """The precisions that a decision can be put in: those of any of its ops, lowest first."""
    found = {p for op in ops for p in space.capabilities[op].precisions} | {Precision.FP32}
    return tuple(precision for precision in Precision if precision in found)


def plan_of(space: TuningSpace, combination: Combination) -> PrecisionPlan:
    """The plan that has every decision in its precision.

    An op that lacks the precision of its decision runs in FP32; one that has it only where the ops
    around it do is left out, and follows these.
    """
    plan = PrecisionPlan()
    for precision in dict.fromkeys(combination):
        chosen = (
            op
            for ops, level in zip(space.decisions, combination, strict=True)
            if level is precision
            for op in ops
        )
        plan = at_precision(space, plan, chosen, precision)
    return plan


def combinations(choices: Sequence[tuple[Precision, ...]]) -> Iterator[Combination]:
    """All of them: the lowest first, then with one decision raised, then with two, and so on.

    Args:
        choices: the levels of every decision, lowest first.
    """
    lowest = [levels[0] for levels in choices]
    for raised in range(len(choices) + 1):
        for places in itertools.combinations(range(len(choices)), raised):
            for higher in itertools.product(*(choices[place][1:] for place in places)):
                combination = list(lowest)
                for place, precision in zip(places, higher, strict=True):
                    combination[place] = precision
                yield tuple(combination)
