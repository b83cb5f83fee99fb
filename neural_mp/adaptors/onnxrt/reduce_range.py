"""Detection and conversion of weights that exceed the reduced range, in any model."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np
import onnx_ir as ir
from onnx_ir.passes import common

from neural_mp.adaptors.common.quant_params import IntegerWeight, saturating, wide_kinds
from neural_mp.adaptors.common.signatures.signature import Array
from neural_mp.adaptors.onnxrt.graph import edit
from neural_mp.adaptors.onnxrt.graph.subgraphs import in_order
from neural_mp.adaptors.onnxrt.kernels.ops import KERNEL_WEIGHTS, Role, dequantizes, has_role
from neural_mp.adaptors.onnxrt.kernels.tensor_variants import unsigned
from neural_mp.adaptors.onnxrt.model import OnnxModel
from neural_mp.core.int8_accumulation import KernelKind


@dataclass(frozen=True)
class _Read:
    """A node that reads a weight, with the positions of the weight and its zero point."""

    node: ir.Node
    weight: int
    zero_point: int


def full_range_kernels(model: OnnxModel) -> frozenset[KernelKind]:
    """Return the kinds of integer kernels with a signed weight beyond ±63."""
    return wide_kinds(_integer_weights(model.runs.graph))


def with_unsigned_weights(model: OnnxModel) -> OnnxModel:
    """Return the model with unsigned weights in kernels that may saturate: equal results."""
    program = model.runs.clone()
    names = edit.GraphNames(program.graph)
    for usage in saturating(_integer_weights(program.graph)):
        node, weight = usage.node, usage.node.inputs[usage.weight]
        integers = edit.known_array(weight)
        assert weight is not None
        zeros = _read_zero_points(usage, integers)
        for index, value, suffix in (
            (usage.weight, integers, "uint8"),
            (usage.zero_point, zeros, "middle"),
        ):
            edit.put_input(node, index, names.constant(f"{weight.name}/{suffix}", unsigned(value)))
    common.RemoveUnusedNodesPass()(program)
    original = None if model.given is None else program
    return replace(model, program=program, given=original, _runners={})


def _read_zero_points(usage: _Read, integers: Array) -> Array:
    """Return the zero points; if there are none, zeros of the shape of the scales."""
    node = usage.node
    array = edit.array_of(edit.input_of(node, usage.zero_point))
    if array is not None:
        return array
    scales = edit.array_of(node.inputs[1]) if dequantizes(node) else None
    return np.zeros(scales.shape if scales is not None else (), integers.dtype)


def _integer_weights(graph: ir.Graph) -> Iterator[IntegerWeight[_Read]]:
    """Yield the signed weights of INT8 products, once per node that reads them."""
    for node in in_order(graph):
        multiplying: ir.Node | None = node
        positions = KERNEL_WEIGHTS.get(node.op_type, ())
        if dequantizes(node):
            users = (user for user, position in node.outputs[0].uses() if position == 1)
            fused = (user for user in users if has_role(user, Role.LAYER) and _reads_bytes(user))
            positions, multiplying = ((0, 2),), next(fused, None)
        if multiplying is None:
            continue
        for weight, zero_point in positions:
            value = edit.input_of(node, weight)
            integers = edit.array_of(value)
            if integers is not None and integers.dtype == np.int8:
                usage = _Read(node, weight, zero_point)
                yield IntegerWeight(usage, kernel_of(multiplying, value), integers)


def _reads_bytes(node: ir.Node) -> bool:
    source = node.inputs[0].producer() if node.inputs[0] is not None else None
    return source is not None and dequantizes(source)


def kernel_of(node: ir.Node, weight: ir.Value | None) -> KernelKind:
    """Return the kind of integer kernel that multiplies by a weight.

    Depthwise means one input and output channel per group, with images as input.
    """
    if "Conv" not in node.op_type:
        return KernelKind.DENSE
    array, groups = edit.array_of(weight), node.attributes.get_int("group", 1)
    single = array is not None and array.ndim == 4 and array.shape[:2] == (groups, 1)
    return KernelKind.DEPTHWISE if single and groups > 1 else KernelKind.CONVOLUTION
