"""What the ops of a model compute: their results are fetched as outputs of the graph."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping

import onnx_ir as ir

from neural_mp.adaptors.common.op_outputs import OpResult, OpValue, op_value, results_graph
from neural_mp.adaptors.common.signature import Array
from neural_mp.adaptors.onnxrt.graph import build_graph
from neural_mp.adaptors.onnxrt.model import OnnxModel
from neural_mp.adaptors.onnxrt.subgraph_outputs import (
    arrays_in,
    typed,
    values_in,
    visible,
    with_outputs,
)
from neural_mp.core.graph import OpGraph


def results(model: OnnxModel) -> OpGraph:
    """The ops whose results a run has; see `Adaptor.results`."""
    written = build_graph(model)
    if not model.results:
        return written
    op_of = {str(value.name): op for op, value in model.structure.values.items()}
    return results_graph(written, model.results, op_of)


def values(
    model: OnnxModel, ops: Collection[str], threads: int | None
) -> Callable[[Mapping[str, Array]], dict[str, OpValue]]:
    """A function of the inputs (name → array) that gives the results of some ops."""
    program = typed(model.program)
    can_be_had = visible(program, values_in(program))
    places = {op: _place(model, op) for op in ops}
    places = {op: place for op, place in places.items() if place.tensor in can_be_had}
    fed = model.signature.input_tensors
    fetched = list(dict.fromkeys(r.tensor for r in places.values() if r.tensor not in fed))
    runner = model.session(with_outputs(program, fetched), threads=threads, lean=True)

    def called(feeds: Mapping[str, Array]) -> dict[str, OpValue]:
        found = dict(zip(fetched, runner(feeds, fetched), strict=True))
        arrays = {op: arrays_in(found.get(place.tensor, [])) for op, place in places.items()}
        given = {
            op: op_value(_as_stored(arrays[op][0], can_be_had[place.tensor]), place.encoding)
            for op, place in places.items()
            if len(arrays[op]) == 1
        }
        return {op: value for op, value in given.items() if value is not None}

    return called


def _as_stored(found: Array, value: ir.Value) -> Array:
    """Return the values of a body, recorded in float32, in their own type."""
    kind = value.dtype.numpy() if value.dtype is not None else found.dtype
    return found.astype(kind, copy=False)


def _place(model: OnnxModel, op: str) -> OpResult:
    found = model.results.get(op)
    return found or OpResult(str(model.structure.values[op].name), "")
