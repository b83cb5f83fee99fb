"""Times of single conversions, from a plan that has as many as possible."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import replace

import numpy as np

from neural_mp.core.op_timings import OpTimings
from neural_mp.core.precision import Precision
from neural_mp.profiling import interleaved_medians
from neural_mp.space import ResolvedPlan, TuningSpace
from neural_mp.tuning.measurement.conversions import conversions_of
from neural_mp.tuning.measurement.op_timing import Timed, all_in, kernels

#: Minimum time that ops lose in INT8 together, as a fraction of FP32's, for plans that consist of
#: conversions to matter.
_MIN_LOSS_RATIO = 0.05
#: Exceeds the caches of a core.
_MANY_VALUES = 1 << 21


def loses_in_int8(times: OpTimings) -> bool:
    """Whether INT8 slows down ops by much, so that the fastest plan converts between ops."""
    pairs = [by for by in times.ops.values() if {Precision.FP32, Precision.INT8} <= by.keys()]
    lost = sum(max(0.0, by[Precision.INT8] - by[Precision.FP32]) for by in pairs)
    return times.whole is not None and lost > _MIN_LOSS_RATIO * times.whole


def weights_in_int8(space: TuningSpace) -> ResolvedPlan:
    """Return the plan with INT8 in ops with weights only: most tensors between are converted."""
    return all_in(Precision.INT8, space, {op.name for op in space.graph if op.weights})


def with_conversions(
    space: TuningSpace, times: OpTimings, mixed: Timed, elements: Mapping[str, float]
) -> OpTimings:
    """Return times with those of the conversions in a plan that has many.

    A model in one precision has hardly any, and of other sizes. The additional time of an op in the
    plan, over a model in the op's precision, is that of converting what the op reads: runtimes
    convert in the op's kernel, or next to it. Other tensors take as long per element.

    Args:
        space: the space of the plan.
        times: times of ops in FP32 and lower precisions.
        mixed: the plan.
        elements: tensor → number of elements, as far as known.
    """
    effective = mixed.plan.effective
    more = {
        op: max(0.0, mixed.duration(names).seconds - baseline)
        for op, names in kernels(space).items()
        if (baseline := times.ops.get(op, {}).get(effective[op])) is not None
    }
    seconds: dict[str, float] = defaultdict(float)
    for conversion in conversions_of(space.graph, mixed.plan.flow, mixed.profile):
        seconds[conversion.source] += (conversion.seconds or 0.0) + sum(
            more.get(r, 0.0) for r in conversion.readers
        )
    count = sum(elements.get(tensor, 0.0) for tensor in seconds)
    if not count:
        return times
    per_element = sum(seconds.values()) / count
    return replace(times, conversion=0.0, per_element=per_element, conversions=dict(seconds))


def seconds_per_element() -> float:
    """Return the seconds per element to read float32 and write INT8 on this machine."""
    values = np.zeros(_MANY_VALUES, np.float32)

    def run() -> None:
        values.astype(np.uint8)

    return interleaved_medians([run], iterations=7)[0] / _MANY_VALUES
