"""Kernels of every op: what AI Edge Quantizer writes and XNNPACK runs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from neural_mp.adaptors.common.capabilities import (
    AGNOSTIC,
    BOTH_FACTORS_COMPUTED,
    COMPUTED_WEIGHT,
    NO_FLOATS,
    NO_INTEGER_KERNEL,
    SIXTEEN_BITS,
    UNUSABLE_WEIGHT,
    IntegerKernel,
    OpKernels,
    find_table_obstacle,
    is_usable,
    table_in_bytes,
)
from neural_mp.adaptors.common.kernels.int8_accumulation import KernelAccumulation
from neural_mp.adaptors.litert.convert import quantize_program
from neural_mp.adaptors.litert.delegation import find_undelegated
from neural_mp.adaptors.litert.graph.program import Program
from neural_mp.adaptors.litert.model import LiteRtModel, Recipe, Structure, is_moving
from neural_mp.adaptors.litert.ops import Role, get_op_row
from neural_mp.adaptors.litert.quantizer import (
    Form,
    Step,
    list_supported_types,
    make_recipe,
)
from neural_mp.core.enums import KernelInputs
from neural_mp.core.int8_accumulation import weight_quant_spec
from neural_mp.core.quant_spec import RANGE_ALGORITHMS
from neural_mp.errors import ConversionError

#: LiteRT's kernels for CPUs store 16 bits and compute in FP32.
_NO_16_BITS = "LiteRT has no kernels in 16 bits for CPUs"
#: Reason of an op whose integer kernel is one of the slow reference kernels.
_NOT_DELEGATED = "XNNPACK has no INT8 kernel for it, and LiteRT's own is slower than float"
_NO_LOW_BITS = "AI Edge Quantizer has no such form of the op"


def find_kernels(model: LiteRtModel, accumulation: KernelAccumulation) -> dict[str, OpKernels]:
    """Return op → its kernels, or the reason for a missing kernel."""
    structure = model.structure
    slower = find_slower_in_int8(structure)
    missing = dict.fromkeys(SIXTEEN_BITS, _NO_16_BITS)
    kernels, without_int8 = {}, dict[str, OpKernels]()
    for name in structure.ops:
        int8 = _find_integer_kernel(structure, name, accumulation, slower)
        own = OpKernels(int8, missing)
        if isinstance(int8, str):  # ops that are alike share one object
            own = without_int8.setdefault(int8, own)
        kernels[name] = own
    part = OpKernels.none("a further result of an op has the precision of the op")
    return {**kernels, **dict.fromkeys(structure.parts, part)}


def _find_integer_kernel(
    structure: Structure,
    name: str,
    accumulation: KernelAccumulation,
    slower: Mapping[str, str],
) -> IntegerKernel | str:
    kind = structure.get_type(name)
    row = get_op_row(kind)
    if not structure.is_float_op(name):
        return NO_FLOATS
    if is_moving(structure, name):
        return AGNOSTIC
    if row.role is Role.TABLE:
        return _find_table_kernel(structure, name)
    if kind not in list_supported_types(Form.STATIC) or not row.role:
        return NO_INTEGER_KERNEL
    if row.role & Role.LAYER and not structure.has_weight(name):
        return BOTH_FACTORS_COMPUTED if row.role is Role.DENSE else COMPUTED_WEIGHT
    if name in slower:
        return slower[name]
    if not row.role & Role.LAYER:
        return IntegerKernel(algorithms=RANGE_ALGORITHMS)
    if not is_usable(structure.get_weight(name)):
        return UNUSABLE_WEIGHT
    assert row.kernel is not None
    spec = weight_quant_spec(accumulation[row.kernel])
    is_dense = row.role is Role.DENSE
    alone = replace(spec, inputs=KernelInputs.INT8) if is_dense else spec
    return IntegerKernel(spec, RANGE_ALGORITHMS, weight_alone=alone, low_bits=_NO_LOW_BITS)


def _find_table_kernel(structure: Structure, name: str) -> IntegerKernel | str:
    if not structure.has_weight(name):
        return COMPUTED_WEIGHT
    table = structure.get_weight(name)
    reason = find_table_obstacle(table.reshape(len(table), -1))
    if reason is not None:
        return reason
    return replace(table_in_bytes(), low_bits=_NO_LOW_BITS)


def find_slower_in_int8(structure: Structure) -> dict[str, str]:
    """Return op → the reason why its INT8 form is slower than float, or refused.

    The graph with all ops in INT8 that the quantizer has is offered to the runtime: an op that
    XNNPACK runs in float, but not in INT8, falls to LiteRT's own kernels.
    """
    supported = list_supported_types(Form.STATIC)
    names = [
        name
        for name in structure.ops
        if structure.is_float_op(name)
        and structure.get_type(name) in supported
        and get_op_row(structure.get_type(name)).role
    ]
    in_float = _list_undelegated(structure.program)
    return {
        name: reason
        for name, reason in _find_int8_obstacles(structure, names).items()
        if name not in in_float or reason != _NOT_DELEGATED
    }


def _find_int8_obstacles(structure: Structure, names: Sequence[str]) -> dict[str, str]:
    """Return op → the reason why XNNPACK does not run the op if some ops are in INT8.

    Of ops that the quantizer or the runtime refuse together, each half is tried alone.
    """
    ranges = {
        structure.program.tensor_name(index): (-1.0, 1.0)
        for name in names
        for index in structure.iterate_float_tensors(name)
    }
    steps = [Step(structure.get_scope(name), Form.STATIC) for name in names]
    try:
        converted = quantize_program(structure.program, Recipe(make_recipe(steps), ranges))
        in_int8 = _list_undelegated(converted)
    except ConversionError as error:
        if len(names) == 1:
            return {names[0]: str(error)}
        middle = len(names) // 2
        halves = (names[:middle], names[middle:])
        return {n: r for part in halves for n, r in _find_int8_obstacles(structure, part).items()}
    return dict.fromkeys((name for name in names if name in in_int8), _NOT_DELEGATED)


def _list_undelegated(program: Program) -> frozenset[str]:
    ops = list(program.iterate_ops())
    indices = find_undelegated(program.content)
    return frozenset(program.op_name(ops[index]) for index in indices)
