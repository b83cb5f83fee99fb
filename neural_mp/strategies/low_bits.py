"""Choice between weights of 4 bits and INT8 for the objective latency, from measured times."""

from __future__ import annotations

from dataclasses import replace

from neural_mp.core.enums import is_latency_only
from neural_mp.core.precision import Precision
from neural_mp.strategies.base import TuningProblem


def without_slow_low_bits(problem: TuningProblem) -> TuningProblem:
    """Return the problem without INT4 if other precisions compute the same ops in less time.

    Kernels for 4 bits win where weights are read for a few rows, as in decoding, and lose to INT8
    for many rows. Size counts for the other objectives, so INT4 then stays, as it does without
    INT8 or without measured times.
    """
    space, usable = problem.space, problem.space.usable_precisions
    if not {Precision.INT4, Precision.INT8} <= {*usable} or not is_latency_only(problem.objectives):
        return problem
    times = problem.probe.times().ops
    able = [op for op in space.tunable_ops if space.choice(op, Precision.INT4) is not None]
    measured = [times[op] for op in able if Precision.INT4 in times.get(op, {})]
    low = sum(found[Precision.INT4] for found in measured)
    others = sum(
        min((s for p, s in found.items() if p is not Precision.INT4), default=0.0)
        for found in measured
    )
    if not measured or low < others:
        return problem
    return replace(problem, space=space.restricted_to({*usable} - {Precision.INT4}))
