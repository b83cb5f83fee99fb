"""Ops of a file with the QuantizeLinear and DequantizeLinear around them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import onnx_ir as ir

from neural_mp.adaptors.common.signatures.signature import Array
from neural_mp.adaptors.onnxrt.graph.edit import (
    get_constant_array,
    get_node_input,
    list_used_outputs,
)
from neural_mp.adaptors.onnxrt.kernels.ops import get_weight_axes, is_dequantize, is_quantize
from neural_mp.adaptors.onnxrt.targets.quantization import is_parameter
from neural_mp.targets import TargetProfile

#: Positions of the weight and the bias of ops with a weight.
_WEIGHT, _BIAS = 1, 2
_FLOATS = (ir.DataType.FLOAT, ir.DataType.FLOAT16, ir.DataType.BFLOAT16, ir.DataType.DOUBLE)


@dataclass(frozen=True)
class Pair:
    """One half of a pair: a QuantizeLinear or DequantizeLinear with its parameters.

    Attributes:
        node: the op.
        dtype: type of the integers; None if unknown.
        scale: the scales; None if they are computed.
        zero_point: the zero points, zeros if omitted; None if they are computed.
    """

    node: ir.Node
    dtype: ir.DataType | None
    scale: Array | None
    zero_point: Array | None

    @classmethod
    def from_node(cls, node: ir.Node) -> Pair:
        """Return the parameters of a QuantizeLinear or DequantizeLinear."""
        zero = get_node_input(node, 2)
        dtype = zero.dtype if zero is not None else None
        if dtype is None and is_dequantize(node) and node.inputs[0] is not None:
            dtype = node.inputs[0].dtype
        elif dtype is None and is_quantize(node):
            dtype = ir.DataType(node.attributes.get_int("output_dtype", 0) or ir.DataType.UINT8)
        zeros = np.zeros((), np.int64) if zero is None else get_constant_array(zero)
        zeros = None if zeros is None else zeros.astype(np.int64)
        return cls(node, dtype, get_constant_array(get_node_input(node, 1)), zeros)

    @property
    def is_per_tensor(self) -> bool:
        """Whether the op has one scale."""
        return self.scale is not None and self.scale.size == 1

    @property
    def first_scale(self) -> float:
        """The scale of an op with one; the first of several."""
        return float("nan") if self.scale is None else float(self.scale.reshape(-1)[0])

    @property
    def is_blocked(self) -> bool:
        """Whether scales belong to blocks of an axis."""
        return bool(self.node.attributes.get_int("block_size", 0))

    def equals_pair(self, pair: Pair) -> bool:
        """Whether another op has the same type, scales and zero points."""
        if self.scale is None or pair.scale is None or self.dtype is not pair.dtype:
            return False
        if self.zero_point is None or pair.zero_point is None:
            return False
        return bool(
            np.array_equal(self.scale.reshape(-1), pair.scale.reshape(-1))
            and (self.zero_point.reshape(-1)[:1] == pair.zero_point.reshape(-1)[:1]).all()
        )

    @property
    def as_text(self) -> str:
        """Type, scale and zero point as text."""
        zero = "computed" if self.zero_point is None else self.zero_point.reshape(-1)[0]
        return f"{format_type_name(self.dtype)}, scale {self.first_scale:.6g}, zero point {zero}"


@dataclass(frozen=True)
class Operand:
    """A float input of an op.

    Attributes:
        position: position among the inputs.
        value: the input.
        pair: the DequantizeLinear that the input comes from; None for a float.
        constant: the constant that the input is, or that its DequantizeLinear reads; None if
            computed.
        is_rounded: whether a QuantizeLinear rounds a float constant.
    """

    position: int
    value: ir.Value
    pair: Pair | None
    constant: ir.Value | None
    is_rounded: bool

    @classmethod
    def from_node(cls, node: ir.Node, position: int) -> Operand | None:
        """Return the operand at a position; None for an omitted input, or one without floats."""
        value = get_node_input(node, position)
        if value is None or is_parameter(node, position):
            return None
        producer = value.producer()
        if producer is None or not is_dequantize(producer):
            constant = value if value.const_value is not None else None
            is_float = value.dtype in _FLOATS
            return cls(position, value, None, constant, False) if is_float else None
        source = producer.inputs[0]
        rounding = None if source is None else source.producer()
        is_rounded = False
        if rounding is not None and is_quantize(rounding):
            first = rounding.inputs[0]
            is_rounded = first is not None and first.const_value is not None
            source = first if is_rounded else source
        constant = source if source is not None and source.const_value is not None else None
        return cls(position, value, Pair.from_node(producer), constant, is_rounded)


@dataclass(frozen=True)
class Result:
    """A float result of an op, with the QuantizeLinear ops that read it.

    Attributes:
        value: the result.
        pairs: the QuantizeLinear ops.
        is_closed: whether nothing else reads the result.
    """

    value: ir.Value
    pairs: tuple[Pair, ...]
    is_closed: bool


@dataclass(frozen=True)
class QdqOp:
    """An op with its operands and results.

    Attributes:
        node: the op.
        has_weight: whether the target multiplies by a weight in ops of this type.
    """

    node: ir.Node
    has_weight: bool

    @property
    def name(self) -> str:
        """Name of the op, or of its first result."""
        return str(self.node.name or self.node.outputs[0].name)

    @cached_property
    def operands(self) -> tuple[Operand, ...]:
        """The float inputs."""
        read = (Operand.from_node(self.node, position) for position in range(len(self.node.inputs)))
        return tuple(operand for operand in read if operand is not None)

    @cached_property
    def weight(self) -> Operand | None:
        """The constant weight."""
        return self._find_constant_at(_WEIGHT)

    @cached_property
    def bias(self) -> Operand | None:
        """The constant bias."""
        return self._find_constant_at(_BIAS)

    def _find_constant_at(self, position: int) -> Operand | None:
        if not self.has_weight:
            return None
        candidates = (o for o in self.operands if o.position == position and o.constant is not None)
        return next(candidates, None)

    @property
    def activations(self) -> tuple[Operand, ...]:
        """The operands besides weight and bias."""
        return tuple(o for o in self.operands if o is not self.weight and o is not self.bias)

    @cached_property
    def results(self) -> tuple[Result, ...]:
        """The float results that are read."""
        results = []
        for value in list_used_outputs(self.node):
            if value.dtype in _FLOATS:
                readers = [use.node for use in value.uses()]
                pairs = tuple(Pair.from_node(node) for node in readers if is_quantize(node))
                only_pairs = len(pairs) == len(readers) and not value.is_graph_output()
                results.append(Result(value, pairs, only_pairs))
        return tuple(results)

    @property
    def surrounding_pairs(self) -> tuple[Pair, ...]:
        """The ops around: each DequantizeLinear of activations, each QuantizeLinear of results."""
        read = [operand.pair for operand in self.activations if operand.pair is not None]
        return (*read, *(pair for result in self.results for pair in result.pairs))

    @property
    def channel_axis(self) -> int:
        """The axis of the output channels in the weight."""
        array = None if self.weight is None else get_constant_array(self.weight.constant)
        if self.node.op_type == "MatMul" and array is not None:
            return array.ndim - 1
        return get_weight_axes(self.node)[0]


def iterate_float_ops(program: ir.Model, profile: TargetProfile) -> Iterator[QdqOp]:
    """Yield the ops of a graph, without QuantizeLinear, DequantizeLinear and nested graphs."""
    for node in program.graph:
        if not is_quantize(node) and not is_dequantize(node) and node.op_type != "Constant":
            yield QdqOp(node, node.op_type in profile.ops and not node.domain)


def format_type_name(dtype: ir.DataType | None) -> str:
    """Return the name of a type as in profiles."""
    return "an unknown type" if dtype is None else dtype.name.lower()
