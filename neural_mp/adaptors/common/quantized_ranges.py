"""The range every quantized tensor is stored with, from a plan and what calibration saw."""

from __future__ import annotations

from neural_mp.core.graph import OpGraph
from neural_mp.core.observations import Observations, Range
from neural_mp.core.plan import PrecisionPlan
from neural_mp.core.precision import OpConfig
from neural_mp.core.quantization_flow import QuantizationFlow
from neural_mp.errors import ConversionError, PlanError
from neural_mp.space import ResolvedPlan


def first_readers(flow: QuantizationFlow, plan: PrecisionPlan) -> dict[str, OpConfig]:
    """Quantized tensor → the config of the first op that reads it and says how.

    Tensors that share a scale stand under the one whose scale it is (`QuantizationFlow.root`).
    """
    found: dict[str, OpConfig] = {}
    for op, sources in flow.int8_reads.items():
        config = plan.get(op)
        if config is not None and config.activation is not None:
            for source in sources:
                found.setdefault(flow.root[source], config)
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
    for root in dict.fromkeys(flow.root.values()):
        _refuse_split(graph, root, plan.plan)
        config = readers.get(root) or _writer(graph, root, plan.plan)
        asked = config.activation.algorithm if config and config.activation else "minmax"
        ranges = [_observed(tensor, asked, observations) for tensor in flow.covers[root]]
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
