"""What strategies share that put decisions back to a higher precision, worst first."""

from __future__ import annotations

import itertools
from collections.abc import Generator, Iterable, Iterator, Sequence
from itertools import zip_longest

from neural_mp.core.plan import PrecisionPlan
from neural_mp.core.precision import Precision
from neural_mp.core.trial import Trial
from neural_mp.space import TuningSpace
from neural_mp.strategies.base import TuningProblem
from neural_mp.strategies.basic import at_precision, lowered_ops

#: Ops that move together (see `TuningSpace.decisions`).
Decision = tuple[str, ...]


def low_decisions(problem: TuningProblem, plan: PrecisionPlan) -> list[Decision]:
    """The decisions that a plan has in a lower precision, in the graph's order."""
    low = set(lowered_ops(problem, plan))
    return [ops for ops in problem.space.decision_groups if not low.isdisjoint(ops)]


def noise_read(problem: TuningProblem, ops: Iterable[str]) -> float:
    """The noise that calibration saw in the quantized tensors that some ops read."""
    readers = set(ops)
    return sum(
        problem.observations.nsr.get(tensor.name, 0.0)
        for tensor in problem.space.tensors
        if not readers.isdisjoint(tensor.consumers)
    )


def output_noises(
    problem: TuningProblem, plans: Iterable[PrecisionPlan], alone: Iterable[str | None] = ()
) -> list[float] | None:
    """The noise at the outputs of every plan; None if the probe leaves one of them unknown.

    All or none, because nothing else that is known compares with this noise.

    Args:
        problem: what is searched.
        plans: the plans.
        alone: for every plan, what alone is in a lower precision in it; empty where there are
            several.
    """
    noises = []
    for plan, name in zip_longest(plans, alone):
        noise = problem.probe.output_noise(plan, name)
        if noise is None:
            return None
        noises.append(noise)
    return noises


def fall_back_one_by_one(
    problem: TuningProblem,
    base: PrecisionPlan,
    order: Sequence[Decision],
    target: Precision,
) -> Generator[list[PrecisionPlan], list[Trial], bool]:
    """One decision after the other back to a higher precision, those before it included.

    Args:
        problem: what is searched.
        base: the plan that missed the target.
        order: the decisions, first things first.
        target: the precision to go back to.

    Returns:
        Whether the target was met, with which it ends.
    """
    plan = base
    before = problem.space.resolve(base)
    for ops in order:
        plan = at_precision(problem.space, plan, ops, target)
        resolved = problem.space.resolve(plan)
        if not resolved.has_low_precision:
            return False
        if resolved == before:
            continue
        before = resolved
        (trial,) = yield [plan]
        if trial.met:
            return True
    return False


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
            for ops, level in zip(space.decision_groups, combination, strict=True)
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
