"""The memory that the activations of one run take, told from the graph and a plan."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from neural_mp.core.precision import Precision
from neural_mp.space.resolution import ResolvedPlan
from neural_mp.space.space import TuningSpace

#: Bytes of a number that an op writes; an op in INT8 writes float numbers unless the flow says so.
_BYTES = {Precision.FP32: 4, Precision.BF16: 2, Precision.FP16: 2, Precision.INT8: 4}


def peak_activation_bytes(
    space: TuningSpace, plan: ResolvedPlan, values: Mapping[str, float]
) -> int:
    """The most bytes that activations take at any moment of a run.

    Ops run in the order of the graph. A tensor takes memory from the op that writes it to the last
    op that reads it; outputs of the graph take it to the end. A float tensor that an INT8 kernel
    reads takes a quantized copy beside it; what lies within one INT8 kernel takes nothing. Scratch
    memory of kernels is not counted, nor what an allocator keeps.

    Args:
        space: the graph, and which precisions are only emulated: their tensors stay in FP32.
        plan: what every op runs in.
        values: op or graph input → how many numbers it holds for the batch; what is left out
            (integers, flags) counts as empty.
    """
    steps = {op.name: index for index, op in enumerate(space.graph)}
    change = [0.0] * (len(steps) + 1)
    for first, last, size in _lifetimes(space, plan, values, steps):
        change[first] += size
        change[last + 1] -= size
    most = now = 0.0
    for added in change:
        now += added
        most = max(most, now)
    return round(most)


def _lifetimes(
    space: TuningSpace,
    plan: ResolvedPlan,
    values: Mapping[str, float],
    steps: Mapping[str, int],
) -> Iterator[tuple[int, int, float]]:
    """First and last step, and bytes, of every tensor and of every quantized copy."""
    graph, end = space.graph, len(steps) - 1
    kept = set(graph.outputs)
    for name in (*graph.inputs, *steps):
        count = values.get(name, 0.0)
        if not count:
            continue
        written = steps.get(name, 0)
        readers = graph.consumer_names(name)
        # The body of a loop may read what is written behind it.
        last = max((steps[reader] for reader in readers), default=written)
        last = end if name in kept else max(last, written)
        if name not in steps or not _within_a_kernel(space, plan, name, readers):
            yield written, last, count * _width(space, plan, name)
        quantized = [steps[r] for r in readers if name in plan.flow.int8_reads.get(r, ())]
        if quantized and name not in plan.flow.int8_outputs:
            yield min(quantized), max(quantized), count


def _width(space: TuningSpace, plan: ResolvedPlan, name: str) -> int:
    """Bytes a number of a tensor takes."""
    if name in plan.flow.int8_outputs:
        return 1
    precision = plan.effective.get(name, Precision.FP32)
    if name in plan.effective and precision in space.capabilities[name].emulated:
        return _BYTES[Precision.FP32]
    return _BYTES[precision]


def _within_a_kernel(
    space: TuningSpace, plan: ResolvedPlan, name: str, readers: Sequence[str]
) -> bool:
    """Whether the INT8 kernel that writes a tensor also is the only one that reads it."""

    def kernel(op: str) -> str | None:
        in_int8 = plan.effective.get(op) is Precision.INT8
        return (space.graph[op].fusion_group or op) if in_int8 else None

    own = kernel(name)
    if own is None or name in space.graph.outputs or not readers:
        return False
    return all(kernel(reader) == own for reader in readers)
