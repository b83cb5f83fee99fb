"""Tensors of a run: calibration statistics, results of ops, and the first that deviates."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np
import onnx_ir as ir
import onnxruntime as ort

from neural_mp.adaptors.common.calibration import BatchStats, in_source_range, summarized
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
from neural_mp.adaptors.onnxrt import subgraph_outputs
from neural_mp.adaptors.onnxrt.canonicalize import with_sizes
from neural_mp.adaptors.onnxrt.graph.edit import is_tensor, list_nested_graphs
from neural_mp.adaptors.onnxrt.graph.sessions import ALL, PLAIN, Runner
from neural_mp.adaptors.onnxrt.kernels.ops import get_op_row
from neural_mp.adaptors.onnxrt.model import OnnxModel, build_graph
from neural_mp.adaptors.onnxrt.source_quantization import SOURCE_RANGE
from neural_mp.core.graph import OpGraph
from neural_mp.core.observations import KeptOutputs
from neural_mp.errors import ConversionError
from neural_mp.util.pytree import list_float_arrays

#: Maximum bytes fetched per run, which bounds the memory of a part of a batch.
_FETCHED_BYTES = 32 << 20
#: Sample limit for batches that are not split.
_WHOLE = sys.maxsize
#: Types of tensors that may hold NaN or Inf.
_FLOATING = (ir.DataType.FLOAT, ir.DataType.FLOAT16, ir.DataType.DOUBLE)

#: Whether the samples of a model are independent of each other.
_SEPARABLE: WeakKeyDictionary[OnnxModel, bool] = WeakKeyDictionary()


def observe_tensors(
    model: OnnxModel,
    batches: Iterable[Any],
    tensors: Collection[str],
    collected: KeptOutputs | None = None,
) -> Iterator[tuple[str, BatchStats]]:
    """Run batches and yield statistics of the named tensors for every part.

    Tensors that are not floating-point, and lists of tensors, are omitted. The outputs of the
    batches are `collected`.
    """
    fetch = _Fetch.from_model(model, tensors)
    channels = {}
    for name, value in fetch.watched.items():
        neighbours = [value.producer(), *(use.node for use in value.uses())]
        is_second = any(
            node is not None and get_op_row(node).channels_second for node in neighbours
        )
        channels[name] = 1 if is_second else -1
    for name, array in _observe_values(model, batches, fetch, collected):
        summary = summarized(array, channels[name])
        if summary is not None:
            yield name, in_source_range(summary, fetch.watched[name].meta.get(SOURCE_RANGE))


def observe_values(
    model: OnnxModel, batches: Iterable[Any], tensors: Collection[str]
) -> Iterator[tuple[str, Array]]:
    """Run batches and yield the values of the named floating-point tensors for every part."""
    return _observe_values(model, batches, _Fetch.from_model(model, tensors))


def _observe_values(
    model: OnnxModel, batches: Iterable[Any], fetch: _Fetch, collected: KeptOutputs | None = None
) -> Iterator[tuple[str, Array]]:
    most = 0  # samples per run; determined with the first batch of several samples
    collected = collected or KeptOutputs(limit=0)
    for batch in batches:
        feeds, isolated = model.signature.bind_inputs(batch), list[_Results]()
        samples = model.signature.count_samples(feeds)
        if not most and samples > 1:
            isolated = _are_samples_independent(model, feeds, fetch)
            most = 1 if _SEPARABLE[model] else _WHOLE
        for part in in_parts(feeds, samples, most or _WHOLE):
            results = isolated.pop(0) if isolated else fetch(part, outputs=collected.is_open)
            for name, several in results.tensors.items():
                yield from ((name, array) for array in several)
            if collected.is_open:
                collected.add_outputs(
                    list_float_arrays(model.signature.pack_outputs(results.outputs))
                )
            if 0 < most < _WHOLE:
                size = sum(a.nbytes for several in results.tensors.values() for a in several)
                most = max(1, _FETCHED_BYTES * model.signature.count_samples(part) // max(size, 1))
        collected.end_batch(batch)


def count_tensor_elements(
    model: OnnxModel, inputs: object, tensors: Collection[str]
) -> dict[str, float]:
    """Return tensor → its number of elements in a run; see `Adaptor.element_counts`.

    Only a graph with bodies, or with sizes that depend on values, is run; of independent samples,
    only one.
    """
    feeds = model.signature.bind_inputs(inputs)
    sizes = _infer_element_counts(model, feeds, tensors)
    if sizes is None:
        sizes = _measure_element_counts(model, feeds, tensors)
    return {name: size for name, size in sizes.items() if size}


def _infer_element_counts(
    model: OnnxModel, feeds: Mapping[str, Any], tensors: Iterable[str]
) -> dict[str, float] | None:
    """Return tensor → its number of elements by shape inference; None if one stays unknown."""
    has_lists = not all(isinstance(array, np.ndarray) for array in feeds.values())
    if has_lists or len(list_nested_graphs(model.program.graph)) > 1:
        return None
    program = with_sizes(model.program, {name: array.shape for name, array in feeds.items()})
    named, counts = ir.convenience.create_value_mapping(program.graph), {}
    for name in tensors:
        value = named[str(model.structure.values[name].name)]
        if not is_tensor(value) or not (value.dtype is None or value.dtype.is_floating_point()):
            continue
        if value.dtype is None or value.shape is None or not value.shape.is_static():
            return None
        counts[name] = float(math.prod(value.shape.numpy()))
    return counts


def _measure_element_counts(
    model: OnnxModel, feeds: dict[str, Array], tensors: Collection[str]
) -> dict[str, float]:
    fetch, samples, times = (
        _Fetch.from_model(model, tensors),
        model.signature.count_samples(feeds),
        1,
    )
    isolated = _are_samples_independent(model, feeds, fetch) if samples > 1 else []
    if samples > 1 and _SEPARABLE[model]:
        feeds, times = next(in_parts(feeds, samples, 1)), samples
    results = isolated[0] if isolated else fetch(feeds)
    return {
        name: float(times * sum(array.size for array in several))
        for name, several in results.tensors.items()
    }


@dataclass(frozen=True)
class _Results:
    """The arrays of each tensor in a part of a batch, and the outputs, if asked for."""

    tensors: dict[str, list[Array]]
    outputs: list[Any]


@dataclass(frozen=True)
class _Fetch:
    """Runs a model and returns tensors besides its outputs.

    Attributes:
        model: the model.
        watched: the floating-point tensors, by name.
        runner: a session with these tensors and the outputs of the model.
    """

    model: OnnxModel
    watched: dict[str, ir.Value]
    runner: Runner

    @classmethod
    def from_model(cls, model: OnnxModel, tensors: Collection[str]) -> _Fetch:
        """Fetch the floating-point tensors among `tensors`."""
        program = subgraph_outputs.with_body_types(model.program)
        named = subgraph_outputs.map_computed_values(program)
        targets = {name: named[str(model.structure.values[name].name)] for name in sorted(tensors)}
        watched = {
            name: value
            for name, value in subgraph_outputs.select_visible(program, targets).items()
            if is_tensor(value) and (value.dtype is None or value.dtype.is_floating_point())
        }
        outputs, fed = model.signature.output_tensors, model.signature.input_tensors
        fetched = [str(value.name) for value in watched.values() if str(value.name) not in fed]
        extended = subgraph_outputs.with_outputs(program, [*fetched, *outputs])
        return cls(model, watched, model.create_session(extended, lean=True))

    def __call__(self, feeds: dict[str, Array], outputs: bool = False) -> _Results:
        """Run a part of a batch, and return its outputs if asked for."""
        values = {name: str(value.name) for name, value in self.watched.items()}
        names = self.model.signature.output_tensors if outputs else ()
        fetches = list(dict.fromkeys(v for v in (*values.values(), *names) if v not in feeds))
        results = dict(feeds)
        if fetches:
            results.update(zip(fetches, self.runner(feeds, fetches), strict=True))
        tensors = {name: _floats_in_output(results[value]) for name, value in values.items()}
        return _Results(tensors, [results[output] for output in names])


def _floats_in_output(output: object) -> list[Array]:
    """Return the floating-point arrays in an output; empty for other outputs."""
    # bfloat16 is of kind V in numpy.
    floats = (
        array
        for array in subgraph_outputs.collect_output_arrays(output)
        if array.dtype.kind in "fV"
    )
    return [np.asarray(array, np.float32) for array in floats]


def _are_samples_independent(
    model: OnnxModel, feeds: dict[str, Array], fetch: _Fetch
) -> list[_Results]:
    """Find out whether samples are independent, by the first batch of a model.

    Return the results of the first two samples if they are, and if it was unknown.
    """
    if model in _SEPARABLE:
        return []
    results = _runs_by_sample(model, feeds, fetch)
    _SEPARABLE[model] = bool(results)
    return results


def _runs_by_sample(model: OnnxModel, feeds: dict[str, Array], fetch: _Fetch) -> list[_Results]:
    """Run two samples together and separately, as the first axis may also be time.

    Return the results of each if the outputs are those of both together.
    """
    first, second, pair = (
        {name: array[cut] for name, array in feeds.items()}
        for cut in (slice(0, 1), slice(1, 2), slice(0, 2))
    )
    try:
        together = fetch.runner(pair, model.signature.output_tensors)
        isolated = [fetch(first, outputs=True), fetch(second, outputs=True)]
    except ConversionError:
        return []
    are_equal = all(
        len(lhs) == len(rhs) == 1
        and pair.shape == (2, *lhs.shape[1:]) == (2, *rhs.shape[1:])
        and _are_close(pair, np.concatenate([lhs, rhs]))
        for pair, lhs, rhs in zip(together, *(results.outputs for results in isolated), strict=True)
    )
    return isolated if are_equal else []


def _are_close(lhs: Array, rhs: Array) -> bool:
    # numpy 1 cannot compare bfloat16, which is not a native type.
    if rhs.dtype.hasobject:
        return np.array_equal(lhs, rhs)
    lhs, rhs = (a.astype(np.float32) if a.dtype.kind == "V" else a for a in (lhs, rhs))
    return np.allclose(lhs, rhs, 1e-3, 1e-4, equal_nan=True)


def first_non_finite(model: OnnxModel, inputs: object) -> str | None:
    """Return the first op whose result holds NaN or Inf."""
    program, feeds = (
        subgraph_outputs.with_body_types(model.program),
        model.signature.bind_inputs(inputs),
    )
    can_be_had = subgraph_outputs.select_visible(
        program, subgraph_outputs.map_computed_values(program)
    )
    floating = {
        name: str(value.name)
        for name, value in model.structure.values.items()
        if name in model.structure.nodes
        and str(value.name) in can_be_had
        and value.dtype in (None, *_FLOATING)
    }

    def fetch_floats(ops: Sequence[str]) -> list[list[Array]]:
        fetched = [floating[op] for op in ops]
        runner = model.create_session(subgraph_outputs.with_outputs(program, fetched), level=PLAIN)
        return [_floats_in_output(output) for output in runner(feeds, fetched)]

    first = first_with_non_finite(list(floating), fetch_floats)
    return None if first is None else model.ops.get(first, first)


def build_observable_graph(model: OnnxModel) -> OpGraph:
    """Return the ops whose results a run can return; see `OpOutputs`."""
    written = build_graph(model)
    if not model.results:
        return written
    op_of = {str(value.name): op for op, value in model.structure.values.items()}
    return build_results_graph(written, model.results, op_of)


def make_op_outputs(
    model: OnnxModel, ops: Collection[str], level: ort.GraphOptimizationLevel = ALL
) -> Callable[[Any], dict[str, OpOutput]]:
    """Return a function that runs one batch and returns the results of ops."""
    program = subgraph_outputs.with_body_types(model.program)
    can_be_had = subgraph_outputs.select_visible(
        program, subgraph_outputs.map_computed_values(program)
    )
    named = {op: str(model.structure.values[op].name) for op in ops if op not in model.results}
    outputs = {op: model.results.get(op) or OutputLocation(named[op], "") for op in ops}
    outputs = {op: output for op, output in outputs.items() if output.tensor in can_be_had}
    fed = model.signature.input_tensors
    fetched = list(dict.fromkeys(r.tensor for r in outputs.values() if r.tensor not in fed))
    extended = subgraph_outputs.with_outputs(program, fetched)
    runner = model.create_session(extended, lean=True, level=level)

    def run_batch(inputs: object) -> dict[str, OpOutput]:
        feeds = model.signature.bind_inputs(inputs)
        results = dict(zip(fetched, runner(feeds, fetched), strict=True))
        decoded = {}
        for op, output in outputs.items():
            arrays = subgraph_outputs.collect_output_arrays(results.get(output.tensor, []))
            if len(arrays) == 1:
                # The values of a body are recorded in float32.
                dtype = can_be_had[output.tensor].dtype
                array = arrays[0] if dtype is None else arrays[0].astype(dtype.numpy(), copy=False)
                decoded[op] = read_op_value(array, output.encoding)
        return {op: value for op, value in decoded.items() if value is not None}

    return run_batch


def run_without_optimizations(model: OnnxModel, inputs: object) -> list[Any]:
    """Return the outputs of a run without optimizations."""
    feeds = model.signature.bind_inputs(inputs)
    return model.create_session(model.active_graph, level=PLAIN)(
        feeds, model.signature.output_tensors
    )


def first_deviating_op(model: OnnxModel, inputs: object) -> str | None:
    """Return the first op whose result depends on the optimizations.

    A kernel that runs several ops has one result, that of the last.
    """
    ops = list(model.results)
    unfused, fused = (make_op_outputs(model, ops, level)(inputs) for level in (PLAIN, ALL))
    return find_first_difference(ops, unfused, fused)
