"""Detection and conversion of weights that exceed the reduced range."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np

from neural_mp.adaptors.common.quant_params import IntegerWeight, saturating, wide_kinds
from neural_mp.adaptors.openvino.fusion import LAYERS
from neural_mp.adaptors.openvino.graph_edit import constants_read, name_of, source_of, type_of
from neural_mp.adaptors.openvino.model import OpenVinoModel
from neural_mp.adaptors.openvino.runtime import ops, ov
from neural_mp.core.int8_accumulation import REDUCED_RANGE, WEIGHT_LIMITS, KernelKind

#: Suffix of the names of constants with halved integers.
REDUCED = "/reduced"


def kernel_of(node: Any) -> KernelKind:
    """Return the kind of integer kernel of a layer."""
    if type_of(node) == "MatMul":
        return KernelKind.DENSE
    if type_of(node) == "Convolution":
        return KernelKind.CONVOLUTION
    shape = source_of(node, 1).get_partial_shape()  # [groups, outputs, inputs, …]
    single = len(shape) == 5 and all(size.is_static and len(size) == 1 for size in shape[1:3])
    return KernelKind.DEPTHWISE if single else KernelKind.CONVOLUTION


def _weights(program: Any) -> Iterator[IntegerWeight[Any]]:
    """Yield the int8 weights of layers."""
    for node in program.get_ordered_ops():
        if type_of(node) not in LAYERS:
            continue
        for constant in constants_read(node):
            if constant.get_element_type() == ov.Type.i8:
                yield IntegerWeight(constant, kernel_of(node), np.asarray(constant.get_data()))


def full_range_kernels(model: OpenVinoModel) -> frozenset[KernelKind]:
    """Return the kinds of integer kernels with a weight beyond ±63."""
    return wide_kinds(_weights(model.runs))


def with_reduced_range(model: OpenVinoModel) -> OpenVinoModel:
    """Return the model with weights of at most ±63 in kernels that may saturate.

    Integers are halved and scales doubled, which costs one bit of the weights.
    """
    program = model.runs.clone()
    limit = WEIGHT_LIMITS[REDUCED_RANGE]
    for constant in saturating(_weights(program)):
        halved = np.clip(np.rint(np.asarray(constant.get_data()) / 2), -limit, limit)
        smaller = ops.constant(halved.astype(np.int8))
        smaller.set_friendly_name(f"{name_of(constant)}{REDUCED}")
        readers = list(constant.output(0).get_target_inputs())
        for reader in readers:
            reader.replace_source_output(smaller.output(0))
            _double(reader.get_node())
    program.validate_nodes_and_infer_types()
    given = None if model.given is None else program
    return replace(model, program=program, given=given, _runners={})


def _double(convert: Any) -> None:
    """Insert a doubling after the conversion of a weight to float."""
    readers = list(convert.output(0).get_target_inputs())
    doubled = ops.multiply(convert, ops.constant(np.float32(2)))
    doubled.set_friendly_name(f"{name_of(convert)}/doubled")
    for reader in readers:
        reader.replace_source_output(doubled.output(0))
