"""Weights of 4 bits or less in a search: where they take part, and whether they met the target."""

from __future__ import annotations

from collections.abc import Collection, Generator
from dataclasses import replace

from neural_mp.core.enums import is_latency_only
from neural_mp.core.plan import PrecisionPlan
from neural_mp.core.precision import Precision
from neural_mp.core.trial import Trial
from neural_mp.strategies.base import Search, TuningProblem


def without_slow_low_bits(problem: TuningProblem) -> TuningProblem:
    """Return the problem without INT4 if other precisions compute the same ops in less time.

    Kernels for 4 bits win where weights are read for a few rows, as in decoding, and lose to INT8
    for many rows. Size counts for the other objectives, so INT4 then stays, as it does without
    INT8 or without measured times. With a workload, the times of a batch do not decide.
    """
    space, usable = problem.space, problem.space.usable_precisions
    if problem.workload is not None:
        return problem
    if not {Precision.INT4, Precision.INT8} <= {*usable} or not is_latency_only(problem.objectives):
        return problem
    times = problem.probe.times().ops
    able = [op for op in space.tunable_ops if space.choice(op, Precision.INT4) is not None]
    measured = [times[op] for op in able if Precision.INT4 in times.get(op, {})]
    low = sum(by_precision[Precision.INT4] for by_precision in measured)
    rest = sum(
        min((s for p, s in by_precision.items() if p is not Precision.INT4), default=0.0)
        for by_precision in measured
    )
    if not measured or low < rest:
        return problem
    return without(problem, [Precision.INT4])


def without(problem: TuningProblem, precisions: Collection[Precision]) -> TuningProblem:
    """Return the problem without some precisions."""
    if not precisions:
        return problem
    remaining = {*problem.space.usable_precisions}.difference(precisions)
    return replace(problem, space=problem.space.restricted_to(remaining))


def has_met(search: Search) -> Generator[list[PrecisionPlan], list[Trial], bool]:
    """Run a search, and return whether a plan besides FP32 met the accuracy target."""
    met, fp32 = False, {Precision.FP32}
    try:
        plans = next(search)
        while True:
            trials = yield plans
            met = met or any(t.meets_accuracy and {*t.plan.counts()} != fp32 for t in trials)
            plans = search.send(trials)
    except StopIteration:
        return met
