"""Casts of graph ops to 16 bits: weights stored in 16 bits, casts only between precisions."""

from __future__ import annotations

import operator
from collections.abc import Collection
from typing import Any

import torch
from torch.fx import GraphModule, Node

from neural_mp.adaptors.pytorch.graph import graph_edit as fx
from neural_mp.core.precision import Precision
from neural_mp.core.quantization_flow import QuantizationFlow

aten = torch.ops.aten
#: 16-bit precision → torch dtype.
DTYPES = {Precision.BF16: torch.bfloat16, Precision.FP16: torch.float16}
#: 16-bit dtype → precision; other floating-point dtypes count as FP32.
PRECISIONS = {dtype: precision for precision, dtype in DTYPES.items()}
CAST = aten._to_copy.default
#: Ops whose kernels take all but the first input in float32: statistics may overflow FP16.
STATISTICS = frozenset({aten._native_batch_norm_legit_no_training.default})


def cast_saturating(values: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Cast to a 16-bit dtype, saturating finite values at the largest of the dtype.

    Masks often use the lowest float32 for minus infinity, which must stay finite.
    """
    if dtype not in DTYPES.values() or not values.is_floating_point():
        return values.to(dtype)
    largest = torch.finfo(dtype).max
    low = values.to(dtype)
    lost = torch.isinf(low)
    if not lost.any():
        return low
    return torch.where(torch.isfinite(values) & lost, values.sign().to(dtype) * largest, low)


def cast_dtype(node: Node | None) -> torch.dtype | None:
    """Return the target dtype of a plain cast, else None."""
    if node is None or node.target is not CAST or set(node.kwargs) != {"dtype"}:
        return None
    return node.kwargs["dtype"]


class _Caster:
    """Rewriter of one graph; tracks the dtype of each tensor and the casts inserted so far."""

    def __init__(self, module: GraphModule, widen: bool, integer: Collection[str]) -> None:
        self.module = module
        self.widen = widen
        self.integer = integer
        self.dtype: dict[Node, torch.dtype] = {}
        self.casts: dict[tuple[Node, torch.dtype], Node] = {}

    def insert_casts(self, flow: QuantizationFlow) -> None:
        for node in list(self.module.graph.nodes):
            if node.op == "output":
                for source in node.all_input_nodes:
                    self.cast_read(node, source, _get_traced_dtype(source))
            elif node.op == "call_function" and fx.OP_NAME in node.meta:
                op = node.meta[fx.OP_NAME]
                if node.target is operator.getitem:
                    # One of several results has the dtype of the op that produces all of them.
                    source = node.all_input_nodes[0]
                    if source in self.dtype and _get_traced_dtype(node) is not None:
                        self.dtype[node] = self.dtype[source]
                    continue
                requested = DTYPES.get(flow.effective[op])
                quantized = flow.int8_reads.get(op, frozenset())
                sources = node.all_input_nodes
                if requested is not None and node.target in STATISTICS:
                    sources = sources[:1]  # the kernel takes the others in float32
                stored = fx.get_arguments(node)["weight"] if op in self.integer else None
                for source in sources:
                    if source is stored:
                        continue  # rounded as it is: a cast of all values takes their memory again
                    if fx.get_tensor_name(source) in quantized:
                        continue  # quantize accepts any float dtype
                    self.cast_read(node, source, requested or self.wide_dtype(op, flow, source))
                written = requested or self.wide_dtype(op, flow, node)
                if written is not None and "dtype" not in node.kwargs:
                    self.dtype[node] = written
        for node, dtype in self.dtype.items():
            if isinstance(node.meta.get("val"), torch.Tensor):
                node.meta["val"] = node.meta["val"].to(dtype)

    def wide_dtype(self, op: str, flow: QuantizationFlow, node: Node) -> torch.dtype | None:
        """Return the dtype in which an FP32 or INT8 op reads or writes a tensor."""
        dtype = _get_traced_dtype(node)
        wide = self.widen or flow.effective[op].is_integer
        return torch.float32 if wide and dtype in DTYPES.values() else dtype

    def cast_read(self, node: Node, source: Node, requested: torch.dtype | None) -> None:
        traced = _get_traced_dtype(source)
        if traced is None or requested is None or self.dtype.get(source, traced) == requested:
            return
        if (source, requested) not in self.casts:
            self.casts[source, requested] = self.cast_source(source, requested, node)
        node.replace_input_with(source, self.casts[source, requested])

    def cast_source(self, source: Node, requested: torch.dtype, next_node: Node) -> Node:
        weight = fx.get_constant(self.module, source)
        if weight is not None:
            stored = cast_saturating(weight, requested)
            return fx.add_constant(self.module, f"{source.name}_cast", stored, next_node)
        with self.module.graph.inserting_before(next_node):
            cast: Node = self.module.graph.call_function(CAST, (source,), {"dtype": requested})
        cast.meta["val"] = source.meta["val"].to(requested)
        return cast


def _get_traced_dtype(node: Node) -> torch.dtype | None:
    """Return the floating dtype of a node's tensor at capture; None for other values."""
    value: Any = node.meta.get("val")
    if isinstance(value, tuple | list) and value:
        value = value[0]
    return value.dtype if fx.is_float(value) else None


def insert_casts(
    module: GraphModule, flow: QuantizationFlow, dtype: torch.dtype, integer: Collection[str] = ()
) -> None:
    """Rewrite the graph in place so that every op runs in its precision.

    Weights of the ops `integer`, which are stored as integers next, keep their dtype.

    At most one cast per tensor and dtype; inputs and outputs keep their dtypes. If `dtype`, that of
    the model's weights, is 16-bit, FP32 ops and the float inputs and outputs of INT8 ops are
    converted to float32.
    """
    with torch.no_grad():
        _Caster(module, dtype in DTYPES.values(), integer).insert_casts(flow)
