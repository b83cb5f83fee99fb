"""Models whose weights use more of int8 than saturating products leave right, ours or not."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

import numpy as np
import onnx_ir as ir

from neural_mp.adaptors.common.signature import Array
from neural_mp.adaptors.onnxrt.integer_encoding import unsigned
from neural_mp.adaptors.onnxrt.model import OnnxModel
from neural_mp.adaptors.onnxrt.naming import constant
from neural_mp.adaptors.onnxrt.sessions import array_of
from neural_mp.core.byte_products import (
    EXACT_EVERYWHERE,
    REDUCED_RANGE,
    WEIGHT_LIMITS,
    KernelKind,
)

_LIMIT = WEIGHT_LIMITS[REDUCED_RANGE]
#: Op that multiplies bytes → the places of its weight and of that one's zero point.
_KERNELS: Mapping[str, tuple[int, int]] = {
    "QLinearConv": (3, 5),
    "ConvInteger": (1, 3),
    "QLinearMatMul": (3, 5),
    "MatMulInteger": (1, 3),
    "MatMulIntegerToFloat": (1, 5),
    "DynamicQuantizeMatMul": (1, 3),
    "QGemm": (3, 5),
}
#: Ops that ONNX Runtime makes integer kernels of, together with what dequantizes their inputs.
_FUSED = ("Conv", "MatMul", "Gemm")


@dataclass(frozen=True)
class _Weight:
    """A signed weight: the node that reads it, in which places, and what is multiplied."""

    reader: ir.Node
    place: int
    zero_place: int
    kernel: KernelKind


def wide_kernels(model: OnnxModel) -> frozenset[KernelKind]:
    """The kinds of the integer kernels that have a signed weight beyond ±63."""
    return frozenset(found.kernel for found in _wide_weights(model.runs.graph))


def with_unsigned_weights(model: OnnxModel) -> OnnxModel:
    """The model with weights stored unsigned where a kernel may saturate: the same numbers."""
    program = model.runs.clone()
    for found in list(_wide_weights(program.graph)):
        if found.kernel in EXACT_EVERYWHERE:
            continue
        reader = found.reader
        weight = reader.inputs[found.place]
        integers = array_of(weight)
        assert weight is not None
        assert integers is not None
        zeros = _zero_points(reader, found, integers)
        for place, value in ((found.place, integers), (found.zero_place, zeros)):
            name = f"{weight.name}/uint8" if place == found.place else f"{weight.name}/middle"
            reader.resize_inputs(max(len(reader.inputs), place + 1))
            reader.replace_input_with(place, constant(program.graph, name, unsigned(value)))
    _drop_unread(program.graph)
    given = None if model.given is None else program
    return replace(model, program=program, given=given, _runners={})


def _zero_points(reader: ir.Node, found: _Weight, integers: Array) -> Array:
    """Those that are there, else zeros: one, or one a channel where there are several scales."""
    known = reader.inputs[found.zero_place] if len(reader.inputs) > found.zero_place else None
    array = array_of(known)
    if array is not None:
        return array
    scales = array_of(reader.inputs[1]) if reader.op_type == "DequantizeLinear" else None
    return np.zeros(scales.shape if scales is not None else (), integers.dtype)


def _wide_weights(graph: ir.Graph) -> Iterator[_Weight]:
    for node in graph:
        if node.op_type in _KERNELS:
            place, zero_place = _KERNELS[node.op_type]
            if _is_wide(node, place):
                yield _Weight(node, place, zero_place, kernel_of(node, node.inputs[place]))
        elif node.op_type == "DequantizeLinear" and _is_wide(node, 0):
            for user, position in node.outputs[0].uses():
                if user.op_type in _FUSED and position == 1 and _reads_bytes(user):
                    yield _Weight(node, 0, 2, kernel_of(user, node.inputs[0]))
                    break


def _is_wide(node: ir.Node, place: int) -> bool:
    array = array_of(node.inputs[place]) if place < len(node.inputs) else None
    if array is None or array.dtype != np.int8:
        return False
    return bool((np.abs(array.astype(np.int16)) > _LIMIT).any())


def _reads_bytes(node: ir.Node) -> bool:
    source = node.inputs[0].producer() if node.inputs[0] is not None else None
    return source is not None and source.op_type == "DequantizeLinear"


def kernel_of(node: ir.Node, weight: ir.Value | None) -> KernelKind:
    """The kind of integer kernel that multiplies by a weight.

    Depthwise is one input and one output channel a group, of images: others run in another kernel.
    """
    if "Conv" not in node.op_type:
        return KernelKind.DENSE
    array, groups = array_of(weight), node.attributes.get("group")
    count = groups.as_int() if groups is not None else 1
    single = array is not None and array.ndim == 4 and array.shape[:2] == (count, 1)
    return KernelKind.DEPTHWISE if single and count > 1 else KernelKind.CONVOLUTION


def _drop_unread(graph: ir.Graph) -> None:
    for name, value in list(graph.initializers.items()):
        if not value.uses() and not value.is_graph_output():
            del graph.initializers[name]
