"""Detection and conversion of weights that exceed the reduced range."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np

from neural_mp.adaptors.common.quant_params import IntegerWeight, saturating, wide_kinds
from neural_mp.adaptors.common.ranges import STEPS
from neural_mp.adaptors.openvino.fusion import is_product, moves
from neural_mp.adaptors.openvino.graph_edit import (
    array_of,
    constants_read,
    give_name,
    name_of,
    redirect_inputs,
    weight_of,
)
from neural_mp.adaptors.openvino.integer_weights import ALONE
from neural_mp.adaptors.openvino.model import OpenVinoModel
from neural_mp.adaptors.openvino.ops import Role, has_role, row_of
from neural_mp.adaptors.openvino.runtime import ops, ov
from neural_mp.core.int8_accumulation import REDUCED_RANGE, WEIGHT_LIMITS, KernelKind

#: Suffix of the names of constants with halved integers.
REDUCED = "/reduced"


def kernel_of(node: Any) -> KernelKind:
    """Return the kind of integer kernel of a layer."""
    row = row_of(node)
    assert row.kernel is not None
    if not row.is_grouped:
        return row.kernel
    shape = weight_of(node).get_partial_shape()  # [groups, outputs, inputs, …]
    single = len(shape) == 5 and all(size.is_static and len(size) == 1 for size in shape[1:3])
    return KernelKind.DEPTHWISE if single else row.kernel


def _integer_weights(program: Any) -> Iterator[IntegerWeight[Any]]:
    """Yield the int8 weights of layers, except those stored alone.

    The plugin multiplies the latter in a kernel that adds up without saturation, even if the input
    is quantized for other readers.
    """
    for node in program.get_ordered_ops():
        if row_of(node).kernel is None:
            continue
        constants = {
            name_of(c): c for c in constants_read(node) if c.get_element_type() == ov.Type.i8
        }
        if any(f"{ALONE}/" in name for name in constants):
            continue
        integers = [np.asarray(constant.get_data()) for constant in constants.values()]
        if has_role(node, Role.SEQUENCE) and integers:  # its weights have the same scales
            integers = [np.concatenate([array.ravel() for array in integers])] * len(constants)
        for constant, array in zip(constants.values(), integers, strict=True):
            yield IntegerWeight(constant, kernel_of(node), array)


def full_range_kernels(model: OpenVinoModel) -> frozenset[KernelKind]:
    """Return the kinds of integer kernels with a weight beyond ±63."""
    products = {KernelKind.DENSE} if any(_quantized_factors(model.runs)) else set()
    return wide_kinds(_integer_weights(model.runs)) | products


def _quantized_factors(program: Any) -> Iterator[Any]:
    """Yield the FakeQuantize of the second factor of every INT8 product of computed matrices."""
    for node in program.get_ordered_ops():
        if not is_product(node):
            continue
        factor = node.input_value(1).get_node()
        while moves(factor):
            factor = factor.input_value(0).get_node()
        if has_role(factor, Role.QUANTIZATION) and factor.get_attributes()["levels"] == STEPS + 1:
            yield factor


def with_reduced_range(model: OpenVinoModel) -> OpenVinoModel:
    """Return the model with weights of at most ±63 in kernels that may saturate.

    Integers are halved and scales doubled, which costs one bit of the weights. Second factors of
    products of computed matrices lose a bit as well, and the plugin computes these in float.
    """
    program = model.runs.clone()
    limit = WEIGHT_LIMITS[REDUCED_RANGE]
    for constant in saturating(_integer_weights(program)):
        halved = np.clip(np.rint(np.asarray(constant.get_data()) / 2), -limit, limit)
        smaller = give_name(f"{name_of(constant)}{REDUCED}", ops.constant(halved.astype(np.int8)))
        readers = list(constant.output(0).get_target_inputs())
        for reader in readers:
            reader.replace_source_output(smaller.output(0))
            _double_scales(reader.get_node())
    for factor in {name_of(node): node for node in _quantized_factors(program)}.values():
        _halve_levels(factor)
    program.validate_nodes_and_infer_types()
    original = None if model.given is None else program
    return replace(model, program=program, given=original, _runners={})


def _halve_levels(factor: Any) -> None:
    """Round a tensor to every second level, for which the plugin has no integer kernels."""
    low, high = (np.asarray(array_of(factor.input_value(index))) for index in (1, 2))
    high = high - (high - low) / STEPS
    half = ops.fake_quantize(factor.input_value(0), low, high, low, high, (STEPS + 1) // 2)
    readers = list(factor.output(0).get_target_inputs())
    redirect_inputs(readers, give_name(f"{name_of(factor)}{REDUCED}", half))


def _double_scales(convert: Any) -> None:
    inserted = None
    for reader in list(convert.output(0).get_target_inputs()):
        node, index = reader.get_node(), 1 - reader.get_index()
        is_scaling = has_role(node, Role.SCALING)
        scales = array_of(node.input_value(index)) if is_scaling else None
        if scales is not None:
            doubled = ops.constant(scales * np.float32(2))
            node.input(index).replace_source_output(doubled.output(0))
            continue
        if inserted is None:
            doubled = ops.multiply(convert, ops.constant(np.float32(2)))
            inserted = give_name(f"{name_of(convert)}/doubled", doubled)
        reader.replace_source_output(inserted.output(0))
