"""Tuning spaces reduced to what calibration has seen: tensors with finite ranges."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import replace

from neural_mp.core.enums import Approach
from neural_mp.core.graph import Op, OpGraph
from neural_mp.core.quantization_flow import find_observable_tensors
from neural_mp.space.space import TuningSpace

_NOT_REACHED = "not reached by calibration, so the ranges of its inputs are unknown"


def limit_to_reached(space: TuningSpace, observed: Collection[str]) -> TuningSpace:
    """Return a space without static INT8 for ops whose tensors calibration has not seen.

    INT8 approaches that need no calibrated range stay.
    """
    while unseen := find_observable_tensors(space.graph, space.int8_ops).difference(observed):
        needing = frozenset(_ops_needing_int8(space.graph, space.int8_ops, unseen))
        if not needing:
            break
        space = space.without_int8(needing, (Approach.STATIC,), _NOT_REACHED)
    return space


def without_non_finite(space: TuningSpace, held: Mapping[str, object]) -> TuningSpace:
    """Return a space in which tensors that held NaN or Inf in calibration stay float.

    Ops that read such a tensor in INT8, or can only write INT8, lose the INT8 with calibrated
    ranges and with those of every run. Ops that move the tensor no longer pass INT8 on. The values
    of `held` tell, as text, the value that the tensor held and its batch.
    """
    moving = {
        op.name: tensor
        for op in space.graph
        if op.quantize_agnostic
        for tensor in (op.name, *op.inputs)
        if tensor in held
    }
    if moving:
        space = _forbid_int8_moves(
            space, {op: _non_finite_reason(held, name) for op, name in moving.items()}
        )
    for tensor in held:
        needing = frozenset(
            _ops_needing_int8(space.graph, space.int8_ops | space.dynamic_ops, (tensor,))
        )
        approaches = (Approach.STATIC, Approach.DYNAMIC)
        space = space.without_int8(needing, approaches, _non_finite_reason(held, tensor))
    return space


def _non_finite_reason(held: Mapping[str, object], tensor: str) -> str:
    return f"tensor {tensor!r} held {held[tensor]}, and INT8 has neither NaN nor Inf"


def _forbid_int8_moves(space: TuningSpace, reasons: Mapping[str, str]) -> TuningSpace:
    """Return a space in which ops, given with their reasons, compute instead of moving INT8."""
    ops = (replace(op, quantize_agnostic=False) if op.name in reasons else op for op in space.graph)
    refusing = {op: space.capabilities[op].refusing_int8(reason) for op, reason in reasons.items()}
    graph = OpGraph(ops, space.graph.inputs, space.graph.outputs)
    return replace(space, graph=graph, capabilities={**space.capabilities, **refusing})


def _ops_needing_int8(
    graph: OpGraph, heads: Collection[str], tensors: Iterable[str]
) -> Iterator[str]:
    """Yield those of the INT8 ops `heads` that read, or can only write, some tensors in INT8."""

    def find_int8_head(op: Op) -> str | None:
        name = op.name if op.name in heads else op.fusion_group
        return name if name in heads else None

    for tensor in tensors:
        for op in graph.consumers(tensor):
            reader = find_int8_head(op)
            if reader is not None and (reader != op.name or tensor in op.read_in_int8):
                yield reader
        writer = find_int8_head(graph[tensor]) if tensor in graph else None
        if writer is not None and (graph[writer].writes_int8 or graph[writer].joins_int8):
            yield writer
