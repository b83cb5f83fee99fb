"""Activation memory of one run, computed from the graph and a plan."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import accumulate

from neural_mp.core.precision import Precision
from neural_mp.space.resolution import ResolvedPlan
from neural_mp.space.space import TuningSpace

#: Bytes per element; INT8 ops write floats unless the flow lists their output as INT8.
_BYTES = dict.fromkeys(Precision, 4) | {Precision.BF16: 2, Precision.FP16: 2}


def peak_activation_bytes(
    space: TuningSpace, plan: ResolvedPlan, values: Mapping[str, float]
) -> int:
    """Return the peak of the activation memory of one run, in bytes.

    Ops run in the order of the graph. A tensor is live from the op that writes it to the last op
    that reads it; outputs of the graph stay live to the end. A float tensor read by an INT8 kernel
    needs a quantized copy; tensors inside one INT8 kernel need no memory. Scratch memory of kernels
    and the reserves of an allocator are not counted.

    Args:
        space: the graph, and the emulated precisions: their tensors stay in FP32.
        plan: the precision of every op.
        values: op or graph input → number of elements for the batch; missing entries (integers,
            flags) count as empty.
    """
    steps = {op.name: index for index, op in enumerate(space.graph)}
    change = [0.0] * (len(steps) + 1)
    for first, last, size in _iterate_tensor_lifetimes(space, plan, values, steps):
        change[first] += size
        change[last + 1] -= size
    return round(max(accumulate(change, initial=0.0)))


def _iterate_tensor_lifetimes(
    space: TuningSpace, plan: ResolvedPlan, values: Mapping[str, float], steps: Mapping[str, int]
) -> Iterator[tuple[int, int, float]]:
    """Yield first step, last step and bytes of every tensor and every quantized copy."""
    graph, end = space.graph, len(steps) - 1
    outputs = set(graph.outputs)
    for name in (*graph.inputs, *steps):
        count = values.get(name, 0.0)
        if not count:
            continue
        written = steps.get(name, 0)
        readers = graph.consumer_names(name)
        # In the body of a loop, a reader can precede its writer.
        last = max((steps[reader] for reader in readers), default=written)
        last = end if name in outputs else max(last, written)
        if name not in steps or not _within_a_kernel(space, plan, name, readers):
            yield written, last, count * _bytes_per_element(space, plan, name)
        quantized = [steps[r] for r in readers if name in plan.flow.int8_reads.get(r, ())]
        if quantized and name not in plan.flow.int8_outputs:
            yield min(quantized), max(quantized), count


def _bytes_per_element(space: TuningSpace, plan: ResolvedPlan, name: str) -> int:
    if name in plan.flow.int8_outputs:
        return 1
    precision = plan.effective.get(name, Precision.FP32)
    if name in plan.effective and precision in space.capabilities[name].emulated:
        return _BYTES[Precision.FP32]
    return _BYTES[precision]


def _within_a_kernel(
    space: TuningSpace, plan: ResolvedPlan, name: str, readers: Sequence[str]
) -> bool:
    """Whether the INT8 kernel that writes a tensor is also its only reader."""

    def find_int8_kernel(op: str) -> str | None:
        in_int8 = plan.effective.get(op) is Precision.INT8
        return (space.graph[op].fusion_group or op) if in_int8 else None

    own = find_int8_kernel(name)
    if own is None or name in space.graph.outputs or not readers:
        return False
    return all(find_int8_kernel(reader) == own for reader in readers)
