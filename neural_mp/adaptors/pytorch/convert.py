"""Conversion of a plan's INT8 ops to quantize/dequantize pairs, the portable form.

Portable to processors whose accumulation saturates, too: `with_reduced_weights`.
"""

from __future__ import annotations

import operator
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn
from torch.fx import GraphModule, Node
from torch.utils.weak import WeakTensorKeyDictionary

from neural_mp.adaptors.common.quant_params import (
    IntegerWeight,
    QuantParams,
    find_saturating_layers,
    kinds_beyond_7_bits,
)
from neural_mp.adaptors.common.weights.grouped_weight import (
    GroupedWeight,
    Quantizer,
    iterate_row_parts,
    join_row_parts,
)
from neural_mp.adaptors.pytorch.graph import float_weights
from neural_mp.adaptors.pytorch.graph import graph_edit as fx
from neural_mp.adaptors.pytorch.graph import qdq_ops as ops
from neural_mp.adaptors.pytorch.graph.casts import cast_dtype, insert_casts
from neural_mp.adaptors.pytorch.graph.fusion import is_node
from neural_mp.adaptors.pytorch.graph.int8_cache import use_int8_cache
from neural_mp.adaptors.pytorch.graph.model import TorchModel, assemble_module
from neural_mp.adaptors.pytorch.graph.quantizable_ops import (
    INTEGER_LAYERS,
    WEIGHTED,
    get_kernel_kind,
)
from neural_mp.adaptors.pytorch.graph.recurrent import RECURRENT_INT8, iterate_layer_weights
from neural_mp.adaptors.pytorch.kernels.float_kernels import mark_kernels
from neural_mp.adaptors.pytorch.kernels.lowering import rewrite_graphs
from neural_mp.core.enums import Approach, QuantDType
from neural_mp.core.int8_accumulation import REDUCED_WEIGHT, KernelKind, weight_qmax
from neural_mp.core.observations import Range
from neural_mp.core.quant_spec import QuantSpec
from neural_mp.core.quantization_flow import QuantizationFlow
from neural_mp.space import ResolvedPlan


def insert_quantization(
    module: GraphModule,
    resolved: ResolvedPlan,
    ranges: Mapping[str, Range],
    grouped: Mapping[str, GroupedWeight] | None = None,
) -> None:
    """Insert quantize/dequantize pairs in place.

    `ranges` come from `choose_quantized_ranges`; `grouped` are weights by op, to store unchanged.
    """
    plan, flow = resolved.plan, resolved.flow
    nodes = {
        fx.get_tensor_name(n): n
        for n in module.graph.nodes
        if n.op in ("placeholder", "call_function")
    }
    for tensor, root in flow.scale_owner.items():
        if tensor in nodes:  # others belong to another part of the model
            _insert_qdq(module, nodes[tensor], QuantParams.of(ranges[root]), flow)
    weights = IntegerWeights(module, grouped)
    for name, node in fx.map_op_nodes(module).items():
        # A plan may also name ops fused into a layer; only layers have weights.
        approach = plan[name].approach if name in plan else None
        if approach is not None and node.target in RECURRENT_INT8:
            for weight in tuple(iterate_layer_weights(module, node)):
                stored = weights.insert_dequantize(node, weight, plan[name].weight)
                node.replace_input_with(weight, stored)
        if approach is None or node.target not in WEIGHTED:
            continue
        weights.store_weight(node, plan[name].weight)
        if approach is Approach.DYNAMIC:
            _quantize_dynamically(node)


def _insert_qdq(
    module: GraphModule, node: Node, encoding: QuantParams, flow: QuantizationFlow
) -> None:
    name, graph = fx.get_tensor_name(node), module.graph
    scale, zero_point = encoding.scale, encoding.zero_point
    readers = [
        user
        for user in node.users
        if name in flow.int8_outputs
        or name in flow.int8_reads.get(user.meta.get(fx.OP_NAME, ""), frozenset())
    ]
    anchor = node
    if node.op == "placeholder":
        anchor = [n for n in graph.nodes if n.op == "placeholder"][-1]
    with graph.inserting_after(anchor):
        quantized = graph.call_function(ops.quantize, (node, scale, zero_point))
    quantized.meta["val"] = _make_uint8_placeholder(node.meta["val"])
    pairs: dict[torch.dtype, Node] = {}

    def dequantize_to(dtype: torch.dtype) -> Node:
        if dtype not in pairs:
            with graph.inserting_after(quantized):
                pair = graph.call_function(ops.dequantize, (quantized, scale, zero_point, dtype))
            pair.meta["val"] = node.meta["val"].to(dtype)
            pairs[dtype] = pair
        return pairs[dtype]

    for reader in readers:
        dtype = cast_dtype(reader)
        if dtype is not None and fx.OP_NAME not in reader.meta:  # directly to the 16-bit type
            reader.replace_all_uses_with(dequantize_to(dtype))
            graph.erase_node(reader)
        else:
            reader.replace_input_with(node, dequantize_to(torch.float32))


#: Placeholder of a tensor → its placeholder in uint8, for all conversions of a model.
_IN_UINT8: WeakTensorKeyDictionary[torch.Tensor, torch.Tensor] = WeakTensorKeyDictionary()


def _make_uint8_placeholder(value: torch.Tensor) -> torch.Tensor:
    """Return a placeholder of the same shape and strides; one with symbolic sizes takes 2 ms."""
    if value not in _IN_UINT8:
        # It holds no data; a cast would recompute its contiguity.
        tensor = value.new_empty_strided(value.shape, value.stride(), dtype=torch.uint8)
        _IN_UINT8[value] = tensor
    return _IN_UINT8[value]


#: Float format of a weight → its rounding, and the op that restores it.
_FLOAT_FORMATS: Mapping[QuantDType, tuple[Any, Any]] = {
    QuantDType.FP8_E4M3: (float_weights.quantize_fp8, float_weights.dequantize_fp8),
    QuantDType.MXFP4: (float_weights.quantize_mxfp4, float_weights.dequantize_mxfp4),
}


class IntegerWeights:
    """Quantized weights of one graph, each stored once even if shared by several layers."""

    def __init__(
        self, module: GraphModule, grouped: Mapping[str, GroupedWeight] | None = None
    ) -> None:
        self.module = module
        self.grouped = grouped or {}
        self.stored: dict[tuple[str, object], tuple[str, ...]] = {}

    def store_weight(self, layer: Node, spec: QuantSpec | None) -> None:
        """Replace a layer's weight, float or quantized, by integers."""
        fx.set_arguments(
            layer, weight=self.insert_dequantize(layer, fx.get_arguments(layer)["weight"], spec)
        )
        grouped = self.grouped.get(str(layer.meta.get(fx.OP_NAME)))
        if grouped is not None and grouped.input_factors is not None:
            self._scale_inputs(layer, grouped.input_factors)

    def _scale_inputs(self, layer: Node, factors: NDArray[np.float32]) -> None:
        source: Any = layer.args[0]
        value = source.meta["val"]
        # Exact, and promoted to a wider type of the inputs.
        stored = torch.from_numpy(factors).to(torch.bfloat16)
        stored = stored.to(value.dtype) if value.dtype is torch.float16 else stored
        node = fx.add_constant(self.module, f"{layer.name}_input_factors", stored, layer)
        with self.module.graph.inserting_before(layer):
            scaled = self.module.graph.call_function(torch.ops.aten.mul.Tensor, (source, node))
        scaled.meta["val"] = value
        layer.replace_input_with(source, scaled)

    def insert_dequantize(self, layer: Node, source: Node, spec: QuantSpec | None) -> Node:
        """Return a dequantize node of a weight, float or quantized, stored as integers."""
        module = self.module
        is_float = spec is not None and spec.dtype.is_float
        in_groups = spec is not None and spec.dtype.bits < 8 and not is_float
        grouped = self.grouped.get(str(layer.meta.get(fx.OP_NAME))) if in_groups else None
        weight = fx.get_constant(module, source)
        sources = [source] if weight is not None else source.args
        key = str(sources[0].target), spec if in_groups or is_float else weight_qmax(spec)
        if key not in self.stored:
            if weight is None:
                weight = source.target(*(fx.get_attribute(module, node.target) for node in sources))
            parts = _quantize_weight(weight, spec, grouped)
            self.stored[key] = tuple(
                str(fx.add_constant(module, f"{layer.name}_weight_{part}", value, layer).target)
                for part, value in parts.items()
            )
        stored = tuple(fx.read_constant(module, name, layer) for name in self.stored[key])
        values: tuple[Any, ...] = stored
        target = ops.dequantize_weight
        if in_groups and spec is not None:
            # 4 bits are the default, so that programs stay as earlier versions wrote them.
            values = stored if spec.dtype.bits == 4 else (*stored, spec.dtype.bits)
            target = ops.dequantize_grouped
        elif is_float and spec is not None:
            target = _FLOAT_FORMATS[spec.dtype][1]
        with module.graph.inserting_before(layer):
            dequantized: Node = module.graph.call_function(target, values)
        dequantized.meta["val"] = fx.make_placeholder(source.meta["val"].shape, torch.float32)
        return dequantized


def _quantize_weight(
    weight: torch.Tensor, spec: QuantSpec | None, grouped: GroupedWeight | None
) -> dict[str, torch.Tensor]:
    """Return the stored parts of a weight by name; of `grouped`, if given, instead of rounding."""
    if spec is not None and spec.dtype.is_float:
        codes, scales = _FLOAT_FORMATS[spec.dtype][0](weight.detach())
        return {str(spec.dtype): codes, "scales": scales}
    if spec is not None and spec.dtype.bits < 8:
        if grouped is None:
            rows = (weight[part].float().numpy() for part in iterate_row_parts(weight.shape))
            grouped = join_row_parts(map(Quantizer(spec).round_to_nearest, rows))
        parts = ops.pack_stored_parts(grouped)
        return dict(zip((f"int{spec.dtype.bits}", "scales", "offsets"), parts, strict=True))
    parts = ops.quantize_weight(weight, weight_qmax(spec))
    return dict(zip(("int8", "scales"), parts, strict=True))


def _quantize_dynamically(layer: Node) -> None:
    source, graph = layer.args[0], layer.graph
    value = source.meta["val"]
    with graph.inserting_before(layer):
        quantized = graph.call_function(ops.quantize_dynamic, (source,))
        quantized.meta["val"] = ops.quantize_dynamic(value)
        parts = [graph.call_function(operator.getitem, (quantized, index)) for index in range(3)]
        for part, meta in zip(parts, quantized.meta["val"], strict=True):
            part.meta["val"] = meta
        pair = graph.call_function(ops.dequantize_dynamic, (*parts, value.dtype))
    pair.meta["val"] = value
    layer.replace_input_with(source, pair)


def convert_graphs(
    model: TorchModel, plan: ResolvedPlan, ranges: Mapping[str, Range]
) -> TorchModel:
    """Return the model converted according to a plan; see `Adaptor.convert_graph`."""

    def write_into(module: GraphModule) -> None:
        nodes = fx.map_op_nodes(module).items()
        quantized = {op for op, config in plan.plan.items() if config.approach is not None}
        integer = {op for op, node in nodes if node.target in WEIGHTED and op in quantized}
        insert_casts(module, plan.flow, model.signature.dtype, integer)
        insert_quantization(module, plan, ranges, model.grouped)
        mark_kernels(module, {op: config.kernel for op, config in plan.plan.items()})

    converted = rewrite_graphs(model, write_into)
    shell = _without_converted_weights(converted)
    if shell is not None and model.int8_cache:
        use_int8_cache(shell)
    return replace(converted, grouped={}, shell=shell)


def _without_converted_weights(model: TorchModel) -> nn.Module | None:
    """Return the shell without weights of converted layers, which the model would keep alive."""
    if model.shell is None:
        return None
    layers: dict[str, nn.Module] = {}
    #: Weight → its placeholder: tied weights stay one.
    metas: dict[int, nn.Parameter] = {}
    for path in model.converted_parts:
        original = model.shell.get_submodule(path)
        # `copy.copy` refuses parametrized modules.
        layers[path] = layer = original.__new__(type(original))
        layer.__dict__.update(vars(original))
        layer._parameters = {
            name: None
            if value is None
            else metas.setdefault(id(value), nn.Parameter(value.to("meta"), requires_grad=False))
            for name, value in layer._parameters.items()
        }
    return assemble_module(model.shell, layers)


def full_range_kernels(model: TorchModel) -> frozenset[KernelKind]:
    """Return the kinds of integer kernels that have a weight beyond ±63."""
    parts = model.parts.values()
    return kinds_beyond_7_bits(
        weight for part in parts for weight in _iterate_integer_weights(part.portable)
    )


def with_reduced_weights(model: TorchModel) -> TorchModel:
    """Return the model with weights requantized to ±63 if their kernel may saturate."""
    return rewrite_graphs(model, _reduce_weights)


def _reduce_weights(module: GraphModule) -> None:
    weights = IntegerWeights(module)
    for layer in find_saturating_layers(_iterate_integer_weights(module)):
        weights.store_weight(layer, REDUCED_WEIGHT)


def _iterate_integer_weights(module: GraphModule) -> Iterator[IntegerWeight[Node]]:
    """Yield weights of layers with quantized inputs; skip weight-only layers."""
    for node in module.graph.nodes:
        if node.target not in INTEGER_LAYERS:
            continue
        source, weight = node.args[:2]
        multiplied = is_node(source, ops.dequantize, ops.dequantize_dynamic)
        if multiplied and is_node(weight, ops.dequantize_weight):
            integers = fx.get_attribute(module, str(weight.args[0].target))
            yield IntegerWeight(node, get_kernel_kind(node), integers.numpy())
