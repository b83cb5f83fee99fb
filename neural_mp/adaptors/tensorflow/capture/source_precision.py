"""Graphs in 16 bits or with fake quantization as graphs in float32.

Integer kernels read and return float32 at their borders, and calibration observes float32. The
weights of a model under a mixed policy are float32 in the first place.

The runtime computes fake quantization, as trained with rounding, in floats, op by op. A plan needs
the ops around, and rounds the tensors in integer kernels; the ranges are those of calibration.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from dataclasses import replace
from itertools import chain

import numpy as np
import tensorflow as tf
from tensorflow.core.framework.function_pb2 import FunctionDef

from neural_mp.adaptors.common.quant_params import STEPS
from neural_mp.adaptors.tensorflow.capture.canonicalize import canonicalize_graph
from neural_mp.adaptors.tensorflow.graph.control_flow import with_functions_of_its_own
from neural_mp.adaptors.tensorflow.graph.fusion import find_nonnegative_nodes
from neural_mp.adaptors.tensorflow.graph.ops import LAYERS, Role, Trait, get_op_role, has_trait
from neural_mp.adaptors.tensorflow.graph.runtime import import_runnable
from neural_mp.adaptors.tensorflow.graph.tensor_graph import (
    CONSTANT,
    FunctionDefLibrary,
    NodeDef,
    TensorGraph,
    copy_node,
    get_node_name,
    list_data_inputs,
    list_result_dtypes,
    make_constant,
    make_node,
    plain_name,
    without_large,
)
from neural_mp.adaptors.tensorflow.model import ServedSignature, TensorFlowModel
from neural_mp.core.observations import Range
from neural_mp.errors import ConversionError, ModelLoadError, one_line
from neural_mp.util.pytree import list_float_arrays

logger = logging.getLogger(__name__)

_16_BITS = {kind.as_datatype_enum: kind for kind in (tf.float16, tf.bfloat16)}
_FLOAT32 = tf.float32.as_datatype_enum


def in_float32(
    graph: TensorGraph, signature: ServedSignature
) -> tuple[TensorGraph | None, list[str]]:
    """Return the graph with all 16-bit floats as float32, and warnings.

    Inputs and outputs keep their types. None without 16-bit floats, or if the graph cannot be
    re-declared; a warning then gives the reason.
    """
    needed = graph.prune_unused(signature.output_tensors, signature.input_tensors)
    names = sorted(
        {
            _16_BITS[kind].name
            for node in _iterate_all_nodes(needed)
            for kind in _iterate_half_types(node)
        }
    )
    if not names:
        return None, []
    dtypes = " and ".join(names)
    reason = _find_widening_obstacle(needed, signature)
    if reason is None:
        rewritten = with_functions_of_its_own(_widen_graph(needed, signature))
        try:
            import_runnable(without_large(rewritten))
        except (ValueError, ModelLoadError, tf.errors.OpError) as error:
            logger.debug("re-declaring the graph failed", exc_info=True)
            reason = one_line(error)
        else:
            return rewritten, [
                f"ops in {dtypes} are re-declared in float32 in converted models, as integer "
                f"kernels return float32; an unchanged model keeps {dtypes}"
            ]
    return None, [f"ops in {dtypes} stay as they are and get no INT8: {reason}"]


def _iterate_all_nodes(graph: TensorGraph) -> Iterator[NodeDef]:
    return chain(graph.nodes.values(), *(f.node_def for f in graph.library.function))


def _iterate_half_types(node: NodeDef) -> Iterator[int]:
    for value in node.attr.values():
        yield from (kind for kind in (value.type, *value.list.type) if kind in _16_BITS)


def _find_widening_obstacle(graph: TensorGraph, signature: ServedSignature) -> str | None:
    for node in _iterate_all_nodes(graph):
        if has_trait(node, Trait.READS_BITS) and any(_iterate_half_types(node)):
            return f"{node.name!r} ({node.op}) reads the bits of floats"
    fed = set(map(get_node_name, signature.input_tensors))
    for tensor in signature.output_tensors:
        kinds = list_result_dtypes(graph[tensor])
        halves = [kind for kind in kinds if kind.as_datatype_enum in _16_BITS]
        if halves and (len(kinds) > 1 or get_node_name(tensor) in fed):
            return f"the output {tensor!r} is an input, or one of several results of an op"
    return None


def _widen_graph(graph: TensorGraph, signature: ServedSignature) -> TensorGraph:
    """Return the graph in float32, with casts at inputs and outputs in 16 bits."""
    ends = dict.fromkeys(map(get_node_name, signature.output_tensors))
    halves = {name: kind for name in ends if (kind := _half_result_type(graph.nodes[name]))}
    inner = {name: graph.unused_name(f"{name}/float32") for name in halves}
    graph = graph.rename_nodes(inner)
    fed = set(map(get_node_name, signature.input_tensors))
    rewritten = TensorGraph(
        {name: node if name in fed else _widen_node(node) for name, node in graph.nodes.items()},
        graph.versions,
        FunctionDefLibrary(function=map(_widen_function, graph.library.function)),
    )
    for name, kind in halves.items():
        rewritten.add_node(_make_cast(name, inner[name], tf.float32, kind))
    starts = {name: kind for name in fed if (kind := _half_result_type(rewritten.nodes[name]))}
    casts = {
        name: rewritten.add_node(
            _make_cast(rewritten.unused_name(f"{name}/float32"), name, kind, tf.float32)
        )
        for name, kind in starts.items()
    }
    rewritten.redirect_readers(casts, unless=casts.values())
    return rewritten


def _half_result_type(node: NodeDef) -> tf.DType | None:
    kinds = list_result_dtypes(node)
    return kinds[0] if kinds and kinds[0].as_datatype_enum in _16_BITS else None


def _make_cast(name: str, source: str, source_type: tf.DType, target_type: tf.DType) -> NodeDef:
    return make_node("Cast", name, [source], SrcT=source_type, DstT=target_type, Truncate=False)


def _widen_node(node: NodeDef) -> NodeDef:
    if not any(_iterate_half_types(node)):
        return node
    if node.op == CONSTANT:
        value = tf.make_ndarray(node.attr["value"].tensor).astype("float32")
        constant = make_constant(node.name, value)
        constant.input[:] = node.input
        return constant
    widened = copy_node(node)
    for value in widened.attr.values():
        # An assignment to one kind of value would clear another.
        if value.type in _16_BITS:
            value.type = _FLOAT32
        for index, kind in enumerate(value.list.type):
            if kind in _16_BITS:
                value.list.type[index] = _FLOAT32
    return widened


def _widen_function(function: FunctionDef) -> FunctionDef:
    widened = FunctionDef()
    widened.CopyFrom(function)
    for argument in (*widened.signature.input_arg, *widened.signature.output_arg):
        if argument.type in _16_BITS:
            argument.type = _FLOAT32
    nodes = [_widen_node(node) for node in function.node_def]
    del widened.node_def[:]
    widened.node_def.extend(nodes)
    return widened


#: Fewer bits than integer kernels have: the rounding is part of the model.
_LEAST_BITS = 8
#: Largest noise, over the signal, of the outputs without fake quantization.
_MAX_SOURCE_NSR = 0.1


def without_fake_quantization(model: TensorFlowModel) -> TensorFlowModel:
    """Return the model whose fake-quantized tensors are floats with declared ranges.

    An unconverted model runs and is saved as given. The model is returned unchanged if there is no
    fake quantization, or if the outputs differ without.
    """
    graph, ranges = _extract_ranges(model)
    if not ranges:
        return model
    graph, _ = canonicalize_graph(graph, model.signature)
    floats = replace(model, graph=graph, given=model.source, source_ranges=ranges)
    try:
        is_close = _largest_output_nsr(model, replace(floats, given=None)) <= _MAX_SOURCE_NSR
    except ConversionError:
        logger.debug("the graph without fake quantization fails", exc_info=True)
        is_close = False
    if is_close:
        note = "fake quantization is not run in converted models: its ranges are calibrated ranges"
        return replace(floats, warnings=(*model.warnings, note))
    note = "fake quantization stays in floats, because the outputs differ without"
    return replace(model, warnings=(*model.warnings, note))


def _extract_ranges(model: TensorFlowModel) -> tuple[TensorGraph, dict[str, Range]]:
    """Return a graph without fake quantization before its layers, and the ranges.

    Behind the last layers, no integer kernel rounds and clips in its place.
    """
    layers = [name for name, node in model.graph.nodes.items() if node.op in LAYERS]
    upstream = model.graph.prune_unused(layers)
    graph, spans = model.graph.copy_graph(), dict[str, Range]()
    for name, node in list(graph.nodes.items()):
        span = _read_declared_range(graph, node)
        is_removed = name in upstream and name not in model.output_nodes
        if span is None or not is_removed or graph.is_constant(node.input[0]):
            continue
        spans[name] = span
        # A range from 0 on may have taken the place of a Relu.
        op = "Relu" if span[0] == 0 else "Identity"
        graph.add_node(make_node(op, name, node.input[:1], T=tf.float32))
    non_negative, replaced, ranges = (
        find_nonnegative_nodes(graph),
        dict[str, str](),
        dict[str, Range](),
    )
    for name, span in spans.items():
        source = plain_name(graph.nodes[name].input[0])
        source = replaced.get(source, source)
        if get_op_role(graph.nodes[name]) is Role.IDENTITY or source in non_negative:
            replaced[name] = source
        low, high = ranges.get(replaced.get(name, name), span)
        ranges[replaced.get(name, name)] = min(low, span[0]), max(high, span[1])
    graph.redirect_readers(replaced)
    return graph, ranges


def _read_declared_range(graph: TensorGraph, node: NodeDef) -> Range | None:
    """Return the range of a node for fake quantization; None for others."""
    if get_op_role(node) is not Role.FAKE_QUANTIZATION:
        return None
    if len(list_data_inputs(node)) == 1:
        low, high = node.attr["min"].f, node.attr["max"].f
    else:
        limits = [graph.find_constant(tensor) for tensor in node.input[1:3]]
        if limits[0] is None or limits[1] is None:
            return None
        low, high = (float(limit) for limit in limits if limit is not None)
    if node.attr["num_bits"].i < _LEAST_BITS or not low < high:
        return None
    if low > 0:  # as the kernel moves ranges without zero
        low, high = 0.0, high - low
    elif high < 0:
        low, high = low - high, 0.0
    if node.attr["narrow_range"].b:  # the lowest of all levels is not used
        low -= (high - low) / (STEPS - 1)
    return low, high


def _largest_output_nsr(given: TensorFlowModel, floats: TensorFlowModel) -> float:
    pairs = zip(
        *(list_float_arrays(model.run(model.example)) for model in (given, floats)), strict=True
    )
    ratios = []
    for expected, actual in pairs:
        error, signal = np.square(actual - expected).sum(), np.square(expected).sum()
        ratios.append(float(error / signal) if signal else float(error > 0))
    return max(ratios, default=0.0)
