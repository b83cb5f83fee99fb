"""The road of a resolved plan, the same for every framework: repair, ranges, write.

Beside it stand the two shorter roads: what calibration sees, and how long every op takes.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator
from typing import Any, TypeVar

from neural_mp.adaptors.common.adaptor_protocol import Framework
from neural_mp.adaptors.common.calibration import Observer, summarize
from neural_mp.adaptors.common.corrections import apply_corrections
from neural_mp.adaptors.common.optional import OpTiming
from neural_mp.core.graph import OpGraph
from neural_mp.core.observations import Observations, Range
from neural_mp.core.plan import PrecisionPlan
from neural_mp.core.precision import OpConfig
from neural_mp.core.quantization_flow import QuantizationFlow, observable_tensors
from neural_mp.errors import ConversionError, PlanError
from neural_mp.space import ResolvedPlan, TuningSpace
from neural_mp.util.pytree import batch_size_of


def first_readers(flow: QuantizationFlow, plan: PrecisionPlan) -> dict[str, OpConfig]:
    """Quantized tensor → the config of the first op that reads it and says how.

    Tensors that share a scale stand under the one whose scale it is (`QuantizationFlow.root`).
    """
    found: dict[str, OpConfig] = {}
    for op, sources in flow.int8_reads.items():
        config = plan.get(op)
        if config is not None and config.activation is not None:
            for source in sources:
                found.setdefault(flow.scale_owner[source], config)
    return found


def quantized_ranges(
    graph: OpGraph, plan: ResolvedPlan, observations: Observations
) -> dict[str, Range]:
    """Quantized tensor → the range that its scale has to hold.

    Where several tensors share a scale, their ranges are joined. The algorithm is the one that
    the first reader asks for, or else the op that writes the tensor.

    Raises:
        ConversionError: a tensor that must be quantized was never observed.
    """
    flow, readers = plan.flow, first_readers(plan.flow, plan.plan)
    found = {}
    for root in dict.fromkeys(flow.scale_owner.values()):
        _refuse_split(graph, root, plan.plan)
        config = readers.get(root) or _writer(graph, root, plan.plan)
        asked = config.activation.algorithm if config and config.activation else "minmax"
        ranges = [_observed(tensor, asked, observations) for tensor in flow.scale_members[root]]
        found[root] = (min(low for low, _ in ranges), max(high for _, high in ranges))
    return found


def _refuse_split(graph: OpGraph, tensor: str, plan: PrecisionPlan) -> None:
    """Raises `PlanError` where a plan cuts apart what one integer kernel runs."""
    if tensor not in graph or not graph[tensor].writes_int8:
        return
    for op in graph.consumers(tensor):
        if op.fusion_group == tensor and op.name in plan:
            raise PlanError(
                f"the plan has {tensor!r} in int8 and {op.name!r} in "
                f"{plan[op.name].precision}, but one integer kernel runs both; put both into one "
                f"precision"
            )


def _writer(graph: OpGraph, tensor: str, plan: PrecisionPlan) -> OpConfig | None:
    if tensor not in graph:
        return None
    return plan.get(graph[tensor].fusion_group or tensor)


def _observed(tensor: str, algorithm: str, observations: Observations) -> Range:
    try:
        return observations.ranges[tensor][algorithm]
    except KeyError:
        raise ConversionError(
            f"tensor {tensor!r} must be quantized, but its {algorithm} range was never "
            f"observed; calibrate first, or give a plan file that holds its observations"
        ) from None


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
    if not plan.has_low_precision:
        return model
    mended, seen = apply_corrections(adaptor, model, plan.plan, observations, space)
    ranges = quantized_ranges(space.graph, plan, seen)
    return adaptor.convert_graph(mended, plan, ranges)


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
            samples += batch_size_of(batch)
            yield batch

    tensors = observable_tensors(space.graph, space.int8_ops)
    found: defaultdict[str, Observer] = defaultdict(Observer)
    for name, summary in adaptor.observe_tensors(model, counted(), tensors):
        found[name].take(summary)
    return summarize(found, samples)


def profile(timing: OpTiming[M], model: M, inputs: Any) -> dict[str, float]:
    """Op, or conversion by a name of its own → seconds of its fastest run, after a few to warm up.

    What else the machine does only ever adds to a run.
    """
    taken = timing.time_ops(model, inputs, WARM_UP_RUNS + TIMED_RUNS)
    return {op: min(seconds[-TIMED_RUNS:]) for op, seconds in taken.items()}
