"""Structure of a graph (fusion groups, quantize-agnostic ops, tables), and folding into layers."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache, cached_property
from typing import Any

import numpy as np
import tensorflow as tf
from numpy.typing import NDArray
from scipy import special

from neural_mp.adaptors.common.kernels import fusion
from neural_mp.adaptors.common.kernels.fusion import (
    BIAS,
    SUM,
    Affine,
    FusionRules,
    find_fusion_groups,
    map_fused_ops,
)
from neural_mp.adaptors.common.signatures.signature import Shape
from neural_mp.adaptors.tensorflow.graph.ops import (
    LAYERS,
    PLACEHOLDERS,
    SUMMAND,
    Role,
    Trait,
    get_op_properties,
    get_op_role,
)
from neural_mp.adaptors.tensorflow.graph.runtime import Runner, import_runnable
from neural_mp.adaptors.tensorflow.graph.shape_inference import Shapes, infer_shapes
from neural_mp.adaptors.tensorflow.graph.tensor_graph import (
    Array,
    Consumers,
    NodeDef,
    TensorGraph,
    channels_first,
    get_integers_attribute,
    get_node_name,
    get_output_index,
    get_text_attribute,
    list_data_inputs,
    make_node,
    read_constant_shape,
)

Values = NDArray[np.float64]
#: Names in kernels of the exact and the approximate GELU (Hendrycks and Gimpel, 2016).
_FORMS = {
    "GeluExact": lambda x: 0.5 * x * special.erfc(-x / np.sqrt(2)),
    "GeluApproximate": lambda x: (
        0.5 * x * (1 + np.tanh(np.sqrt(2 / np.pi) * (x + 0.044715 * x**3)))
    ),
}
#: Upper bound of the ops in any formulation of GELU.
_MOST_OPS = 12
_POINTS = np.linspace(-6, 6, 97)


#: Step with names for nodes and tensors.
Step = fusion.Step[str, str]


def find_gelu(graph: TensorGraph, consumers: Consumers, start: str) -> Step | None:
    """Return the GELU that is the only consumer of a tensor, or None.

    The ops behind the tensor are followed to the single tensor that they all lead to, and evaluated
    at sample points, so that any formulation of GELU matches.
    """
    values: dict[str, Values] = {start: _POINTS}
    while len(values) <= _MOST_OPS:
        computable = _find_computable(graph, consumers, values)
        if computable is None:
            return None
        last, formula, arguments = computable
        with np.errstate(all="ignore"):
            values[last] = np.asarray(formula(*arguments))
        inner = [name for name in values if name != last]
        if all(reader in values for name in inner for reader, _ in consumers[name]):
            for kind, form in _FORMS.items():
                # Constants are float32; the exact and approximate GELU differ by up to 5e-4.
                same_shape = values[last].shape == _POINTS.shape
                if same_shape and np.allclose(form(_POINTS), values[last], rtol=0, atol=1e-5):
                    return Step(kind, tuple(values)[1:])
    return None


def _find_computable(
    graph: TensorGraph, consumers: Consumers, values: Mapping[str, Values]
) -> tuple[str, Callable[..., Any], list[Values]] | None:
    """Return a node that reads only known values and scalars, its formula and its operands."""
    for name in values:
        for reader, _ in consumers[name]:
            formula = get_op_properties(graph.nodes[reader]).formula
            if reader in values or formula is None:
                continue
            tensors = list_data_inputs(graph.nodes[reader])
            operands = [values[t] if t in values else _read_scalar_value(graph, t) for t in tensors]
            available = [value for value in operands if value is not None]
            if len(available) == len(operands):
                return reader, formula, available
    return None


def _read_scalar_value(graph: TensorGraph, tensor: str) -> Values | None:
    value = graph.find_constant(tensor)
    return value.reshape(()).astype(np.float64) if value is not None and value.size == 1 else None


#: Fusion group with names for nodes and tensors.
FusionGroup = fusion.FusionGroup[str, str]

#: Averages over larger windows are too fine for the scale of their input.
LARGEST_AVERAGE = 9


@dataclass(frozen=True)
class GraphStructure:
    """Structure of a graph as far as INT8 is concerned.

    Attributes:
        fusion_groups: layer with a constant weight → ops that can be fused into its kernel.
        layer_of: node that can be fused into a layer's kernel → that layer.
        agnostic_ops: quantize-agnostic ops → the tensors they move.
        non_negative: nodes whose results are never negative for any data.
        tables: ops that read rows of a constant float32 table, e.g. embeddings.
    """

    fusion_groups: Mapping[str, FusionGroup]
    layer_of: Mapping[str, str]
    agnostic_ops: Mapping[str, tuple[str, ...]]
    non_negative: frozenset[str]
    tables: frozenset[str]


def graph_structure(graph: TensorGraph, outputs: frozenset[str], shapes: Shapes) -> GraphStructure:
    """Return the structure of a graph; `outputs` are the nodes of its outputs."""
    layers = [
        name
        for name, node in graph.nodes.items()
        if node.op in LAYERS and graph.is_constant(node.input[1])
    ]
    groups = find_fusion_groups(layers, _Kernels(graph, outputs, shapes))
    agnostic_ops = {
        name: moved
        for name, node in graph.nodes.items()
        if (moved := _list_moved_tensors(graph, node)) and shapes[name] is not None
    }
    return GraphStructure(
        groups,
        map_fused_ops(groups.values()),
        agnostic_ops,
        find_nonnegative_nodes(graph),
        frozenset(name for name, node in graph.nodes.items() if _is_table(graph, node)),
    )


class _Kernels(FusionRules[str, str]):
    """Fusion rules of oneDNN's integer kernels."""

    def __init__(self, graph: TensorGraph, outputs: frozenset[str], shapes: Shapes) -> None:
        self.graph, self.outputs, self.shapes = graph, outputs, shapes
        self.consumers = graph.find_consumers()

    def match_bias(self, group: FusionGroup) -> Step | None:
        node = self._find_only_consumer(group)
        if node is None or get_op_role(node) is not Role.BIAS or channels_first(node):
            return None
        if not self.graph.is_constant(node.input[1]):
            return None
        return Step(BIAS, (node.name,), node.input[1])

    def match_residual_sum(self, group: FusionGroup) -> Step | None:
        node, last = self._find_only_consumer(group), group.tail
        if node is None or get_op_role(node) is not Role.ADDITION:
            return None
        if SUMMAND not in LAYERS[self.graph.nodes[group.head].op].options:
            return None
        first, second = list_data_inputs(node)
        summand = second if first == last else first
        if summand == last or ":" in summand or self.graph.is_constant(summand):
            return None
        if not self.shapes.are_equal(last, summand):
            return None
        # The batch sizes of several inputs may differ.
        if len(self._fed_by[last] | self._fed_by[summand]) > 1:
            return None
        return Step(SUM, (node.name,), summand)

    def match_activation(self, group: FusionGroup) -> Step | None:
        kernel, last = LAYERS[self.graph.nodes[group.head].op], group.tail
        if kernel.is_dense and last not in self.outputs:
            gelu = find_gelu(self.graph, self.consumers, last)
            if gelu is not None and self.outputs.isdisjoint(gelu.ops[:-1]):
                return gelu
        node = self._find_only_consumer(group)
        if node is None or node.op not in kernel.activations:
            return None
        return Step(node.op, (node.name,))

    def _find_only_consumer(self, group: FusionGroup) -> NodeDef | None:
        """Return the only reader of the last result; None if the result is an output."""
        if group.tail in self.outputs:
            return None
        following = find_only_reader(self.graph, self.consumers, group.tail)
        return following[0] if following is not None else None

    @cached_property
    def _fed_by(self) -> Mapping[str, frozenset[str]]:
        """Node → the placeholders that the node is computed from."""
        placeholders: dict[str, frozenset[str]] = {}
        for name, node in self.graph.nodes.items():
            sources = (
                placeholders.get(get_node_name(tensor), frozenset()) for tensor in node.input
            )
            own = frozenset({name} if node.op in PLACEHOLDERS else ())
            placeholders[name] = own.union(*sources)
        return placeholders


def _list_moved_tensors(graph: TensorGraph, node: NodeDef) -> tuple[str, ...]:
    """Return the tensors that an op moves unchanged; empty if the op does more."""
    entry, tensors = get_op_properties(node), list_data_inputs(node)
    if not entry.moves or "T" not in node.attr:
        return ()
    moved = tensors[: entry.moves]
    computed = not any(":" in tensor or graph.is_constant(tensor) for tensor in moved)
    others_constant = all(graph.is_constant(tensor) for tensor in tensors[len(moved) :])
    if not computed or not others_constant or channels_first(node):
        return ()
    if entry.kernel:
        window = get_integers_attribute(node, "ksize")
        plain_padding = get_text_attribute(node, "padding") in ("SAME", "VALID")
        if window[0] != 1 or window[3] != 1 or not plain_padding:
            return ()
        if entry.role is Role.AVERAGE and find_average_obstacle(node) is not None:
            return ()
    return tuple(moved)


@cache
def rounds_averages() -> bool:
    """Whether integer average pooling rounds; without oneDNN, it truncates, and is slow."""
    graph = TensorGraph({})
    graph.put_constant("x", np.array([1, 2], np.uint8).reshape(1, 1, 2, 1), tf.quint8)
    limit = graph.put_constant("limit", np.float32(1))
    window = {"ksize": [1, 1, 2, 1], "strides": [1, 1, 1, 1], "padding": "VALID"}
    graph.put_node("QuantizedAvgPool", "pooled", ["x", limit, limit], T=tf.quint8, **window)
    graph.put_node("Bitcast", "y", ["pooled"], T=tf.quint8, type=tf.uint8)
    (average,) = Runner(import_runnable(graph.to_graph_def()))({}, ["y"])
    return int(np.squeeze(average)) == 2


def find_average_obstacle(node: NodeDef) -> str | None:
    """Return why an average pooling does not pass INT8 on; None if it does."""
    if int(np.prod(get_integers_attribute(node, "ksize"))) > LARGEST_AVERAGE:
        return "averages of large windows are finer than INT8"
    if not rounds_averages():
        return "integer average pooling truncates without oneDNN (TF_ENABLE_ONEDNN_OPTS=1)"
    return None


def _is_table(graph: TensorGraph, node: NodeDef) -> bool:
    if get_op_role(node) is not Role.GATHER or node.attr["batch_dims"].i:
        return False
    table, rows, axis = list_data_inputs(node)
    if not graph.is_constant(table) or graph.is_constant(rows):
        return False
    is_float = node.attr["Tparams"].type == tf.float32.as_datatype_enum
    return (
        is_float and len(read_constant_shape(graph[table])) == 2 and graph.find_constant(axis) == 0
    )


def find_nonnegative_nodes(graph: TensorGraph) -> frozenset[str]:
    """Return the nodes whose results are never negative for any data."""
    nonnegative: set[str] = set()
    for name, node in graph.nodes.items():
        entry, sources = get_op_properties(node), list_data_inputs(node)
        moved = sources[: entry.moves or 1]
        if Trait.NEVER_NEGATIVE in entry.traits or (
            Trait.KEEPS_SIGN in entry.traits and moved and nonnegative.issuperset(moved)
        ):
            nonnegative.add(name)
        elif node.op == "Maximum":
            limits = [graph.find_constant(source) for source in sources]
            if any(limit is not None and np.min(limit, initial=0) >= 0 for limit in limits):
                nonnegative.add(name)
    return frozenset(nonnegative)


#: Formulas of affine maps.
_AFFINE = (np.add, np.subtract, np.multiply, np.divide)


def find_only_reader(
    graph: TensorGraph, consumers: Consumers, name: str
) -> tuple[NodeDef, int] | None:
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
    consumers = graph.find_consumers()
    for node in list(graph.nodes.values()):
        if node.op not in LAYERS or channels_first(node):
            continue
        weight = graph.find_constant(node.input[1])
        if weight is None or weight.dtype != np.float32:
            continue
        is_depthwise = LAYERS[node.op].is_depthwise
        channels = math.prod(weight.shape[2:]) if is_depthwise else weight.shape[-1]
        affine = Affine.identity(channels)
        chain: list[NodeDef] = []
        last = node
        while last.name not in outputs:
            following = find_only_reader(graph, consumers, last.name)
            if following is None or not _absorb_node(
                graph, *following, affine, LAYERS[node.op].rank
            ):
                break
            last = following[0]
            chain.append(last)
        if chain and [*map(get_op_role, chain)] != [Role.BIAS]:
            _replace_chain(graph, node, weight, affine, last)


def _absorb_node(
    graph: TensorGraph, node: NodeDef, position: int, affine: Affine, axes: int
) -> bool:
    """Return False if the node is not affine."""
    entry = get_op_properties(node)
    if entry.role is Role.BATCH_NORM:
        return _absorb_batch_norm(graph, node, position, affine)
    formula = np.add if entry.role is Role.BIAS else entry.formula
    if formula not in _AFFINE or len(node.input) != 2 or channels_first(node):
        return False
    value = graph.find_constant(node.input[1 - position])
    channels = len(affine.scale)
    if value is None or value.ndim > axes:
        return False
    if value.size != 1 and (value.size != channels or value.shape[-1] != channels):
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
    values = [graph.find_constant(tensor) for tensor in list_data_inputs(node)[1:5]]
    trains = node.attr["is_training"].b if "is_training" in node.attr else True
    if position != 0 or trains or channels_first(node) or any(v is None for v in values):
        return False
    affine.then_normalize(values, node.attr["epsilon"].f)
    return True


def _replace_chain(
    graph: TensorGraph, layer: NodeDef, weight: Array, affine: Affine, last: NodeDef
) -> None:
    """Set the new weight of a layer, and replace the end of the chain by one BiasAdd."""
    scale = affine.scale
    if LAYERS[layer.op].is_depthwise:
        scale = scale.reshape(weight.shape[2:])
    folded = (weight * scale).astype(np.float32)
    edited = graph.edit_node(layer.name)
    if not np.array_equal(folded, weight):
        edited.input[1] = graph.put_constant(f"{layer.name}/weight", folded)
    bias = graph.put_constant(f"{layer.name}/bias", affine.shift.astype(np.float32))
    graph.add_node(make_node("BiasAdd", last.name, [layer.name, bias], T=tf.float32))


def fold_paddings(graph: TensorGraph) -> None:
    """Fold a zero Pad before a convolution into the padding of the convolution."""
    inferred: Shapes | None = None  # inferred only for a graph that needs them
    for name, node in list(graph.nodes.items()):
        kernel = LAYERS.get(node.op)
        if kernel is None or kernel.is_dense:
            continue
        pad = graph[node.input[0]]
        if pad.op != "Pad" or get_output_index(node.input[0]) or channels_first(node):
            continue
        amounts = graph.find_constant(pad.input[1])
        if amounts is None or amounts.shape != (4, 2) or amounts[[0, 3]].any() or amounts.min() < 0:
            continue
        padding = get_text_attribute(node, "padding")
        inferred = inferred or infer_shapes(graph)
        if padding == "VALID" and _is_same_padding(graph, node, amounts, inferred[pad.name]):
            edited = graph.edit_node(name)
            edited.attr["padding"].s = b"SAME"
        elif "explicit" in kernel.options and padding in ("VALID", "EXPLICIT"):
            already = get_integers_attribute(node, "explicit_paddings") or [0] * 8
            edited = graph.edit_node(name)
            edited.attr["padding"].s = b"EXPLICIT"
            total = [a + int(b) for a, b in zip(already, amounts.reshape(-1), strict=True)]
            edited.attr["explicit_paddings"].list.i[:] = total
        else:
            continue
        edited.input[0] = pad.input[0]


def _is_same_padding(graph: TensorGraph, node: NodeDef, amounts: Array, padded: Shape) -> bool:
    weight = graph.find_constant(node.input[1])
    if weight is None or padded is None:
        return False
    around = amounts.sum(axis=1)
    sizes = tuple(
        None if size is None else size - int(zeros)
        for size, zeros in zip(padded, around, strict=True)
    )
    same = compute_same_paddings(node, weight, sizes)
    return same is not None and np.array_equal(amounts, same)


def compute_same_paddings(node: NodeDef, weight: Array, sizes: Shape) -> Array | None:
    """Return the `SAME` padding, [4, 2], of a convolution with channels last.

    None if the padding depends on the input's size, and the size is unknown.
    """
    strides = get_integers_attribute(node, "strides")
    dilations = get_integers_attribute(node, "dilations") or [1, 1, 1, 1]
    amounts = np.zeros((4, 2), np.int32)
    for axis in (1, 2):
        window = (weight.shape[axis - 1] - 1) * dilations[axis] + 1
        around = _compute_axis_padding(
            None if sizes is None else sizes[axis], window, strides[axis]
        )
        if around is None:
            return None
        amounts[axis] = around
    return amounts


def _compute_axis_padding(size: int | None, window: int, stride: int) -> tuple[int, int] | None:
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
