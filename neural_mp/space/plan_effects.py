"""Effects of a plan: effective precision of every op, its reason as text, and activation memory."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, ClassVar

from neural_mp.core.enums import Approach
from neural_mp.core.graph import Op, OpGraph
from neural_mp.core.plan import PrecisionPlan
from neural_mp.core.precision import CPU_PRECISIONS, Precision
from neural_mp.core.quantization_flow import QuantizationFlow
from neural_mp.space.capability import Capability
from neural_mp.space.resolution import BY_PLAN, ResolvedPlan
from neural_mp.space.space import TuningSpace
from neural_mp.util.json_fields import Count, JsonFields

#: Bytes per element; INT8 ops write floats unless the flow lists their output as INT8.
_BYTES = dict.fromkeys(Precision, 4) | {Precision.BF16: 2, Precision.FP16: 2}


@dataclass(frozen=True)
class Reason(JsonFields):
    """The reason why ops of a model are ineligible for a precision.

    Attributes:
        types: op type → number of affected ops.
    """

    precision: Precision
    reason: str
    types: Mapping[str, Count]

    @property
    def num_ops(self) -> int:
        """The number of affected ops."""
        return sum(self.types.values())

    def to_dict(self) -> dict[str, Any]:
        """Return a JSON-compatible dict."""
        return {**super().to_dict(), "ops": self.num_ops}


def count_ineligible_reasons(
    space: TuningSpace, ops: Iterable[Op], precisions: Iterable[Precision] = CPU_PRECISIONS
) -> tuple[Reason, ...]:
    """Return the reasons for ineligible precisions of ops, the reason with the most ops first."""
    requested = list(precisions)
    counters: dict[tuple[Precision, str], Counter[str]] = {}
    for op in ops:
        for precision in requested:
            message = space.capabilities[op.name].refusal_reason(precision)
            if message is not None:
                counters.setdefault((precision, message), Counter())[op.type] += 1
    reasons = (Reason(*key, dict(types.most_common())) for key, types in counters.items())
    return tuple(sorted(reasons, key=lambda reason: -reason.num_ops))


_INSIDE = {
    Approach.DYNAMIC: "the kernel computes the ranges of its inputs on every run",
    Approach.WEIGHT_ONLY: "only the weight is stored in integers, and computation is in float",
}


def explain_int8_choice(
    graph: OpGraph,
    capabilities: Mapping[str, Capability],
    plan: PrecisionPlan,
    flow: QuantizationFlow,
    name: str,
) -> str:
    """Return the reason why an op runs in 8 bits or less under a plan, or does not run in INT8."""
    op = graph[name]
    if flow.effective[name].is_integer:
        return _explain_int8_use(graph, op, plan, flow)
    return _explain_missing_int8(graph, op, capabilities[name], plan, flow)


def _explain_int8_use(graph: OpGraph, op: Op, plan: PrecisionPlan, flow: QuantizationFlow) -> str:
    config = plan.get(op.name)
    if config is not None and config.approach in _INSIDE and config.weight is not None:
        return f"{BY_PLAN}: {_INSIDE[config.approach]}"
    if op.fusion_group is not None:
        return f"fused into the INT8 kernel of {op.fusion_group!r}"
    if op.quantize_agnostic:
        return "only moves values, which its neighbours read and write in INT8"
    reads = ", ".join(map(repr, sorted(flow.int8_reads.get(op.name, ())))) or "nothing"
    for reader in graph.consumers(op.name):
        if reader.fusion_group == op.name and flow.effective[reader.name] is Precision.INT8:
            return (
                f"{BY_PLAN}: reads {reads} quantized, and {reader.name!r} is fused into its kernel"
            )
    writes = "INT8" if op.name in flow.int8_outputs else "float"
    return f"{BY_PLAN}: reads {reads} quantized and writes {writes}"


def _explain_missing_int8(
    graph: OpGraph, op: Op, capability: Capability, plan: PrecisionPlan, flow: QuantizationFlow
) -> str:
    config = plan.get(op.name)
    if op.fusion_group is not None:
        head = op.fusion_group
        if flow.effective.get(head) is not Precision.INT8:
            return f"can be fused into {head!r} only, which is not in INT8"
        return f"excluded by the plan from the INT8 kernel of {head!r}"
    if op.quantize_agnostic:
        return f"only moves values, and {_explain_missing_neighbours(graph, op, flow)}"
    refusal = capability.refusal_reason(Precision.INT8)
    if refusal is not None:
        return refusal
    if config is None or config.precision is not Precision.INT8:
        return f"supports INT8, but is set to {flow.effective[op.name]} by the plan"
    if op.joins_int8:
        in_float = ", ".join(repr(name) for name in op.inputs if name not in flow.int8_outputs)
        return f"runs in INT8 between INT8 ops only, and no kernel writes {in_float} in INT8"
    return f"{BY_PLAN}, but no INT8 kernel reads its inputs"


def _explain_missing_neighbours(graph: OpGraph, op: Op, flow: QuantizationFlow) -> str:
    """Return which side of an op that moves values lacks INT8, its readers or its inputs."""
    within = [op.name, *(other.name for other in graph if other.fusion_group == op.name)]
    readers = [r for name in within for r in graph.consumers(name) if r.name not in within]
    if any(flow.int8_reads.get(r.name, frozenset()).intersection(within) for r in readers):
        return f"no kernel writes {', '.join(map(repr, op.inputs))} in INT8"
    names = [name for name in dict.fromkeys(r.name for r in readers) if name in flow.effective]
    shown = ", ".join(f"{name!r} in {flow.effective[name]}" for name in names[:3])
    in_float = f" ({shown}{', …' if len(names) > 3 else ''})" if names else ""
    return f"no op reads its result in INT8{in_float}"


@dataclass(frozen=True)
class Departure:
    """An op that a plan changes without naming the change: the consequence of an edit elsewhere.

    Attributes:
        planned: the precision in the plan, or that of a follower when the plan was written.
        effective: the precision in which the op runs.
        reason: explanation as text.
        fused_into: the op whose kernel contains this op, if the plan does not name this op.
    """

    op: str
    planned: Precision
    effective: Precision
    reason: str
    fused_into: str | None

    def __str__(self) -> str:
        return f"{self.op!r} runs in {self.effective}, in the plan in {self.planned}: {self.reason}"


def find_departures(
    space: TuningSpace, plan: PrecisionPlan, resolved: ResolvedPlan
) -> tuple[Departure, ...]:
    """Return the ops that run in another precision than in a plan as given, in the graph's order.

    Of the ops that a plan does not name, those that followed others into INT8 are known by
    `PrecisionPlan.int8_followers`, which hand-written plans lack.
    """
    followers = frozenset(plan.int8_followers)
    departures = []
    for op in space.graph:
        effective = resolved.effective[op.name]
        if op.name in plan:
            planned = plan[op.name].precision
        else:
            planned = Precision.INT8 if op.name in followers else Precision.FP32
        if planned is effective or not (followers or op.name in plan):
            continue
        if effective.is_16_bit:
            reason = space.painting(resolved, effective).paints[op.name].reason
        else:
            reason = explain_int8_choice(
                space.graph, space.capabilities, plan, resolved.flow, op.name
            )
        head = None if op.name in plan else op.fusion_group
        departures.append(Departure(op.name, planned, effective, reason, head))
    return tuple(departures)


@dataclass(frozen=True)
class EffectiveOp(JsonFields):
    """The effective configuration of one op under a plan.

    Attributes:
        type: the framework's op type; empty if unknown.
        precision: the effective precision.
        approach: the approach to quantization, if the op has its own kernel with integers.
        fused_into: the op whose INT8 kernel also runs this op, if any.
        may_run_unfused: whether that kernel returns floats, so that running the op after the kernel
            changes no result.
        moves_data: whether the op only moves or selects values (see `Op.quantize_agnostic`).
        source: precision of the op in the given model (see `Op.source_precision`).
    """

    omits_defaults: ClassVar[bool] = True

    type: str
    precision: Precision
    approach: Approach | None = None
    fused_into: str | None = None
    may_run_unfused: bool = False
    moves_data: bool = False
    source: Precision = Precision.FP32

    @property
    def config_text(self) -> str:
        """The effective configuration as text."""
        if self.approach in (None, Approach.STATIC):
            return str(self.precision)
        return f"{self.precision} ({str(self.approach).replace('_', ' ')})"


def list_effective_ops(space: TuningSpace, plan: ResolvedPlan) -> dict[str, EffectiveOp]:
    """Return op → its effective configuration under a plan, in the graph's order."""
    result = {}
    writing_int8 = {space.graph[op].fusion_group or op for op in plan.flow.int8_outputs}
    for op in space.graph:
        precision = plan.effective[op.name]
        has_kernel = precision.is_integer and not op.quantize_agnostic
        head = op.fusion_group if has_kernel else None
        own = plan.plan.get(op.name) if has_kernel and head is None else None
        result[op.name] = EffectiveOp(
            op.type,
            precision,
            approach=None if own is None else own.approach,
            fused_into=head,
            may_run_unfused=head is not None and head not in writing_int8,
            moves_data=op.quantize_agnostic,
            source=op.source_precision,
        )
    return result


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
