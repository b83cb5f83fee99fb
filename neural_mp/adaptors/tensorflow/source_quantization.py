"""Fake quantization in a graph, as trained with rounding: its ranges are those of calibration.

The runtime computes fake quantization in floats, op by op. A plan needs the ops around, and rounds
the tensors in integer kernels.
"""

from __future__ import annotations

import logging
from dataclasses import replace

import numpy as np
import tensorflow as tf

from neural_mp.adaptors.common.calibration import STEPS
from neural_mp.adaptors.tensorflow.canonicalize import prepare
from neural_mp.adaptors.tensorflow.fusion import never_negative
from neural_mp.adaptors.tensorflow.layer_folding import LAYERS
from neural_mp.adaptors.tensorflow.model import TensorFlowModel
from neural_mp.adaptors.tensorflow.tensor_graph import (
    Array,
    NodeDef,
    TensorGraph,
    make_node,
    plain,
)
from neural_mp.core.observations import Range
from neural_mp.errors import ConversionError
from neural_mp.util.pytree import float_arrays

logger = logging.getLogger(__name__)

_WITH_TENSORS, _WITH_ATTRIBUTES = "FakeQuantWithMinMaxVars", "FakeQuantWithMinMaxArgs"
#: Fewer bits than integer kernels have: the rounding is part of the model.
_LEAST_BITS = 8
#: Largest noise, over the signal, of the outputs without fake quantization.
_MAX_SOURCE_NSR = 0.1


def without_fake_quantization(model: TensorFlowModel) -> TensorFlowModel:
    """Return the model whose fake-quantized tensors are floats with declared ranges.

    An unconverted model runs and is saved as given. The model is returned unchanged if there is no
    fake quantization, or if the outputs differ without.
    """
    graph, ranges = _read(model)
    if not ranges:
        return model
    graph, _ = prepare(graph, model.signature)
    floats = replace(model, graph=graph, given=model.source, source_ranges=ranges)
    try:
        is_close = _nsr(model, replace(floats, given=None)) <= _MAX_SOURCE_NSR
    except ConversionError:
        logger.debug("the graph without fake quantization fails", exc_info=True)
        is_close = False
    if is_close:
        note = "fake quantization is not run in converted models: its ranges are calibrated ranges"
        return replace(floats, warnings=(*model.warnings, note))
    note = "fake quantization stays in floats, because the outputs differ without"
    return replace(model, warnings=(*model.warnings, note))


def _read(model: TensorFlowModel) -> tuple[TensorGraph, dict[str, Range]]:
    """Return a graph without fake quantization before its layers, and the ranges.

    Behind the last layers, no integer kernel rounds and clips in its place.
    """
    layers = [name for name, node in model.graph.nodes.items() if node.op in LAYERS]
    upstream = model.graph.pruned(layers)
    graph, spans = model.graph.copy(), dict[str, Range]()
    for name, node in list(graph.nodes.items()):
        span = _declared(graph, node)
        is_removed = name in upstream and name not in model.output_nodes
        if span is None or not is_removed or graph.is_constant(node.input[0]):
            continue
        spans[name] = span
        # A range from 0 on may have taken the place of a Relu.
        op = "Relu" if span[0] == 0 else "Identity"
        graph.add(make_node(op, name, node.input[:1], T=tf.float32))
    non_negative, replaced, ranges = never_negative(graph), dict[str, str](), dict[str, Range]()
    for name, span in spans.items():
        source = plain(graph.nodes[name].input[0])
        source = replaced.get(source, source)
        if graph.nodes[name].op == "Identity" or source in non_negative:
            replaced[name] = source
        low, high = ranges.get(replaced.get(name, name), span)
        ranges[replaced.get(name, name)] = min(low, span[0]), max(high, span[1])
    graph.redirect(replaced)
    return graph, ranges


def _declared(graph: TensorGraph, node: NodeDef) -> Range | None:
    """Return the range of a node for fake quantization; None for others."""
    if node.op == _WITH_ATTRIBUTES:
        low, high = node.attr["min"].f, node.attr["max"].f
    elif node.op == _WITH_TENSORS:
        limits = [graph.constant(tensor) for tensor in node.input[1:3]]
        if limits[0] is None or limits[1] is None:
            return None
        low, high = (float(limit) for limit in limits if limit is not None)
    else:
        return None
    if node.attr["num_bits"].i < _LEAST_BITS or not low < high:
        return None
    if low > 0:  # as the kernel moves ranges without zero
        low, high = 0.0, high - low
    elif high < 0:
        low, high = low - high, 0.0
    if node.attr["narrow_range"].b:  # the lowest of all levels is not used
        low -= (high - low) / (STEPS - 1)
    return low, high


def _nsr(given: TensorFlowModel, floats: TensorFlowModel) -> float:
    """Return the largest NSR of the float outputs of a model for the example."""
    pairs = zip(*(float_arrays(model.run(model.example)) for model in (given, floats)), strict=True)
    return max((_ratio(expected, actual) for expected, actual in pairs), default=0.0)


def _ratio(expected: Array, actual: Array) -> float:
    error, signal = np.square(actual - expected).sum(), np.square(expected).sum()
    return float(error / signal) if signal else float(error > 0)
