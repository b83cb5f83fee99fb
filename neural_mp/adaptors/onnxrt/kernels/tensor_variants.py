"""Dtype variants of tensors and quantized weights, as nodes and constants of an ONNX graph."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np
import onnx_ir as ir

from neural_mp.adaptors.common.named_graphs import (
    BF16,
    FP16,
    FP32,
    UINT8,
    TensorVariants,
)
from neural_mp.adaptors.common.quant_params import QuantParams, round_to_int8, weight_scales
from neural_mp.adaptors.common.signatures.signature import Array
from neural_mp.adaptors.onnxrt.graph.edit import GraphNames, get_constant_array
from neural_mp.adaptors.onnxrt.graph.subgraphs import find_runners
from neural_mp.adaptors.onnxrt.kernels.registry import CONTRIB
from neural_mp.core.int8_accumulation import weight_qmax
from neural_mp.core.observations import Range
from neural_mp.core.quant_spec import QuantSpec
from neural_mp.core.quantization_flow import QuantizationFlow

DTYPES = {
    FP32: ir.DataType.FLOAT,
    BF16: ir.DataType.BFLOAT16,
    FP16: ir.DataType.FLOAT16,
    UINT8: ir.DataType.UINT8,
}
#: Rounded to 16 bits and cast back to FP32, for kernels without 16-bit support.
_WIDENED = "widened"
#: uint8 after a DequantizeLinear that is fused into a kernel.
_DEQUANTIZED = "dequantized"
#: FP32 for an op that must stay apart from integer ops.
_SHIELDED = "shielded"
#: uint8 with the channels on the last axis.
_CHANNELS_LAST = "channels_last"


#: Size of a row of zeros.
_LEAST_ROW = 1e-30
#: First opset whose ReduceMax takes its axes as an input.
_AXES_ARE_AN_INPUT = 18


class Variants(TensorVariants[ir.Value]):
    """The variants of tensors, and the nodes inserted for them.

    Attributes:
        place: the node being converted, before which nodes are inserted; None for the end.
        owner: the op being converted.
        owners: new node → the op that it was inserted for.
        names: the names in the graph.
        int8_outputs: the ops whose result the plan stores in INT8.
        has_int8: whether any tensor is quantized.
    """

    def __init__(
        self,
        graph: ir.Graph,
        tensors: Mapping[ir.Value, str],
        flow: QuantizationFlow,
        ranges: Mapping[str, Range],
    ) -> None:
        super().__init__(flow, ranges)
        self.place: ir.Node | None = None
        self.owner = ""
        self.owners: dict[str, str] = {}
        self._graph, self._tensors = graph, tensors
        self.int8_outputs = flow.int8_outputs
        self.has_int8 = bool(flow.int8_outputs or flow.int8_reads)
        self._end = graph
        self.names = GraphNames(graph)
        self._runners = find_runners(graph)
        self._dynamic: dict[ir.Value, tuple[ir.Value, ...]] = {}
        self._rows: dict[ir.Value, tuple[ir.Value, ...]] = {}
        self._constants: dict[tuple[object, ...], ir.Value] = {}
        self._parameters: dict[QuantParams, tuple[ir.Value, ir.Value]] = {}
        self._moved_from: dict[ir.Value, ir.Value] = {}

    def name_of(self, tensor: ir.Value) -> str:
        """Return the tensor, or the original of a moved tensor."""
        return self._tensors[self._moved_from.get(tensor, tensor)]

    def get_constant_value(self, tensor: ir.Value) -> Array | None:
        """Return the value of an initializer."""
        return get_constant_array(tensor)

    def insert_16_bit_constant(self, tensor: ir.Value, variant: str, values: Array) -> ir.Value:
        """Add an initializer."""
        return self.names.add_constant(f"{tensor.name}/{variant}", values, DTYPES[variant])

    def insert_cast(self, tensor: ir.Value, source: str, variant: str) -> ir.Value:
        """Insert a Cast, or reuse one back to FP32."""
        if variant == FP32:
            return self.round_to_16_bits(tensor, source)
        self.count_conversion("casts")
        real = self.as_float(tensor, source)
        with self._insert_beside(tensor):
            return self._insert_cast_node(real, f"{tensor.name}/{variant}", variant)

    def insert_quantize(self, tensor: ir.Value, real: ir.Value) -> ir.Value:
        """Insert a QuantizeLinear that runs as such."""
        self.count_conversion("quantize")
        with self._insert_beside(tensor):
            return self.quantize_value(tensor, real)

    def insert_dequantize(self, tensor: ir.Value, variant: str) -> ir.Value:
        """Insert the DequantizeLinear that kernels fuse, too."""
        with self._insert_beside(tensor):
            return self.as_kernel_input(tensor)

    def as_float(self, tensor: ir.Value, variant: str = FP32) -> ir.Value:
        """Return a tensor in FP32, BF16 or FP16."""
        value = super().as_float(tensor, variant)
        if value is self.find_variants(tensor).get(_DEQUANTIZED):
            # ONNX Runtime dequantizes once per consumer.
            self.count_conversion("dequantize")
        return value

    def round_to_16_bits(self, tensor: ir.Value, variant: str) -> ir.Value:
        """Return a tensor rounded to 16 bits and cast back to FP32."""
        variants = self.find_variants(tensor)
        if (key := f"{variant} {_WIDENED}") not in variants:
            narrow = self.as_float(tensor, variant)
            if self.get_constant_value(tensor) is None:
                # ONNX Runtime folds the cast of a constant on load.
                self.count_conversion("casts")
            with self._insert_beside(tensor):
                variants[key] = self._insert_cast_node(
                    narrow, f"{tensor.name}/{variant}/{FP32}", FP32
                )
        return variants[key]

    def as_kernel_input(self, tensor: ir.Value) -> ir.Value:
        """Return a uint8 tensor after a DequantizeLinear that an integer kernel fuses.

        Fusion requires both in one graph.
        """
        stored, variants = self.as_uint8(tensor), self.find_variants(tensor)
        is_inner = self._written_graph is not self._find_graph_of(tensor)
        key = f"{_DEQUANTIZED} in {id(self._written_graph)}" if is_inner else _DEQUANTIZED
        if key not in variants:
            inputs = [stored, *self.quant_parameters(tensor)]
            name = f"{tensor.name}/{_DEQUANTIZED}"
            variants[key] = self.add_node("DequantizeLinear", inputs, name, DTYPES[FP32])
        return variants[key]

    def move_channels_last(self, tensor: ir.Value, rank: int) -> ir.Value:
        """Return a uint8 tensor with its channels moved from the second to the last axis.

        Float values are moved before they are quantized: ONNX Runtime merges that with the change
        of layout after a float convolution.
        """
        variants = self.find_variants(tensor)
        if _CHANNELS_LAST not in variants:
            order, name = [0, *range(2, rank), 1], f"{tensor.name}/{_CHANNELS_LAST}"
            with self._insert_beside(tensor):
                if UINT8 in variants:
                    moved = self._insert_transpose(variants[UINT8], name, DTYPES[UINT8], order)
                else:
                    self.count_conversion("quantize")
                    moved = self._insert_transpose(
                        self.as_float(tensor), f"{name}/{FP32}", DTYPES[FP32], order
                    )
                    inputs = [moved, *self.quant_parameters(tensor)]
                    moved = self.add_node(
                        "QuantizeLinear", inputs, f"{name}/{UINT8}", DTYPES[UINT8]
                    )
            variants[_CHANNELS_LAST] = moved
        return variants[_CHANNELS_LAST]

    @property
    def _written_graph(self) -> ir.Graph:
        """The graph being converted."""
        graph = None if self.place is None else self.place.graph
        return graph if isinstance(graph, ir.Graph) else self._end

    def _find_graph_of(self, tensor: ir.Value) -> ir.Graph:
        graph = tensor.graph
        return graph if isinstance(graph, ir.Graph) else self._graph

    @contextmanager
    def _insert_beside(self, tensor: ir.Value) -> Iterator[None]:
        """Insert into the tensor's graph; for bodies, that of their outer inputs.

        A single conversion then serves all bodies that read the tensor and all steps of a loop.
        """
        previous, graph = (self.place, self._end), self._find_graph_of(tensor)
        # The node of that graph that contains, or is, the place; None for the end.
        while self.place is not None and self.place.graph is not graph:
            body = self.place.graph
            self.place = self._runners.get(body) if isinstance(body, ir.Graph) else None
        self._end = graph
        try:
            yield
        finally:
            self.place, self._end = previous

    def dequantize_by_channel(self, tensor: ir.Value, axis: int, channels: int) -> ir.Value:
        """Return a uint8 tensor in FP32, with equal scales for all channels."""
        encoding, stem = self.get_quant_params(tensor), f"{tensor.name}/by_channel"
        inputs = [
            self.as_uint8(tensor),
            self.names.add_constant(f"{stem}/scale", np.full(channels, encoding.scale, np.float32)),
            self.names.add_constant(
                f"{stem}/zero_point", np.full(channels, encoding.zero_point, np.uint8)
            ),
        ]
        self.count_conversion("dequantize")
        return self.add_node("DequantizeLinear", inputs, stem, DTYPES[FP32], {"axis": axis})

    def shield_float(self, tensor: ir.Value) -> ir.Value:
        """Return a tensor in FP32 for an op that must stay apart from integer ops.

        ONNX Runtime fuses no op with an Einsum, nor moves transpositions past an Einsum.
        """
        if not self.has_int8:
            return self.as_float(tensor)
        variants = self.find_variants(tensor)
        if _SHIELDED not in variants:
            real = self.as_float(tensor)
            with self._insert_beside(tensor):
                equation = {"equation": "...->..."}
                name = f"{tensor.name}/{_SHIELDED}"
                variants[_SHIELDED] = self.add_node("Einsum", [real], name, DTYPES[FP32], equation)
        return variants[_SHIELDED]

    def quantize_value(
        self, tensor: ir.Value, real: ir.Value, after: ir.Node | None = None
    ) -> ir.Value:
        """Quantize a float value with the scale of a tensor."""
        inputs = [real, *self.quant_parameters(tensor)]
        return self.add_node(
            "QuantizeLinear", inputs, f"{tensor.name}/{UINT8}", DTYPES[UINT8], after=after
        )

    def quantize_dynamically(self, tensor: ir.Value) -> tuple[ir.Value, ...]:
        """Return a dynamically quantized tensor: uint8, scale, zero point."""
        if tensor not in self._dynamic:
            names = [f"{tensor.name}/dynamic_{part}" for part in ("stored", "scale", "zero_point")]
            outputs = [ir.val(self.names.reserve_name(name)) for name in names]
            node = ir.node("DynamicQuantizeLinear", [self.as_float(tensor)], outputs=outputs)
            with self._insert_beside(tensor):
                self.insert_node(node, f"{tensor.name}/quantize")
            self.count_conversion("quantize")
            self._dynamic[tensor] = tuple(outputs)
        return self._dynamic[tensor]

    def quantize_rows(self, tensor: ir.Value) -> tuple[ir.Value, ...]:
        """Return a tensor quantized by rows: uint8, scale, zero point, and the size of each row.

        DynamicQuantizeLinear has one range for all rows, hence each is divided by its size first.
        """
        if tensor not in self._rows:
            real, stem, dtype = self.as_float(tensor), f"{tensor.name}/row", DTYPES[FP32]
            with self._insert_beside(tensor):
                sizes = self.add_node("Abs", [real], f"{stem}_magnitudes", dtype)
                if self._graph.opset_imports.get("", 0) < _AXES_ARE_AN_INPUT:
                    largest = self.add_node(
                        "ReduceMax", [sizes], f"{stem}_largest", dtype, {"axes": [-1]}
                    )
                else:
                    axes = self.add_shared_constant(f"{stem}_axes", np.array([-1], np.int64))
                    largest = self.add_node("ReduceMax", [sizes, axes], f"{stem}_largest", dtype)
                least = self.add_shared_constant(f"{stem}_least", np.array(_LEAST_ROW, np.float32))
                limits = self.add_node("Max", [largest, least], f"{stem}_sizes", dtype)
                scaled = self.add_node("Div", [real, limits], f"{stem}s", dtype)
                names = (f"{stem}s_{part}" for part in ("stored", "scale", "zero_point"))
                outputs = [ir.val(self.names.reserve_name(name)) for name in names]
                node = ir.node("DynamicQuantizeLinear", [scaled], outputs=outputs)
                self.insert_node(node, f"{tensor.name}/quantize")
            self.count_conversion("quantize")
            self._rows[tensor] = (*outputs, limits)
        return self._rows[tensor]

    def quant_parameters(self, tensor: ir.Value) -> tuple[ir.Value, ir.Value]:
        """Return scale and zero point of a tensor, as constants."""
        encoding = self.get_quant_params(tensor)
        if encoding not in self._parameters:
            scale = self.names.add_constant(f"{tensor.name}/scale", np.float32(encoding.scale))
            zero = self.names.add_constant(
                f"{tensor.name}/zero_point", np.uint8(encoding.zero_point)
            )
            self._parameters[encoding] = scale, zero
        return self._parameters[encoding]

    def put_moved(self, result: ir.Value, moved: ir.Value) -> None:
        """Set the result of a quantize-agnostic op on uint8."""
        self.set_variant(result, UINT8, result)
        self._moved_from[result] = self._moved_from.get(moved, moved)

    def add_shared_constant(self, name: str, values: Array) -> ir.Value:
        """Return a constant; one of equal values is reused, as several ops may read one weight."""
        array = np.ascontiguousarray(values)
        key = array.dtype, array.shape, hashlib.sha256(array.data).digest()
        if key not in self._constants:
            self._constants[key] = self.names.add_constant(name, array)
        return self._constants[key]

    def weight_constants(self, stem: str, stored: StoredWeight) -> list[ir.Value]:
        """Return integers, scales and zero points of a quantized weight or bias."""
        return [
            self.add_shared_constant(f"{stem}/{stored.integers.dtype}", stored.integers),
            self.add_shared_constant(f"{stem}/scale", stored.scales),
            self.add_shared_constant(f"{stem}/zero_point", stored.zero_points),
        ]

    def insert_weight(self, stem: str, stored: StoredWeight) -> ir.Value:
        """Return a quantized weight or bias after a DequantizeLinear that kernels fuse."""
        inputs, name = self.weight_constants(stem, stored), f"{stem}/{_DEQUANTIZED}"
        return self.add_node("DequantizeLinear", inputs, name, DTYPES[FP32], {"axis": stored.axis})

    def replace_node(
        self,
        node: ir.Node,
        op: str,
        inputs: list[ir.Value | None],
        result: ir.Value,
        attributes: Mapping[str, int] | None = None,
        order: Sequence[int] = (),
        operands: Sequence[tuple[str, ir.Value]] = (),
    ) -> None:
        """Replace a node by an ONNX Runtime op whose result, its axes in `order`, is `result`.

        `operands` are ops that follow, with their second inputs.
        """
        written = ir.val(self._take_name(result), DTYPES[FP32])
        is_last = not order and not operands
        computed = (
            written if is_last else ir.val(self.names.reserve_name(f"{written.name}/computed"))
        )
        name = str(node.name)
        node.name = self.names.reserve_name(f"{name}/{FP32}")
        self.names.give_up(name)
        self.insert_node(ir.node(op, inputs, attributes, domain=CONTRIB, outputs=[computed]), name)
        if order:
            transpose = ir.node("Transpose", [computed], {"perm": list(order)}, outputs=[written])
            self.insert_node(transpose, f"{name}/Transpose")
        for index, (kind, operand) in enumerate(operands, 1):
            following = (
                written
                if index == len(operands)
                else ir.val(self.names.reserve_name(f"{written.name}/{kind}"), DTYPES[FP32])
            )
            after = ir.node(kind, [computed, operand], outputs=[following])
            self.insert_node(after, f"{name}/{kind}")
            computed = following
        self.set_variant(result, FP32, written)

    def _take_name(self, value: ir.Value) -> str:
        """Return the name for a replaced value; graph outputs keep theirs for now."""
        name = str(value.name)
        if value.is_graph_output():
            return self.names.reserve_name(f"{name}/{FP32}")
        value.name = self.names.reserve_name(f"{name}/before")
        return name

    def put_rounded(self, result: ir.Value, variant: str) -> None:
        """Set a tensor to the result of an FP32 op, rounded to 16 bits."""
        self.count_conversion("casts")
        rounded = self._insert_cast_node(
            result, f"{result.name}/{variant}", variant, after=result.producer()
        )
        self.set_variant(result, variant, rounded)

    def insert_node(self, node: ir.Node, name: str, after: ir.Node | None = None) -> None:
        """Insert a new node at its place, or directly after another."""
        node.name = self.names.reserve_name(name)
        if node.name != self.owner:
            self.owners[node.name] = self.owner
        if after is not None:
            self._find_graph_of(after.outputs[0]).insert_after(after, node)
        elif self.place is None:
            self._end.append(node)
        else:
            self._written_graph.insert_before(self.place, node)

    def add_node(
        self,
        op: str,
        inputs: list[ir.Value],
        name: str,
        dtype: ir.DataType,
        attributes: Mapping[str, int | str | list[int]] | None = None,
        after: ir.Node | None = None,
        domain: str = "",
    ) -> ir.Value:
        """Insert a new node with one result (see `insert_node`) and return the result."""
        result = ir.val(self.names.reserve_name(name), dtype)
        node = ir.node(op, inputs, attributes, domain=domain, outputs=[result])
        self.insert_node(node, f"{name}/{op}", after)
        return result

    def _insert_transpose(
        self, value: ir.Value, name: str, dtype: ir.DataType, order: list[int]
    ) -> ir.Value:
        return self.add_node("Transpose", [value], name, dtype, {"perm": order})

    def _insert_cast_node(
        self, value: ir.Value, name: str, variant: str, after: ir.Node | None = None
    ) -> ir.Value:
        dtype = DTYPES[variant]
        return self.add_node("Cast", [value], name, dtype, {"to": int(dtype)}, after)


#: The zero point of unsigned weights.
_MIDDLE = 128
INT32 = np.iinfo(np.int32)


@dataclass(frozen=True)
class StoredWeight:
    """A quantized weight.

    Attributes:
        integers: the quantized values.
        scales: of every channel, float32.
        zero_points: of every channel, in the dtype of the integers.
        axis: the axis of the channels.
    """

    integers: Array
    scales: Array
    zero_points: Array
    axis: int


def store_weight(
    weight: Array, axis: int, spec: QuantSpec, bias: Array | None = None, input_scale: float = 1.0
) -> StoredWeight:
    """Quantize a weight to 8 bits, symmetric per channel of the output axis `axis`.

    The bias is quantized to int32 with weight scale times input scale; if the weight of a channel
    is too small for the bias to fit, the scale is increased.
    """
    limit = weight_qmax(spec)
    reduced = tuple(i for i in range(weight.ndim) if i != axis)
    scales = weight_scales(weight, reduced, limit)
    if bias is not None:
        least = np.abs(bias).astype(np.float64) / (0.5 * INT32.max * input_scale)
        scales = np.maximum(scales, least.astype(np.float32).reshape(scales.shape))
    integers: Array = round_to_int8(weight, scales, limit)
    zeros: Array = np.zeros(scales.size, np.int8)
    if spec.dtype == "uint8":
        integers, zeros = to_unsigned(integers), to_unsigned(zeros)
    return StoredWeight(integers, scales.reshape(-1), zeros, axis)


def to_unsigned(integers: Array) -> Array:
    """Return int8 values as uint8, with a zero point of 128."""
    return (integers.astype(np.int16) + _MIDDLE).astype(np.uint8)
