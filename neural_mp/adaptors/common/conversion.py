"""The road of a resolved plan, the same for every framework: repair, ranges, write.

Beside it stand the two shorter roads: what calibration sees, and how long every op takes.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator
from typing import Any, TypeVar

from neural_mp.adaptors.common.adaptor_protocol import Framework
from neural_mp.adaptors.common.calibration import TensorStatistics, summarize
from neural_mp.adaptors.common.corrections import repaired
from neural_mp.adaptors.common.quantized_ranges import quantized_ranges
from neural_mp.core.observations import Observations
from neural_mp.core.quantization_flow import observable_tensors
from neural_mp.space import ResolvedPlan, TuningSpace
from neural_mp.util.pytree import count_samples

M = TypeVar("M")

#: How often ops are timed, after so many runs to warm up.
TIMED_RUNS, WARM_UP_RUNS = 5, 2


def convert(
    adaptor: Framework[M],
    model: M,
    plan: ResolvedPlan,
    observations: Observations,
    space: TuningSpace,
) -> M:
    """The model in the precisions of a plan; the model itself where the plan lowers nothing.

    Raises:
        ConversionError: a quantized tensor was never observed, or the framework refuses.
        PlanError: an op cannot be repaired as the plan says.
    """
    if not plan.lowers:
        return model
    mended, seen = repaired(adaptor, model, plan.plan, observations, space)
    ranges = quantized_ranges(space.graph, plan, seen)
    return adaptor.write(mended, plan, ranges)


def observe(
    adaptor: Framework[M], model: M, batches: Iterable[Any], space: TuningSpace
) -> Observations:
    """What one pass over calibration inputs sees of every tensor that may be quantized.

    Raises:
        ConversionError: a tensor held NaN or Inf.
    """
    samples = 0

    def counted() -> Iterator[Any]:
        nonlocal samples
        for batch in batches:
            samples += count_samples(batch)
            yield batch

    tensors = observable_tensors(space.graph, space.int8_ops)
    found: defaultdict[str, TensorStatistics] = defaultdict(TensorStatistics)
    for name, summary in adaptor.watch(model, counted(), tensors):
        found[name].take(summary)
    return summarize(found, samples)


def profile(adaptor: Framework[M], model: M, inputs: Any) -> dict[str, float]:
    """Op, or conversion by a name of its own → seconds of its fastest run, after a few to warm up.

    What else the machine does only ever adds to a run.
    """
    taken = adaptor.time_ops(model, inputs, WARM_UP_RUNS + TIMED_RUNS)
    return {op: min(seconds[-TIMED_RUNS:]) for op, seconds in taken.items()}
