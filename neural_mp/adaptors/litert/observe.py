"""Tensors of a run: calibration statistics, results of ops and the first NaN or Inf."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator
from typing import Any

import numpy as np

from neural_mp.adaptors.common.calibration import BatchStats, summarized
from neural_mp.adaptors.common.op_outputs import (
    OpOutput,
    OutputLocation,
    build_results_graph,
    first_with_non_finite,
    read_op_value,
)
from neural_mp.adaptors.common.signatures.input_spec import in_parts
from neural_mp.adaptors.common.signatures.signature import Array
from neural_mp.adaptors.litert.model import LiteRtModel, build_graph
from neural_mp.core.graph import OpGraph

#: Maximum bytes of the results kept in a run, which bounds the memory of a part of a batch.
_MAX_KEPT_BYTES = 32 << 20


def observe_tensors(
    model: LiteRtModel, batches: Iterable[Any], tensors: Collection[str]
) -> Iterator[tuple[str, BatchStats]]:
    """Run batches and yield statistics of the named tensors for every part.

    Tensors that are not floating-point are omitted.
    """
    for name, array in observe_values(model, batches, tensors):
        summary = summarized(array)
        if summary is not None:
            yield name, summary


def observe_values(
    model: LiteRtModel, batches: Iterable[Any], tensors: Collection[str]
) -> Iterator[tuple[str, Array]]:
    """Run batches and yield the values of the named floating-point tensors for every part."""
    named = [name for name in sorted(tensors) if model.structure.keeps_floats(name)]
    inputs = [name for name in named if name in model.signature.input_tensors]
    fetched = [name for name in named if name not in inputs]
    runner = model.make_runner(fetched, keeps_tensors=True)
    most = 1
    for feeds in map(model.signature.bind_inputs, batches):
        samples = model.signature.count_samples(feeds)
        for part in in_parts(feeds, samples, most):
            arrays = dict(zip(fetched, runner(model.order_feeds(part)), strict=True))
            arrays.update({name: part[name] for name in inputs})
            yield from arrays.items()
            size = sum(array.nbytes for array in arrays.values())
            most = max(1, _MAX_KEPT_BYTES * model.signature.count_samples(part) // max(size, 1))


def first_non_finite(model: LiteRtModel, inputs: object) -> str | None:
    """Return the first op whose result holds NaN or Inf."""
    feeds = model.order_feeds(model.signature.bind_inputs(inputs))
    structure = model.structure
    order = {name: position for position, name in enumerate(structure.ops)}
    order.update({part: order[name] for part, name in structure.parts.items()})
    floating = [name for name in order if structure.keeps_floats(name)]
    first = first_with_non_finite(
        sorted(floating, key=order.__getitem__),
        lambda ops: [[array] for array in model.make_runner(ops, keeps_tensors=True)(feeds)],
    )
    return None if first is None else model.ops.get(first, first)


def build_observable_graph(model: LiteRtModel) -> OpGraph:
    """Return the ops whose results a run can return; see `OpOutputs`."""
    written = build_graph(model)
    if not model.results:
        return written
    return build_results_graph(written, model.results, {op.name: op.name for op in written})


def make_op_outputs(
    model: LiteRtModel, names: Collection[str]
) -> Callable[[Any], dict[str, OpOutput]]:
    """Return a function that runs one batch and returns the results of ops."""
    structure = model.structure
    outputs = {}
    for op in names:
        kind = structure.get_type(op) if op in structure.ops else ""
        location = model.results.get(op) or OutputLocation(op, kind)
        if model.tensors.get(location.tensor) in structure.read:
            outputs[op] = location
    fetched = list(dict.fromkeys(location.tensor for location in outputs.values()))
    runner = model.make_runner(fetched, keeps_tensors=True)

    def run_batch(inputs: object) -> dict[str, OpOutput]:
        arrays = runner(model.order_feeds(model.signature.bind_inputs(inputs)))
        results = dict(zip(fetched, arrays, strict=True))
        values = {
            op: read_op_value(np.asarray(results[location.tensor]), location.encoding)
            for op, location in outputs.items()
        }
        return {op: value for op, value in values.items() if value is not None}

    return run_batch
