"""Folding of affine chains after a layer, and of paddings before a layer, into the layer."""

from __future__ import annotations

import numpy as np
import tensorflow as tf

from neural_mp.adaptors.common.affine import Affine
from neural_mp.adaptors.common.signatures.signature import Shape
from neural_mp.adaptors.tensorflow.graph.ops import LAYERS, Role, op_type, role_of
from neural_mp.adaptors.tensorflow.graph.shape_inference import Shapes, shapes
from neural_mp.adaptors.tensorflow.graph.tensor_graph import (
    Array,
    Consumers,
    NodeDef,
    TensorGraph,
    channels_first,
    data_inputs,
    integers_attribute,
    make_node,
    output_of,
    text_attribute,
)

#: Formulas of affine maps.
_AFFINE = (np.add, np.subtract, np.multiply, np.divide)


def output_channels(node: NodeDef, weight: Array) -> int:
    """Return the number of output channels of a layer."""
    if LAYERS[node.op].is_depthwise:
        return int(weight.shape[2] * weight.shape[3])
    return int(weight.shape[-1])


def only_reader(graph: TensorGraph, consumers: Consumers, name: str) -> tuple[NodeDef, int] | None:
    """Return the only reader of a node's first result and the input position, or None."""
    readers = consumers[name]
    if len(readers) != 1:
        return None
    reader, position = graph.nodes[readers[0][0]], readers[0][1]
    if reader.input[position] not in (name, f"{name}:0"):
        return None
    return reader, position


def fold_affine_chains(graph: TensorGraph, outputs: frozenset[str]) -> None:
    """Fold biases, scalings and batch norms after layers into the weight and one BiasAdd."""
    consumers = graph.consumers()
    for node in list(graph.nodes.values()):
        if node.op not in LAYERS or channels_first(node):
            continue
        weight = graph.constant(node.input[1])
        if weight is None or weight.dtype != np.float32:
            continue
        affine = Affine.identity(output_channels(node, weight))
        chain: list[NodeDef] = []
        last = node
        while last.name not in outputs:
            following = only_reader(graph, consumers, last.name)
            if following is None or not _absorb_node(
                graph, *following, affine, LAYERS[node.op].rank
            ):
                break
            last = following[0]
            chain.append(last)
        if chain and [*map(role_of, chain)] != [Role.BIAS]:
            _replace_chain(graph, node, weight, affine, last)


def _absorb_node(
    graph: TensorGraph, node: NodeDef, position: int, affine: Affine, axes: int
) -> bool:
    """Return False if the node is not affine."""
    entry = op_type(node)
    if entry.role is Role.BATCH_NORM:
        return _absorb_batch_norm(graph, node, position, affine)
    formula = np.add if entry.role is Role.BIAS else entry.formula
    if formula not in _AFFINE or len(node.input) != 2 or channels_first(node):
        return False
    value = graph.constant(node.input[1 - position])
    channels = len(affine.scale)
    if value is None or not _is_per_channel(value, channels, axes):
        return False
    value = value.reshape(-1).astype(np.float64)
    if formula is np.multiply:
        affine.then_scale(value)
    elif formula is np.divide:
        if position != 0 or not np.all(value):
            return False
        affine.then_scale(1 / value)
    elif formula is np.subtract:
        if position == 1:
            affine.then_scale(np.asarray(-1.0))
        affine.then_add(value if position == 1 else -value)
    else:
        affine.then_add(value)
    return True


def _absorb_batch_norm(graph: TensorGraph, node: NodeDef, position: int, affine: Affine) -> bool:
    """Add FusedBatchNorm(x, scale, offset, mean, variance) in inference to an affine map."""
    values = [graph.constant(tensor) for tensor in data_inputs(node)[1:5]]
    trains = node.attr["is_training"].b if "is_training" in node.attr else True
    if position != 0 or trains or channels_first(node) or any(v is None for v in values):
        return False
    affine.then_normalize(values, node.attr["epsilon"].f)
    return True


def _is_per_channel(value: Array, channels: int, axes: int) -> bool:
    if value.ndim > axes:
        return False
    return value.size == 1 or (value.size == channels and value.shape[-1] == channels)


def _replace_chain(
    graph: TensorGraph, layer: NodeDef, weight: Array, affine: Affine, last: NodeDef
) -> None:
    """Set the new weight of a layer, and replace the end of the chain by one BiasAdd."""
    scale = affine.scale
    if LAYERS[layer.op].is_depthwise:
        scale = scale.reshape(weight.shape[2:])
    folded = (weight * scale).astype(np.float32)
    edited = graph.edit(layer.name)
    if not np.array_equal(folded, weight):
        edited.input[1] = graph.put_constant(f"{layer.name}/weight", folded)
    bias = graph.put_constant(f"{layer.name}/bias", affine.shift.astype(np.float32))
    graph.add(make_node("BiasAdd", last.name, [layer.name, bias], T=tf.float32))


def fold_paddings(graph: TensorGraph) -> None:
    """Fold a zero Pad before a convolution into the padding of the convolution."""
    inferred: Shapes | None = None  # inferred only for a graph that needs them
    for name, node in list(graph.nodes.items()):
        kernel = LAYERS.get(node.op)
        if kernel is None or kernel.is_dense:
            continue
        pad = graph[node.input[0]]
        if pad.op != "Pad" or output_of(node.input[0]) or channels_first(node):
            continue
        amounts = graph.constant(pad.input[1])
        if amounts is None or amounts.shape != (4, 2) or amounts[[0, 3]].any() or amounts.min() < 0:
            continue
        padding = text_attribute(node, "padding")
        inferred = inferred or shapes(graph)
        if padding == "VALID" and _is_same_padding(graph, node, amounts, inferred[pad.name]):
            edited = graph.edit(name)
            edited.attr["padding"].s = b"SAME"
        elif "explicit" in kernel.options and padding in ("VALID", "EXPLICIT"):
            already = integers_attribute(node, "explicit_paddings") or [0] * 8
            edited = graph.edit(name)
            edited.attr["padding"].s = b"EXPLICIT"
            total = [a + int(b) for a, b in zip(already, amounts.reshape(-1), strict=True)]
            edited.attr["explicit_paddings"].list.i[:] = total
        else:
            continue
        edited.input[0] = pad.input[0]


def _is_same_padding(graph: TensorGraph, node: NodeDef, amounts: Array, padded: Shape) -> bool:
    weight = graph.constant(node.input[1])
    if weight is None or padded is None:
        return False
    around = amounts.sum(axis=1)
    sizes = tuple(
        None if size is None else size - int(zeros)
        for size, zeros in zip(padded, around, strict=True)
    )
    same = same_paddings(node, weight, sizes)
    return same is not None and np.array_equal(amounts, same)


def same_paddings(node: NodeDef, weight: Array, sizes: Shape) -> Array | None:
    """Return the `SAME` padding, [4, 2], of a convolution with channels last.

    None if the padding depends on the input's size, and the size is unknown.
    """
    strides = integers_attribute(node, "strides")
    dilations = integers_attribute(node, "dilations") or [1, 1, 1, 1]
    amounts = np.zeros((4, 2), np.int32)
    for axis in (1, 2):
        window = (weight.shape[axis - 1] - 1) * dilations[axis] + 1
        around = _same_padding(None if sizes is None else sizes[axis], window, strides[axis])
        if around is None:
            return None
        amounts[axis] = around
    return amounts


def _same_padding(size: int | None, window: int, stride: int) -> tuple[int, int] | None:
    """Return the zeros of `SAME` padding before and after an axis; None if the size is needed.

    As TensorFlow defines them ("Neural network", `tf.nn`, notes on padding).
    """
    if stride == 1:
        total = window - 1
    elif size is None:
        return None
    else:
        total = max((-(-size // stride) - 1) * stride + window - size, 0)
    return total // 2, total - total // 2
