"""What the ops of a model compute: their results are fetched as outputs of the graph."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping

import numpy as np

from neural_mp.adaptors.common.op_values import OpResult, OpValue, op_value, results_graph
from neural_mp.adaptors.common.signature import Array
from neural_mp.adaptors.onnxrt.graph import build_graph
from neural_mp.adaptors.onnxrt.model import OnnxModel
from neural_mp.adaptors.onnxrt.observe import with_outputs
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
    places = {op: _place(model, op) for op in ops}
    fed = model.signature.input_tensors
    fetched = list(dict.fromkeys(r.tensor for r in places.values() if r.tensor not in fed))
    runner = model.session(with_outputs(model.program, fetched), threads=threads, lean=True)

    def called(feeds: Mapping[str, Array]) -> dict[str, OpValue]:
        found = dict(zip(fetched, runner(feeds, fetched), strict=True))
        given = {
            op: op_value(np.asarray(found[place.tensor]), place.encoding)
            for op, place in places.items()
            if not isinstance(found.get(place.tensor, []), list)
        }
        return {op: value for op, value in given.items() if value is not None}

    return called


def _place(model: OnnxModel, op: str) -> OpResult:
    found = model.results.get(op)
    return found or OpResult(str(model.structure.values[op].name), "")
