"""Conversion of a model to the precisions of a plan.

The CPU plugin runs a layer in INT8 if its inputs come from FakeQuantize and its weight from int8
constants; a FakeQuantize after a layer becomes part of the layer's kernel. Ops written in BF16
types run in BF16 while the model is compiled for FP32. So quantized tensors get a FakeQuantize,
INT8 layers an int8 weight, and 16-bit ops inputs in 16 bits, or the model a hint to run in BF16.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, MutableMapping
from dataclasses import dataclass, field, replace
from functools import lru_cache
from weakref import WeakKeyDictionary

import numpy as np

from neural_mp.adaptors.common.named_graphs import cast_saturating
from neural_mp.adaptors.common.op_outputs import OutputLocation
from neural_mp.adaptors.common.quant_params import STEPS, QuantParams
from neural_mp.adaptors.common.weights.grouped_weight import (
    GroupedWeight,
    GroupParameters,
    Quantizer,
    input_group_size,
)
from neural_mp.adaptors.contract import ConversionCounts
from neural_mp.adaptors.openvino.fusion import (
    GraphStructure,
    find_quantized_sums,
    graph_structure,
    has_weight,
    is_product,
)
from neural_mp.adaptors.openvino.graph.edit import (
    get_constant_array,
    get_op_type,
    get_tensor_name,
    give_name,
    is_constant,
    is_float,
    iterate_nodes_before,
    list_result_readers,
    name_of,
    rank_of,
    redirect_inputs,
)
from neural_mp.adaptors.openvino.graph.integer_weights import (
    ALONE,
    STORED,
    WEIGHT,
    Rounded,
    build_grouped_weight,
    build_layer_weight,
    build_product_weight,
    count_matrix_sizes,
    is_table,
    make_weight_matrix,
    put_matrix,
    rows_of_table,
    set_input_group,
)
from neural_mp.adaptors.openvino.graph.recurrent import (
    choose_input_widths,
    count_stepwise_inputs,
    insert_gru_steps,
    quantize_sequence,
    resets_product,
)
from neural_mp.adaptors.openvino.model import OpenVinoModel
from neural_mp.adaptors.openvino.ops import Role, has_role
from neural_mp.adaptors.openvino.runtime import (
    CPU,
    PRECISION_HINT,
    get_core,
    get_numpy_dtype,
    ops,
    ov,
)
from neural_mp.core.enums import KernelInputs
from neural_mp.core.int8_accumulation import weight_qmax
from neural_mp.core.observations import ChannelRange, Range
from neural_mp.core.precision import OpConfig, Precision
from neural_mp.core.quant_spec import QuantSpec
from neural_mp.space import ResolvedPlan
from neural_mp.util.pytree import Array

#: Suffixes of the names of inserted nodes.
QUANTIZED, CAST, BOUNDED, SEPARATED = "/quantize", "/cast", "/bounded", "/separated"
#: Suffix of the name of inputs that a weight in groups scales.
SCALED = "/scaled_inputs"
#: Near the largest finite float32.
_FLOAT_BOUND = 3e38
_F32 = ov.Type.f32
#: Graph → name of a layer, largest integer → its rounded weight, for conversions to other plans.
_ROUNDED: MutableMapping[ov.Model, dict[tuple[str, int], Rounded]] = WeakKeyDictionary()
#: Precision of an op → the element type that it is written in.
_TYPES = {
    Precision.FP32: _F32,
    Precision.INT8: _F32,
    Precision.INT4: _F32,
    Precision.BF16: ov.Type.bf16,
    Precision.FP16: ov.Type.f16,
}
_FLOATING = tuple(_TYPES.values())


def convert_graph(
    model: OpenVinoModel, plan: ResolvedPlan, ranges: Mapping[str, Range]
) -> OpenVinoModel:
    """Return the model converted to a plan; see `Adaptor.convert_graph`."""
    program = model.program.clone()
    graph = graph_structure(program, model.rejected_ops)
    writer = _TensorWriter(graph, plan, ranges, _unshifted_scale_owners(graph, plan))
    rounded = _ROUNDED.setdefault(model.program, {})
    weights = _WeightWriter(graph, plan, model.grouped, writer.owners, rounded)
    if groups := weights.list_input_groups():
        set_input_group(program, min(groups))
    weights.quantize_layers()
    weights.group_weights()
    writer.quantize_tensors()
    writer.bound_results()
    if runs_by_hint(graph, plan.effective):
        set_hint(program, graph, plan.effective)
    else:
        writer.cast_to_16_bits()
    writer.quantize_recurrent()
    weights.replace_ops()
    writer.separate_rejected(model.rejected_ops)
    program.validate_nodes_and_infer_types()
    return replace(
        model,
        program=program,
        given=None,
        ops=writer.owners,
        results=writer.result_locations(),
        counts=writer.counts,
        grouped={},
        _runners={},
    )


def _unshifted_scale_owners(
    graph: GraphStructure, plan: ResolvedPlan
) -> tuple[frozenset[str], frozenset[str]]:
    """Return the owners of the scales of inputs whose INT8 kernels take no zero point.

    Those of transposed convolutions and of first factors of products, and of second factors.
    """
    in_int8 = [n for op, n in graph.nodes.items() if plan.effective.get(op) is Precision.INT8]
    products = list(filter(is_product, in_int8))
    transposed = [n for n in in_int8 if has_role(n, Role.TRANSPOSED) and has_weight(n)]

    def input_scale_owners(nodes: list[ov.Node], index: int) -> frozenset[str]:
        return frozenset(
            plan.flow.scale_owner[get_tensor_name(n.input_value(index))] for n in nodes
        )

    return input_scale_owners([*products, *transposed], 0), input_scale_owners(products, 1)


def _limits_by_channel(span: ChannelRange, axes: int) -> tuple[Array, Array]:
    """Return the smallest and the largest representable number of every channel."""
    params = [QuantParams.of(channel) for channel in span.channels]
    shape = (1, -1) + (1,) * (axes - 2)
    low, high = ([getattr(param, end) for param in params] for end in ("low", "high"))
    return np.array(low, np.float32).reshape(shape), np.array(high, np.float32).reshape(shape)


@dataclass
class _TensorWriter:
    structure: GraphStructure
    plan: ResolvedPlan
    ranges: Mapping[str, Range]
    #: Owners of the scales of inputs without zero points, the latter of which are always int8.
    unshifted: tuple[frozenset[str], frozenset[str]]
    #: Inserted node → the op that it was inserted for.
    owners: dict[str, str] = field(default_factory=dict)
    quantized: int = 0
    #: Quantized tensor → the result of its FakeQuantize.
    _stored: dict[str, ov.Node] = field(default_factory=dict)
    #: Name of a cast tensor or constant → its result.
    _cast: dict[str, ov.Output] = field(default_factory=dict)
    #: The names of the casts among them.
    _casts: set[str] = field(default_factory=set)

    @property
    def counts(self) -> ConversionCounts:
        """The inserted conversions that run as such."""
        return ConversionCounts(casts=len(self._casts), quantize=self.quantized)

    def quantize_tensors(self) -> None:
        """Insert a FakeQuantize for each quantized tensor and redirect its readers."""
        flow = self.plan.flow
        moved = self.structure.agnostic_ops
        for tensor, root in flow.scale_owner.items():
            output = self.structure.tensors[tensor]
            written = tensor in flow.int8_outputs
            # INT8 moves through these ops with the scale of what they read.
            op = self.structure.parts.get(tensor, tensor)
            if written and op in moved:
                continue
            # The state within the kernel of a sequence is quantized, its result is float.
            if self._is_sequence_head(op) and all(
                tensor not in tensors for tensors in flow.int8_reads.values()
            ):
                continue
            # The plugin fuses a sum into a convolution if the result of the convolution is
            # quantized, too.
            is_term = not written and self._is_inside_kernel(op)
            readers = [
                port
                for port in output.get_target_inputs()
                if written or is_term or tensor in flow.int8_reads.get(name_of(port.get_node()), ())
            ]
            # Outputs of the model read quantized values, too: a kernel has a single result.
            stored = self._insert_fake_quantize(tensor, output, root)
            for port in readers:
                if written or not has_role(port.get_node(), Role.RESULT):
                    port.replace_source_output(stored.output(0))
            if not written and not is_term:
                self.quantized += 1

    def quantize_recurrent(self) -> None:
        """Quantize inputs, states and weights of INT8 sequences.

        The input has a scale of its own, and is not quantized before unless for other readers.
        """
        layers = {
            name: node
            for name, node in self.structure.nodes.items()
            if self._is_sequence_head(name) and self.plan.effective.get(name) is Precision.INT8
        }
        widths = choose_input_widths(layers.values())
        for name, node in layers.items():
            tensor = get_tensor_name(node.input_value(0)).removesuffix(QUANTIZED)
            if tensor not in self.plan.flow.int8_outputs:
                node.input(0).replace_source_output(self._stored[tensor].input_value(0))
            span = self.ranges[self.plan.flow.scale_owner[tensor]]
            limit = weight_qmax(self.plan.plan[name].weight)
            state = self._shared_scale_params(self.plan.flow.scale_owner[name])
            op_names = quantize_sequence(node, span, state, limit, widths[name])
            self.owners.update(dict.fromkeys(op_names, name))

    def bound_results(self) -> None:
        """Insert a Clamp without effect behind INT8 convolutions that end in float without a bias.

        A result with several readers is scaled wrongly by the plugin otherwise. The Clamp becomes
        part of the kernel.
        """
        for name, node in self.structure.nodes.items():
            if not has_role(node, Role.CONVOLUTION) or f"{name}{WEIGHT}" not in self.owners:
                continue
            if name in self.plan.flow.int8_outputs or self._is_inside_kernel(name):
                continue
            readers = list(node.output(0).get_target_inputs())
            bounded = ops.clamp(node, -_FLOAT_BOUND, _FLOAT_BOUND)
            redirect_inputs(readers, give_name(f"{name}{BOUNDED}", bounded))
            self.owners[f"{name}{BOUNDED}"] = name

    def separate_rejected(self, rejected: Collection[str]) -> None:
        """Insert a Maximum without effect between ops and the integer kernels next to them.

        Transformations of the plugin move no scale past a Maximum, and no kernel includes one that
        follows.
        """
        for name in rejected:
            node = self.structure.nodes[name]
            sources = iterate_nodes_before(node, Role.LAYER | Role.QUANTIZATION)
            is_next = any(
                has_role(source, Role.QUANTIZATION) or f"{name_of(source)}{WEIGHT}" in self.owners
                for source in sources
            )
            inputs = [port for port in node.inputs() if not is_constant(port.get_source_output())]
            written = [
                self._stored[tensor].input(0)
                for tensor in map(get_tensor_name, node.outputs())
                if tensor in self._stored
            ]
            for index, port in enumerate((*(inputs if is_next else ()), *written)):
                output = port.get_source_output()
                least = ops.convert(ops.constant(-np.inf, _F32), output.get_element_type())
                barrier = give_name(f"{name}{SEPARATED}{index}", ops.maximum(output, least))
                self.owners[name_of(barrier)] = name
                redirect_inputs([port], barrier)

    def _shared_scale_params(self, root: str) -> QuantParams:
        span = self.ranges[root]
        states = any(map(self._is_sequence_head, self.plan.flow.scale_members[root]))
        first, second = self.unshifted
        signed = states or root in second or (root in first and span[0] < 0)
        return (QuantParams.signed if signed else QuantParams.of)(span)

    def _is_sequence_head(self, op: str) -> bool:
        heads, nodes = self.structure.fusion_groups, self.structure.nodes
        return op in heads and has_role(nodes[op], Role.SEQUENCE)

    def _insert_fake_quantize(self, tensor: str, output: ov.Output, root: str) -> ov.Node:
        span, params = self.ranges[root], self._shared_scale_params(root)
        low, high = np.array(params.low, np.float32), np.array(params.high, np.float32)
        if isinstance(span, ChannelRange):
            low, high = _limits_by_channel(span, rank_of(output) or 0)
        stored = ops.fake_quantize(output, low, high, low, high, STEPS + 1)
        self.owners[f"{tensor}{QUANTIZED}"] = self.structure.parts.get(tensor, tensor)
        self._stored[tensor] = give_name(f"{tensor}{QUANTIZED}", stored)
        return stored

    def cast_to_16_bits(self) -> None:
        """Write ops in 16 bits: their inputs are cast, and inputs of other ops are cast back."""
        types = {
            name: _TYPES[self.plan.effective.get(name, Precision.FP32)]
            for name in self.structure.nodes
        }
        layers = [name for name, kind in types.items() if kind == ov.Type.bf16]
        sums = find_quantized_sums(self.structure, layers, self._stored)
        types |= {name: ov.Type.bf16 for name in sums if types[name] == _F32}
        if set(types.values()) == {_F32}:
            return
        for name, node in self.structure.nodes.items():
            self._cast_inputs(node, types[name])
            node.validate_and_infer_types()
            for tensor in map(get_tensor_name, node.outputs()):
                if tensor in self._stored:
                    self._cast_inputs(self._stored[tensor], _F32)
                    self._stored[tensor].validate_and_infer_types()
            for output in node.outputs():
                for port in output.get_target_inputs():
                    if has_role(port.get_node(), Role.RESULT):
                        self._cast_inputs(port.get_node(), _F32)

    def _cast_inputs(self, node: ov.Node, kind: ov.Type) -> None:
        for port in node.inputs():
            output = port.get_source_output()
            if output.get_element_type() in _FLOATING and output.get_element_type() != kind:
                port.replace_source_output(self._cast_output(output, kind))

    def _cast_output(self, output: ov.Output, kind: ov.Type) -> ov.Output:
        """Return a tensor in another type: a cast, the origin of a cast, or a cast constant."""
        node, name = output.get_node(), f"{get_tensor_name(output)}/{kind.get_type_name()}{CAST}"
        if name in self._cast:
            return self._cast[name]
        array = get_constant_array(output)
        if array is not None and kind != _F32:
            converted = _store_in_16_bits(array, kind).output(0)
        elif name_of(node) in self._casts and node.input_value(0).get_element_type() == kind:
            return node.input_value(0)
        else:
            converted = ops.convert(output, kind).output(0)
            self._casts.add(name)
        converted.get_node().set_friendly_name(name)
        self.owners[name] = self.owners.get(name_of(node), name_of(node))
        self._cast[name] = converted
        return converted

    def result_locations(self) -> dict[str, OutputLocation]:
        """Return op of the unconverted graph → location of its result."""
        locations = {}
        for tensor, output in self.structure.tensors.items():
            op = self.structure.parts.get(tensor, tensor)
            node = self.structure.nodes.get(op)
            is_floating = output.get_element_type() in _FLOATING
            if node is None or self._is_inside_kernel(op) or not is_floating:
                continue
            suffix = BOUNDED if f"{tensor}{BOUNDED}" in self.owners else ""
            params, is_stored = None, tensor in self._stored
            root = self.plan.flow.scale_owner.get(tensor)
            written = tensor in self.plan.flow.int8_outputs
            if written and root is not None and (is_stored or not self._is_sequence_head(op)):
                params = self._shared_scale_params(root)
                suffix = QUANTIZED if is_stored else ""
            locations[tensor] = OutputLocation(f"{tensor}{suffix}", get_op_type(node), params)
        return locations

    def _is_inside_kernel(self, op: str) -> bool:
        """Whether an op has no result of its own: all ops of an INT8 kernel except the last."""
        head = op if op in self.structure.fusion_groups else self.structure.layer_of.get(op)
        if head is None or self.plan.effective.get(head) is not Precision.INT8:
            return False
        kernel = self.structure.fusion_groups[head].fused_prefix(
            lambda member: self.plan.effective.get(member) is Precision.INT8
        )
        return op in (head, *kernel.fused_ops)[:-1]


def runs_by_hint(structure: GraphStructure, effective: Mapping[str, Precision]) -> bool:
    """Whether the hint spares casts of what INT8 kernels write, and changes no op's precision.

    Compiled for float32, an INT8 kernel writes integers or float32, so that ops written in BF16
    types behind it need a cast of the whole tensor; compiled for BF16, it writes BF16 itself. The
    hint applies to all float ops of a model and is kept in the model's runtime information.

    Ops in FP32 must read quantized tensors only, and BF16 ops or quantizations must read theirs:
    kernels compute in float32 whatever they write.
    """
    graph = _Precisions(structure.nodes, effective)
    has_spared = False
    for name, node in structure.nodes.items():
        precision = graph.precision_of(name)
        if precision is Precision.INT8 or not is_float(node.output(0)):
            continue
        inputs = list(graph.read_precisions(node))
        if precision is Precision.FP32:
            if {*inputs} != {None} or not {*graph.reader_precisions(node)} <= {
                Precision.BF16,
                None,
            }:
                return False
        elif precision is not Precision.BF16:
            return False
        has_spared |= precision is Precision.BF16 and Precision.INT8 in inputs
    return has_spared and _has_native_bf16()


def set_hint(
    program: ov.Model, structure: GraphStructure, effective: Mapping[str, Precision]
) -> None:
    """Have a graph compiled for BF16, with the constants of its BF16 ops stored in BF16."""
    program.set_rt_info("bf16", PRECISION_HINT)  # copies keep it
    for name, node in structure.nodes.items():
        if effective.get(name) is Precision.BF16:
            for index, port in enumerate(node.inputs()):
                _store_as_bf16(port, f"{name}/bf16{index}")


def _store_as_bf16(port: ov.Input, name: str) -> None:
    output = port.get_source_output()
    array = get_constant_array(output) if is_float(output) else None
    if array is None:
        return
    stored = _store_in_16_bits(array, ov.Type.bf16)
    redirect_inputs([port], give_name(name, ops.convert(stored, "f32")))


def _store_in_16_bits(array: Array, kind: ov.Type) -> ov.Node:
    """Return a constant with the values of a float array in a 16-bit type."""
    values = cast_saturating(np.asarray(array, np.float32), get_numpy_dtype(kind))
    bits = ov.Tensor(np.ascontiguousarray(values).view(np.uint16), ov.Shape(values.shape), kind)
    # From an array of BF16, a constant is filled element by element, 40 times as slowly.
    return ops.constant(bits, shared_memory=False)


class _Precisions:
    """Precisions along the edges of a graph with quantized tensors."""

    def __init__(self, nodes: Mapping[str, ov.Node], effective: Mapping[str, Precision]) -> None:
        self._nodes, self._effective = nodes, effective

    def precision_of(self, name: str) -> Precision:
        return self._effective.get(name, Precision.FP32)

    def read_precisions(self, node: ov.Node) -> Iterator[Precision | None]:
        """Yield the precisions of the float tensors that a node reads; None for quantized ones."""
        for output in node.input_values():
            if is_constant(output) or not is_float(output):
                continue
            source = output.get_node()
            while not self._is_inserted_quantize(source) and self._is_inserted(source):
                source = source.input_value(0).get_node()
            yield None if self._is_inserted_quantize(source) else self.precision_of(name_of(source))

    def reader_precisions(self, node: ov.Node) -> Iterator[Precision | None]:
        """Yield the precisions of the ops that read a node's results; None for quantizations."""
        for output in node.outputs():
            for reader in list_result_readers(output):
                yield (
                    None
                    if self._is_inserted_quantize(reader)
                    else self.precision_of(name_of(reader))
                )

    def _is_inserted(self, node: ov.Node) -> bool:
        return name_of(node) not in self._nodes and node.get_input_size() > 0

    def _is_inserted_quantize(self, node: ov.Node) -> bool:
        return self._is_inserted(node) and has_role(node, Role.QUANTIZATION)


@lru_cache(maxsize=1)
def _has_native_bf16() -> bool:
    """Whether the CPU computes in BF16; on others, the plugin ignores the hint."""
    return "BF16" in get_core().get_property(CPU, "OPTIMIZATION_CAPABILITIES")


@dataclass(frozen=True)
class _WeightWriter:
    """Writes weights in integers: of layers, by channel or in groups, and of tables."""

    structure: GraphStructure
    plan: ResolvedPlan
    #: Op → weight in groups to store as it is.
    grouped: Mapping[str, GroupedWeight]
    #: Inserted node → the op that it was inserted for, to be extended.
    owners: dict[str, str]
    #: Name of a layer, largest integer → its weight as rounded for earlier plans.
    rounded: dict[tuple[str, int], Rounded]

    def _integer_weights(
        self, *, grouped: bool
    ) -> Iterator[tuple[str, ov.Node, OpConfig, QuantSpec]]:
        """Yield name, node, config and quantization of weights in integers, in groups or not."""
        for name, node in self.structure.nodes.items():
            config = self.plan.plan.get(name)
            if config is None or config.weight is None:
                continue
            if (config.weight.group_size is not None) == grouped:
                yield name, node, config, config.weight

    def list_input_groups(self) -> list[int]:
        """Return the sizes of the groups of inputs that kernels round to INT8."""
        return [
            input_group_size(spec, size)
            for grouped in (True, False)
            for _, node, _, spec in self._integer_weights(grouped=grouped)
            if spec.inputs is KernelInputs.INT8
            for size in (
                count_stepwise_inputs(node)
                if resets_product(node)
                else count_matrix_sizes(node)[1:]
            )
        ]

    def quantize_layers(self) -> None:
        """Replace the weights of INT8 layers."""
        for name, node, config, spec in self._integer_weights(grouped=False):
            if not has_weight(node) or self.plan.effective[name] is not Precision.INT8:
                continue
            stem = f"{name}{ALONE if config.activation is None else WEIGHT}"
            self.owners[stem] = name
            if config.activation is None:
                put_matrix(node, build_product_weight(stem, make_weight_matrix(node), spec))
                continue
            redirect_inputs([node.input(1)], build_layer_weight(stem, node, spec, self.rounded))

    def group_weights(self) -> None:
        """Replace the weights that the plan stores in groups."""
        for name, node, _, spec in self._integer_weights(grouped=True):
            stem = f"{name}{WEIGHT}"
            quantizer = Quantizer(spec, GroupParameters.ZERO_POINTS)
            stored = self.grouped.get(name) or quantizer.round_to_nearest(make_weight_matrix(node))
            put_matrix(node, build_grouped_weight(stem, f"{stem}{STORED}", stored, spec))
            if stored.input_factors is not None:
                self._scale_inputs(name, node, stored.input_factors)
            self.owners[stem] = name

    def replace_ops(self) -> None:
        """Replace tables and GRU whose weights the plan stores alone; results keep their names."""
        for name, node, _, spec in self._integer_weights(grouped=False):
            if is_table(node):
                *nodes, result = rows_of_table(f"{name}{ALONE}", node, spec)
                results = [result]
            elif resets_product(node):
                nodes, results = insert_gru_steps(f"{name}{ALONE}", node, spec)
            else:
                continue
            self.owners.update(dict.fromkeys(map(name_of, nodes), name))
            for output, result in zip(node.outputs(), results, strict=True):
                readers = list(output.get_target_inputs())
                result.output(0).set_names(output.get_names())
                redirect_inputs(readers, give_name(get_tensor_name(output), result))

    def _scale_inputs(self, name: str, node: ov.Node, factors: Array) -> None:
        scaled = ops.multiply(node.input_value(0), ops.constant(factors))
        redirect_inputs([node.input(0)], give_name(f"{name}{SCALED}", scaled))
        self.owners[f"{name}{SCALED}"] = name
