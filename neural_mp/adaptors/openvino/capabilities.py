"""Kernels of every op in OpenVINO's CPU plugin."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from neural_mp.adaptors.common.capabilities import (
    AGNOSTIC,
    BOTH_FACTORS_COMPUTED,
    COMPUTED_WEIGHT,
    CONSTANT_INPUT,
    FUSED,
    NO_FLOATS,
    NO_INTEGER_KERNEL,
    SIXTEEN_BITS,
    TRANSPOSED_INPUT,
    UNUSABLE_WEIGHT,
    ZERO_POINT_CORRECTIONS,
    IntegerKernel,
    OpKernels,
    find_table_obstacle,
    is_usable,
    iterate_corrected_specs,
    table_in_bytes,
)
from neural_mp.adaptors.common.kernels.int8_accumulation import KernelAccumulation
from neural_mp.adaptors.openvino.fusion import (
    get_kernel_kind,
    has_one_position,
    is_product,
    list_factors,
)
from neural_mp.adaptors.openvino.graph.edit import (
    get_constant_array,
    get_weight_output,
    is_constant,
    is_float,
    list_read_outputs,
    list_result_readers,
    rank_of,
)
from neural_mp.adaptors.openvino.graph.integer_weights import (
    by_channel_spec,
    count_matrix_sizes,
    is_table,
    low_bit_specs,
)
from neural_mp.adaptors.openvino.graph.recurrent import (
    count_stepwise_inputs,
    find_kernel_obstacle,
    find_stepwise_obstacle,
    resets_product,
)
from neural_mp.adaptors.openvino.model import OpenVinoModel
from neural_mp.adaptors.openvino.ops import Role, get_op_row, has_role
from neural_mp.adaptors.openvino.runtime import ov
from neural_mp.core.int8_accumulation import REDUCED_WEIGHT, Int8Accumulation, weight_quant_spec
from neural_mp.core.precision import Precision
from neural_mp.core.quant_spec import RANGE_ALGORITHMS, QuantSpec

#: Ops in FP16 types run in FP32 on rounded values while the model is compiled for FP32.
_EMULATED = frozenset({Precision.FP16})
#: Axes of the queries and keys of attention: samples, heads, positions and channels.
_ATTENTION_AXES = 4
#: Weights of a convolution over one position below which INT8 gains nothing: in float, they still
#: fit into the cache of a core.
_LEAST_WEIGHTS = 1 << 17
#: Reasons against weights below 8 bits.
_SCALED = "a multiplication by a constant follows, which the plugin moves into the weight"
_RESTORED = "OpenVINO restores such weights to floats when it compiles a model"

#: Multiple of channels from which on convolutions of single channels in one dimension, with several
#: outputs each, are right; seen with 8 and 16 channels, and not with 3 and 5 (2026.4, AVX-512).
_LANES = 8


def find_kernels(model: OpenVinoModel, accumulation: KernelAccumulation) -> dict[str, OpKernels]:
    """Return op → its kernels in the CPU plugin, or the reason for a missing kernel."""
    structure = model.structure
    op_kernels, without_int8 = {}, dict[tuple[str, str | None], OpKernels]()
    for name, node in structure.nodes.items():
        int8 = _find_integer_kernel(model, name, node, accumulation)
        floats = all(map(is_float, list_read_outputs(node)))
        reason = get_op_row(node).fixed_types if floats else NO_FLOATS
        missing = {} if reason is None else dict.fromkeys(SIXTEEN_BITS, reason)
        kernels = OpKernels(int8, missing, _EMULATED)
        if isinstance(int8, str):  # ops that are alike share one object
            kernels = without_int8.setdefault((int8, reason), kernels)
        op_kernels[name] = kernels
    part = OpKernels.none("a further result of an op has the precision of the op")
    return {**op_kernels, **dict.fromkeys(structure.parts, part)}


def _find_integer_kernel(
    model: OpenVinoModel, name: str, node: ov.Node, accumulation: KernelAccumulation
) -> IntegerKernel | str:
    structure = model.structure
    if is_table(node):
        table = np.asarray(get_constant_array(get_weight_output(node)))
        reason = find_table_obstacle(table)
        return reason or replace(table_in_bytes(), low_bits=low_bit_specs(Role.TABLE, *table.shape))
    if resets_product(node):
        return _kernel_of_steps(node)
    if name in model.rejected_ops:
        return model.rejected_ops[name]
    if name not in structure.fusion_groups:
        if name in structure.layer_of:
            return FUSED
        if name in structure.agnostic_ops:
            return AGNOSTIC
        return _no_kernel_reason(node)
    if has_role(node, Role.JOINING):
        return IntegerKernel(algorithms=RANGE_ALGORITHMS)
    if is_product(node):
        return _kernel_of_product(model, node, accumulation)
    if has_role(node, Role.LAYER):
        reason = _obstacle_of_layer(node)
        if reason is not None:
            return reason
    spec = weight_quant_spec(accumulation[get_kernel_kind(node)])
    if not has_role(node, Role.PRODUCT):
        return IntegerKernel(
            spec, RANGE_ALGORITHMS, other_weights=(REDUCED_WEIGHT,), low_bits=_RESTORED
        )
    sizes, scaled = count_matrix_sizes(node), _is_scaled_by_constant(node)
    low_bits = _SCALED if scaled else low_bit_specs(Role.PRODUCT, *sizes)
    alternatives: tuple[QuantSpec, ...] = (REDUCED_WEIGHT,)
    if not isinstance(low_bits, str):
        alternatives += (*iterate_corrected_specs(low_bits, ZERO_POINT_CORRECTIONS, most_bits=8),)
    return IntegerKernel(
        spec,
        RANGE_ALGORITHMS,
        weight_alone=None if scaled else by_channel_spec(*sizes),
        other_weights=alternatives,
        low_bits=low_bits,
        low_bit_corrections=ZERO_POINT_CORRECTIONS,
    )


def _obstacle_of_layer(node: ov.Node) -> str | None:
    weight = get_constant_array(get_weight_output(node))
    if weight is None or not is_usable(weight):
        return UNUSABLE_WEIGHT
    if has_role(node, Role.PRODUCT):
        if node.get_attributes()["transpose_a"]:
            return TRANSPOSED_INPUT
        if weight.ndim != 2:
            return "the weight must be a matrix for the integer kernel"
    else:
        if has_role(node, Role.TRANSPOSED):
            strides = zip(node.get_attributes()["strides"], weight.shape[2:], strict=True)
            if any(stride > size for stride, size in strides):
                return "OpenVINO computes other values where the strides exceed the kernel"
        if get_op_row(node).is_grouped and weight.shape[2] == 1:
            if weight.ndim == 6:
                return "the integer kernels by channel have at most two spatial axes"
            if weight.ndim == 4 and weight.shape[1] > 1 and weight.shape[0] % _LANES:
                return (
                    "OpenVINO computes other values in one dimension, with several outputs for "
                    "each of few channels"
                )
        if has_one_position(node.input_value(0)) and weight.size < _LEAST_WEIGHTS:
            return "so few products over one position gain no time from INT8"
    if (rank_of(node.output(0)) or 0) < 2:
        return "the integer kernel needs at least two axes"
    return None


def _is_scaled_by_constant(node: ov.Node) -> bool:
    return any(
        has_role(reader, Role.SCALING) and any(map(is_constant, reader.input_values()))
        for reader in list_result_readers(node.output(0))
    )


def _kernel_of_steps(node: ov.Node) -> IntegerKernel | str:
    """Return the kernel of the products of a GRU with `linear_before_reset`."""
    reason = find_stepwise_obstacle(node)
    if reason is not None:
        return reason
    spec = by_channel_spec(node.get_attributes()["hidden_size"], min(count_stepwise_inputs(node)))
    if spec is None:
        return "this CPU has no kernel of OpenVINO that multiplies INT8 weights as stored"
    return IntegerKernel(weight_alone=spec, low_bits=_RESTORED)


def _kernel_of_product(
    model: OpenVinoModel, node: ov.Node, accumulation: KernelAccumulation
) -> IntegerKernel | str:
    """Return the integer kernel of a product of two computed matrices."""
    if has_role(node, Role.ATTENTION):
        if model.program.get_sinks():
            return "the kernel of attention in a model with states is float"
        if any(rank_of(factor) != _ATTENTION_AXES for factor in list_factors(node)):
            return "the integer kernel of attention needs tensors of four axes"
    elif node.get_attributes()["transpose_a"]:
        return TRANSPOSED_INPUT
    if accumulation[get_kernel_kind(node)] is not Int8Accumulation.EXACT:
        return "both factors are computed, and INT8 accumulation saturates unless one is limited"
    return IntegerKernel(algorithms=RANGE_ALGORITHMS)


def _no_kernel_reason(node: ov.Node) -> str:
    if has_role(node, Role.RECURRENT):
        return find_kernel_obstacle(node) or NO_INTEGER_KERNEL
    if not has_role(node, Role.LAYER):
        return NO_INTEGER_KERNEL
    if not is_float(node.output(0)):
        return NO_FLOATS
    if is_constant(node.input_value(0)):
        return CONSTANT_INPUT
    return BOTH_FACTORS_COMPUTED if has_role(node, Role.PRODUCT) else COMPUTED_WEIGHT
