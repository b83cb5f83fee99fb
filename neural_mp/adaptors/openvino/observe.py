"""Tensors of a run: calibration statistics, results of ops and the first NaN or Inf.

Runs without the low-precision transformations of OpenVINO show what these change.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from neural_mp.adaptors.common.calibration import BatchStats, summarized
from neural_mp.adaptors.common.fusion_check import find_first_difference
from neural_mp.adaptors.common.op_outputs import (
    OpOutput,
    OutputLocation,
    build_results_graph,
    first_with_non_finite,
    read_op_value,
)
from neural_mp.adaptors.common.signatures.input_spec import in_parts
from neural_mp.adaptors.common.signatures.signature import Array
from neural_mp.adaptors.openvino.graph.edit import (
    get_op_type,
    get_tensor_name,
    is_float,
    list_result_readers,
    name_of,
)
from neural_mp.adaptors.openvino.model import OpenVinoModel, build_graph
from neural_mp.adaptors.openvino.ops import get_op_row
from neural_mp.adaptors.openvino.runtime import Runner, ops, ov
from neural_mp.core.graph import OpGraph

logger = logging.getLogger(__name__)

#: Maximum bytes fetched per run, which bounds the memory of a part of a batch.
_FETCHED_BYTES = 32 << 20


def observe_tensors(
    model: OpenVinoModel, batches: Iterable[Any], tensors: Collection[str]
) -> Iterator[tuple[str, BatchStats]]:
    """Run batches and yield statistics of the named tensors for every part.

    Tensors that are not floating-point are omitted.
    """
    outputs = model.structure.tensors
    for name, array in observe_values(model, batches, tensors):
        summary = summarized(array, _find_channel_axis(outputs[name]))
        if summary is not None:
            yield name, summary


def observe_values(
    model: OpenVinoModel, batches: Iterable[Any], tensors: Collection[str]
) -> Iterator[tuple[str, Array]]:
    """Run batches and yield the values of the named floating-point tensors for every part.

    The next run overwrites them.
    """
    outputs = model.structure.tensors
    named = [name for name in sorted(tensors) if is_float(outputs[name])]
    inputs = [name for name in named if name in model.signature.input_tensors]
    fetched = [name for name in named if name not in inputs]
    runner = Runner(_copy_with_outputs(model.program, fetched))
    most = 1
    for feeds in map(model.signature.bind_inputs, batches):
        samples = model.signature.count_samples(feeds)
        for part in in_parts(feeds, samples, most):
            arrays = dict(zip(fetched, runner(model.order_feeds(part), shared=True), strict=True))
            arrays.update({name: part[name] for name in inputs})
            for name, array in arrays.items():
                yield name, np.asarray(array, np.float32)
            size = sum(array.nbytes for array in arrays.values())
            most = max(1, _FETCHED_BYTES * model.signature.count_samples(part) // max(size, 1))


def infer_element_counts(
    model: OpenVinoModel, inputs: object, tensors: Collection[str]
) -> dict[str, float] | None:
    """Return tensor → its number of elements in a run, from shape inference.

    None if the size of a tensor depends on values, or an op is missing.
    """
    sized = _copy_with_sizes(model, model.signature.bind_inputs(inputs))
    if sized is None:
        return None
    outputs = {get_tensor_name(o): o for node in sized.get_ops() for o in node.outputs()}
    if not outputs.keys() >= {*tensors}:
        return None  # equal ops were merged
    shapes = {n: outputs[n].get_partial_shape() for n in tensors if is_float(outputs[n])}
    if any(shape.is_dynamic for shape in shapes.values()):
        return None
    sizes = {name: math.prod(shape.to_shape()) for name, shape in shapes.items()}
    return {name: float(size) for name, size in sizes.items() if size}


def _copy_with_sizes(model: OpenVinoModel, bound: Mapping[str, Array]) -> ov.Model | None:
    """Return a copy of a graph with the sizes of bound inputs; None if it rejects them."""
    sized = model.program.clone()
    try:
        sized.reshape({p: list(bound[name_of(p.get_node())].shape) for p in sized.inputs})
    except RuntimeError:
        logger.debug("the graph rejects the sizes of its inputs", exc_info=True)
        return None
    return sized


def _copy_with_outputs(program: ov.Model, tensors: Sequence[str]) -> ov.Model:
    copied = program.clone()
    outputs = {get_tensor_name(o): o for node in copied.get_ops() for o in node.outputs()}
    for result in copied.get_results():
        copied.remove_result(result)
    copied.add_results([ops.result(outputs[tensor]) for tensor in tensors])
    return copied


def _find_channel_axis(output: ov.Output) -> int:
    """Return the axis of channels by the writer and the readers; the last unless one differs."""
    neighbours = [output.get_node(), *list_result_readers(output)]
    return max(get_op_row(node).channels for node in neighbours)


def first_non_finite(model: OpenVinoModel, inputs: object) -> str | None:
    """Return the first op whose result holds NaN or Inf."""
    feeds = model.order_feeds(model.signature.bind_inputs(inputs))
    floating = [
        name
        for name, output in model.structure.tensors.items()
        if name in model.structure.nodes and is_float(output)
    ]
    first = first_with_non_finite(
        floating,
        lambda ops: [[array] for array in Runner(_copy_with_outputs(model.program, ops))(feeds)],
    )
    return None if first is None else model.ops.get(first, first)


def build_observable_graph(model: OpenVinoModel) -> OpGraph:
    """Return the ops whose results a run can return; see `OpOutputs`."""
    written = build_graph(model)
    if not model.results:
        return written
    op_of = {tensor: tensor for tensor in model.structure.tensors}
    return build_results_graph(written, model.results, op_of)


def make_op_outputs(
    model: OpenVinoModel, names: Collection[str], *, low_precision: bool = True
) -> Callable[[Any], dict[str, OpOutput]]:
    """Return a function that runs one batch and returns the results of ops.

    Without `low_precision`, quantized tensors are rounded in float.
    """
    tensors, outputs = model.structure.tensors, dict[str, OutputLocation]()
    for op in names:
        output = model.results.get(op) or OutputLocation(op, get_op_type(tensors[op].get_node()))
        if output.tensor in tensors:
            outputs[op] = output
    fetched = list(dict.fromkeys(output.tensor for output in outputs.values()))
    runner = Runner(_copy_with_outputs(model.program, fetched), low_precision=low_precision)

    def run_batch(inputs: object) -> dict[str, OpOutput]:
        feeds = model.order_feeds(model.signature.bind_inputs(inputs))
        results = dict(zip(fetched, runner(feeds), strict=True))
        decoded = {
            op: _read_op_output(output, results[output.tensor]) for op, output in outputs.items()
        }
        return {op: value for op, value in decoded.items() if value is not None}

    return run_batch


def _read_op_output(output: OutputLocation, array: Array) -> OpOutput | None:
    """Return a result; a quantized one is float in the graph, but uint8 in the kernel."""
    value = read_op_value(array, None)
    if value is None or output.encoding is None:
        return value
    return OpOutput(value.real, "uint8")


def run_without_optimizations(model: OpenVinoModel, inputs: object) -> list[Array]:
    """Return the outputs of a run without integer kernels."""
    feeds = model.order_feeds(model.signature.bind_inputs(inputs))
    return model.in_order(Runner(model.active_graph, low_precision=False)(feeds))


def first_deviating_op(model: OpenVinoModel, inputs: object) -> str | None:
    """Return the first op whose result depends on the transformations."""
    names = list(model.results)
    unfused, fused = (
        make_op_outputs(model, names, low_precision=low_precision)(inputs)
        for low_precision in (False, True)
    )
    return find_first_difference(names, unfused, fused)
