"""Conversion of a model to the precisions of a plan.

One walk over the original graph: every op is written in its effective precision and requests its
inputs in the variant it needs. A variant of a tensor (FP32, BF16, FP16, uint8) is created on the
first request, so that there is at most one conversion per tensor and direction.

An integer convolution adds a residual summand in place: the result overwrites the summand. If any
other op still holds the memory of the summand, the kernel crashes the process instead of copying.
Therefore a summand is copied unless all its other consumers are certain to run before the kernel.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import tensorflow as tf

from neural_mp.adaptors.common.named_graphs import FP32, UINT8, VARIANT_OF
from neural_mp.adaptors.common.op_outputs import OutputLocation
from neural_mp.adaptors.common.quant_params import QuantParams, round_to_int8, weight_scales
from neural_mp.adaptors.tensorflow.graph.control_flow import transitive_closure
from neural_mp.adaptors.tensorflow.graph.ops import (
    INTEGER_KERNELS,
    Trait,
    get_op_properties,
    has_trait,
)
from neural_mp.adaptors.tensorflow.graph.tensor_graph import (
    Array,
    Consumers,
    NodeDef,
    TensorGraph,
    copy_node,
    find_typed_inputs,
    get_integers_attribute,
    get_node_name,
    get_text_attribute,
    is_control,
    list_data_inputs,
    make_node,
    plain_name,
)
from neural_mp.adaptors.tensorflow.kernels.convert_int8 import (
    Layer,
    make_kernel_limits,
    map_int8_layers,
    pad_stored,
    write_layer,
)
from neural_mp.adaptors.tensorflow.kernels.integer_kernels import DTYPES, U8, Forms
from neural_mp.adaptors.tensorflow.model import TensorFlowModel
from neural_mp.core.int8_accumulation import KernelKind, weight_qmax
from neural_mp.core.observations import Range
from neural_mp.core.precision import Precision
from neural_mp.space import ResolvedPlan


def write_table(forms: Forms, model: TensorFlowModel, node: NodeDef, weight_limit: int) -> str:
    """Write an op that reads rows of a constant table, as INT8 rows; return its node's name."""
    name, table = node.name, forms.source.constant_value(node.input[0])
    scales = model.weight_scales.get(plain_name(node.input[0]))
    if scales is None:
        scales = weight_scales(table, (1,), weight_limit)
    integers = round_to_int8(table, scales, weight_limit)

    def put_gather(constant: str, kind: tf.DType, suffix: str) -> str:
        inputs = [constant, *(forms.as_float(tensor) for tensor in node.input[1:])]
        types = {"Tparams": kind, **{key: node.attr[key] for key in ("Tindices", "Taxis")}}
        put = forms.graph.put_node(node.op, f"{name}/{suffix}", inputs, **types)
        forms.helpers[put] = name
        return put

    rows = put_gather(forms.graph.put_constant(f"{name}/table_int8", integers), tf.int8, "rows")
    steps = put_gather(
        forms.graph.put_constant(f"{name}/table_scale", scales), tf.float32, "scales"
    )
    types = {"SrcT": tf.int8, "DstT": tf.float32}
    numbers = forms.graph.put_node("Cast", f"{name}/numbers", [rows], **types)
    written = forms.graph.put_node(
        "Mul", forms.name_for(name, FP32), [numbers, steps], T=tf.float32
    )
    forms.set_variant(name, FP32, written)
    return written


def write_agnostic(
    forms: Forms,
    model: TensorFlowModel,
    node: NodeDef,
    moved: tuple[str, ...],
    encoding: QuantParams,
) -> str:
    """Write a quantize-agnostic op in INT8; return the name of its node."""
    stored = [forms.as_uint8(tensor) for tensor in moved]
    name = forms.name_for(node.name, UINT8)
    kernel = get_op_properties(node).kernel
    if kernel:
        limits = make_kernel_limits(forms, node.name, encoding)
        forms.graph.add_node(
            make_node(
                kernel,
                name,
                [stored[0], *limits],
                T=U8,
                ksize=get_integers_attribute(node, "ksize"),
                strides=get_integers_attribute(node, "strides"),
                padding=get_text_attribute(node, "padding"),
            )
        )
    elif node.op == "Pad":
        amounts = model.graph.constant_value(node.input[1])
        shape = model.shapes[moved[0]]
        name = pad_stored(forms, stored[0], name, amounts, encoding.zero_point, shape)
    elif node.op == "SpaceToBatchND":
        paddings = model.graph.constant_value(node.input[2])
        amounts = np.zeros((len(model.shapes[moved[0]] or ()), 2), np.int32)
        amounts[1 : 1 + len(paddings)] = paddings
        if encoding.zero_point != 0 and amounts.any():
            # The op itself pads with the integer 0.
            around = forms.graph.unused_name(f"{name}/around")
            zero, shape = encoding.zero_point, model.shapes[moved[0]]
            stored = [pad_stored(forms, stored[0], around, amounts, zero, shape)]
            node = copy_node(node)
            node.input[2] = forms.graph.put_constant(f"{name}/paddings", np.zeros_like(paddings))
        _write_on_bits(forms, node, stored, name)
    else:
        _write_on_bits(forms, node, stored, name)
    forms.set_variant(node.name, UINT8, name)
    return name


def _write_on_bits(forms: Forms, node: NodeDef, stored: list[str], name: str) -> None:
    """Write the op itself on uint8."""
    written = copy_node(node, forms.graph.unused_name(f"{name}/moved"))
    for position, tensor in enumerate(stored):
        written.input[position] = forms.cast_to_uint8(tensor, name)
    written.attr["T"].type = tf.uint8.as_datatype_enum
    forms.helpers[forms.graph.add_node(written)] = node.name
    forms.graph.add_node(make_node("Bitcast", name, [written.name], T=tf.uint8, type=U8))


def convert_frozen_graph(
    model: TensorFlowModel, plan: ResolvedPlan, ranges: Mapping[str, Range]
) -> TensorFlowModel:
    """Return the model in the precisions of a plan; the original is left unchanged.

    `ranges` maps each quantized tensor to the range that its scale must cover.
    """
    forms = Forms(model.graph, model.output_nodes, plan.flow, ranges)
    writer = _Writer(model, plan, forms)
    for node in model.graph.nodes.values():
        writer.write_node(node)
    return writer.finish_model()


@dataclass
class _Writer:
    model: TensorFlowModel
    plan: ResolvedPlan
    forms: Forms
    #: Last node fused into the kernel of an INT8 layer → the layer.
    layers: dict[str, Layer] = field(init=False)
    #: Node fused into the kernel of a layer → the last node fused into that kernel.
    inner: dict[str, str] = field(default_factory=dict)
    #: Node of the original graph → the node that replaces it.
    standing_for: dict[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.layers = map_int8_layers(self.model, self.plan.effective)
        for tail, layer in self.layers.items():
            self.inner.update(dict.fromkeys((layer.head, *layer.group.fused_ops), tail))

    def write_node(self, node: NodeDef) -> None:
        """Write one node of the original graph."""
        name = node.name
        precision = self.plan.effective.get(name, Precision.FP32)
        if name in self.layers:
            layer = self.layers[name]
            limit = weight_qmax(self.plan.plan[layer.head].weight)
            written = write_layer(self.forms, self.model, layer, self.plan.flow, limit)
        elif name in self.inner:
            return
        elif name in self.model.structure.agnostic_ops and name in self.plan.flow.int8_outputs:
            moved = self.model.structure.agnostic_ops[name]
            encoding = self.forms.get_quant_params(name)
            written = write_agnostic(self.forms, self.model, node, moved, encoding)
        elif name in self.model.structure.tables and precision is Precision.INT8:
            limit = weight_qmax(self.plan.plan[name].weight)
            written = write_table(self.forms, self.model, node, limit)
        elif precision.is_16_bit:
            written = self._write_16_bit(node, VARIANT_OF[precision])
        else:
            self._write_as_it_is(node)
            return
        self.standing_for[name] = written

    def _write_16_bit(self, node: NodeDef, form: str) -> str:
        written, typed = copy_node(node), find_typed_inputs(node)
        for position, tensor in enumerate(node.input):
            if not is_control(tensor):
                target = form if position in typed else FP32
                written.input[position] = self.forms.as_float(tensor, target)
        written.attr["T"].type = DTYPES[form].as_datatype_enum
        written.name = self.forms.graph.unused_name(f"{node.name}/{form}")  # after names for casts
        self.forms.set_variant(node.name, form, self.forms.graph.add_node(written))
        return str(written.name)

    def _write_as_it_is(self, node: NodeDef) -> None:
        real = {tensor: self.forms.as_float(tensor) for tensor in list_data_inputs(node)}
        if any(tensor != converted for tensor, converted in real.items()):
            edited = self.forms.graph.edit_node(node.name)
            edited.input[:] = [real.get(plain_name(tensor), tensor) for tensor in node.input]

    def finish_model(self) -> TensorFlowModel:
        """Return the converted model without unused nodes."""
        graph, signature = self.forms.graph, self.model.signature
        for tensor in signature.output_tensors:
            self.forms.as_float(tensor)
        replaced = {name: self.standing_for[tail] for name, tail in self.inner.items()}
        replaced.update(self.standing_for)
        graph.redirect_readers({f"^{name}": f"^{written}" for name, written in replaced.items()})
        graph = graph.prune_unused(signature.output_tensors, signature.input_tensors)
        protect_summands(graph, self.model.output_nodes)
        ops, counts = self._time_owners(graph), self.forms.counts
        written = self._map_written_ops(graph)
        return self.model.with_graph(
            graph,
            ops=ops,
            counts=counts,
            results=self._map_output_locations(graph),
            written=written,
        )

    def _map_output_locations(self, graph: TensorGraph) -> dict[str, OutputLocation]:
        locations = {}
        for node in self.model.op_nodes:
            if node.name in self.inner and node.name not in self.layers:
                continue  # fused into a layer's kernel
            tensor, encoding = self.forms.get_computed_result(node.name)
            if get_node_name(tensor) in graph:
                locations[node.name] = OutputLocation(tensor, node.op, encoding)
        return locations

    def _time_owners(self, graph: TensorGraph) -> dict[str, str]:
        """Return node of the converted graph → the op that its time counts for."""
        heads = self.model.structure.layer_of
        names = {}
        for name in self.model.graph.nodes:
            written, op = self.standing_for.get(name, name), heads.get(name, name)
            if written in graph and written != op:
                names[written] = op
        return names

    def _map_written_ops(self, graph: TensorGraph) -> dict[str, str]:
        """Return node of the converted graph → its op (see `TensorFlowModel.written`)."""
        ops = dict.fromkeys((*self.standing_for, *self.inner), "")
        ops.update(self.forms.helpers)
        for name, written in self.standing_for.items():
            ops[written] = self.layers[name].head if name in self.layers else name
        return {name: op for name, op in ops.items() if name in graph and name != op}


#: Input position of the summand, after input, weight and bias.
_SUMMAND = 3

#: A copy: ops, each with its constant operand, applied in sequence.
_Copy = Sequence[tuple[str, Array]]


def protect_summands(graph: TensorGraph, outputs: frozenset[str]) -> None:
    """Insert copies before kernels whose summand another op may still read."""
    consumers = graph.find_consumers()
    copies: dict[str, Iterator[_Copy]] = {}
    for name, node in list(graph.nodes.items()):
        kind = INTEGER_KERNELS.get(node.op)
        if kind is not KernelKind.CONVOLUTION or b"Sum" not in node.attr["fused_ops"].list.s:
            continue
        summand = get_node_name(node.input[_SUMMAND])
        if not _can_overwrite_summand(graph, consumers, outputs, name, summand):
            variants = copies.setdefault(summand, _ways_to_copy())
            _copy_before(graph, name, summand, next(variants))


def _can_overwrite_summand(
    graph: TensorGraph, consumers: Consumers, outputs: frozenset[str], kernel: str, summand: str
) -> bool:
    """Whether all other readers of the summand's memory have run before the kernel does."""
    sharing = _find_sharing_memory(graph, consumers, summand)
    if not sharing.isdisjoint(outputs) or any(not graph.nodes[n].input for n in sharing):
        return False
    ancestors = set(graph.prune_unused([kernel]).nodes) - {kernel}
    readers = {edge for name in sharing for edge in consumers[name]} - {(kernel, _SUMMAND)}
    # An alias that is no ancestor of the kernel would be read, or kept, later.
    return sharing <= ancestors and all(reader in ancestors for reader, _ in readers)


def _find_sharing_memory(graph: TensorGraph, consumers: Consumers, start: str) -> set[str]:
    def iterate_memory_neighbours(name: str) -> Iterator[str]:
        node = graph.nodes[name]
        yield from (r for r, _ in consumers[name] if has_trait(graph.nodes[r], Trait.SHARES_MEMORY))
        if has_trait(node, Trait.SHARES_MEMORY):
            yield from (get_node_name(t) for t in node.input[:1] if not is_control(t))

    return transitive_closure([start], graph.nodes, iterate_memory_neighbours)


def _ways_to_copy() -> Iterator[_Copy]:
    """Yield distinct op sequences that leave a uint8 tensor unchanged.

    The runtime's optimizer would merge identical copies of a tensor, so that they share memory.
    """
    for op, neutral in (("BitwiseOr", 0), ("BitwiseXor", 0), ("BitwiseAnd", 255)):
        for axes in range(5):
            yield [(op, np.full([1] * axes, neutral, np.uint8))]
    for first in range(1, 256):
        for second in range(first, 256):
            yield [("BitwiseXor", np.asarray(k, np.uint8)) for k in (first, second, first ^ second)]


def _copy_before(graph: TensorGraph, kernel: str, summand: str, steps: _Copy) -> None:
    stem = graph.unused_name(f"{kernel}/summand")
    last = graph.put_node("Bitcast", f"{stem}/bits", [summand], T=U8, type=tf.uint8)
    for number, (op, operand) in enumerate(steps):
        constant = graph.put_constant(f"{stem}/neutral_{number}", operand)
        last = graph.put_node(op, f"{stem}/copied_{number}", [last, constant], T=tf.uint8)
    graph.edit_node(kernel).input[_SUMMAND] = graph.put_node(
        "Bitcast", stem, [last], T=tf.uint8, type=U8
    )
