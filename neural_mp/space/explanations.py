"""Reasons for the precision of ops, as text."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from neural_mp.core.enums import Approach
from neural_mp.core.graph import Op, OpGraph
from neural_mp.core.plan import PrecisionPlan
from neural_mp.core.precision import Precision
from neural_mp.core.quantization_flow import QuantizationFlow
from neural_mp.space.capability import Capability
from neural_mp.space.space import TuningSpace
from neural_mp.util.validators import enum_of, mapping_of, non_negative_integer, record, string


@dataclass(frozen=True)
class Reason:
    """The reason why ops of a model are ineligible for a precision.

    Attributes:
        precision: the precision.
        words: the reason as text.
        types: op type → number of affected ops.
    """

    precision: Precision
    words: str
    types: Mapping[str, int]

    @property
    def ops(self) -> int:
        """The number of affected ops."""
        return sum(self.types.values())

    def to_dict(self) -> dict[str, Any]:
        """Return a JSON-compatible dict."""
        return {
            "precision": self.precision.value,
            "reason": self.words,
            "ops": self.ops,
            "types": dict(self.types),
        }

    @classmethod
    def from_dict(cls, data: object) -> Reason:
        """Read the result of `to_dict`.

        Raises:
            NeuralMPError: `data` does not match the schema.
        """
        said = _REASON(data)
        return cls(said["precision"], said["reason"], said["types"])


_REASON = record(
    {"precision": enum_of(Precision), "reason": string, "types": mapping_of(non_negative_integer)}
)


def counted_reasons(
    space: TuningSpace, ops: Iterable[Op], precisions: Iterable[Precision] = tuple(Precision)
) -> tuple[Reason, ...]:
    """Return the reasons for ineligible precisions, the one with the most ops first.

    Args:
        space: the supported configurations of every op.
        ops: the ops.
        precisions: the precisions; all by default.
    """
    asked = list(precisions)
    found: dict[tuple[Precision, str], Counter[str]] = {}
    for op in ops:
        for precision in asked:
            words = space.capabilities[op.name].refusal(precision)
            if words is not None:
                found.setdefault((precision, words), Counter())[op.type] += 1
    reasons = (Reason(*key, dict(types.most_common())) for key, types in found.items())
    return tuple(sorted(reasons, key=lambda reason: -reason.ops))


_INSIDE = {
    Approach.DYNAMIC: "its kernel finds the range of what it reads on every run",
    Approach.WEIGHT_ONLY: "its weight alone is stored in INT8, and multiplied as float numbers",
}


def why_int8(
    graph: OpGraph,
    capabilities: Mapping[str, Capability],
    plan: PrecisionPlan,
    flow: QuantizationFlow,
    name: str,
) -> str:
    """Return the reason why an op runs in INT8, or does not.

    Args:
        graph: the model.
        capabilities: op → its supported configurations.
        plan: the configs of the ops.
        flow: the quantization flow of the plan.
        name: the op.
    """
    op = graph[name]
    if flow.effective[name] is Precision.INT8:
        return _why_so(graph, op, plan, flow)
    return _why_not(op, capabilities[name], plan, flow)


def _why_so(graph: OpGraph, op: Op, plan: PrecisionPlan, flow: QuantizationFlow) -> str:
    config = plan.get(op.name)
    if config is not None and config.approach in _INSIDE and config.weight is not None:
        return f"the plan says so: {_INSIDE[config.approach]}"
    if op.fusion_group is not None:
        return f"it runs along in the INT8 kernel of {op.fusion_group!r}"
    if op.quantize_agnostic:
        return "it only moves values, and those around it are in INT8"
    reads = _listed(flow.int8_reads.get(op.name, ()))
    along = (
        other.name
        for other in graph.consumers(op.name)
        if other.fusion_group == op.name and flow.effective[other.name] is Precision.INT8
    )
    behind = next(along, None)
    if behind is not None:
        return (
            f"the plan says so: it reads {reads} quantized, and {behind!r} runs along in its kernel"
        )
    writes = "INT8" if op.name in flow.int8_outputs else "real numbers"
    return f"the plan says so: it reads {reads} quantized and writes {writes}"


def _why_not(op: Op, capability: Capability, plan: PrecisionPlan, flow: QuantizationFlow) -> str:
    said = plan.get(op.name)
    if op.fusion_group is not None:
        head = op.fusion_group
        if flow.effective.get(head) is not Precision.INT8:
            return f"it runs along with {head!r}, which is not in INT8"
        return f"it would run along in the INT8 kernel of {head!r}, were it not kept out"
    if op.quantize_agnostic:
        return "it only moves values, and nothing around it writes or reads INT8 there"
    obstacle = capability.refusal(Precision.INT8)
    if obstacle is not None:
        return obstacle
    if said is None or said.precision is not Precision.INT8:
        return f"it could; the plan keeps it in {flow.effective[op.name]}"
    if op.joins_int8:
        return "its INT8 kernel is worth it between ops in INT8 only, and what it reads is not"
    return "the plan says so, and yet no INT8 kernel reads what it reads"


def _listed(names: frozenset[str] | tuple[str, ...]) -> str:
    return ", ".join(repr(name) for name in sorted(names)) or "nothing"
