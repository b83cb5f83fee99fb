"""Kernels of every op: what AI Edge Quantizer writes and XNNPACK runs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from neural_mp.adaptors.common.capabilities import (
    AGNOSTIC,
    BOTH_FACTORS_COMPUTED,
    COMPUTED_WEIGHT,
    NO_FLOATS,
    NO_INTEGER_KERNEL,
    UNUSABLE_WEIGHT,
    IntegerKernel,
    OpKernels,
    find_table_obstacle,
    is_usable,
    table_in_bytes,
)
from neural_mp.adaptors.common.kernels.int8_accumulation import KernelAccumulation
from neural_mp.adaptors.common.weights.grouped_weight import GROUP_SIZES, group_spec
from neural_mp.adaptors.litert.convert import quantize_program
from neural_mp.adaptors.litert.graph.program import Program
from neural_mp.adaptors.litert.model import (
    LiteRtModel,
    Recipe,
    Structure,
    is_moving,
    is_quantized,
)
from neural_mp.adaptors.litert.ops import Role, get_op_row, has_role
from neural_mp.adaptors.litert.quantizer import (
    BLOCKS,
    DYNAMIC,
    HALF,
    STATIC,
    Form,
    Step,
    list_supported_types,
    make_recipe,
)
from neural_mp.adaptors.litert.runtime import find_undelegated
from neural_mp.core.enums import Granularity, KernelInputs, QuantDType, Scheme
from neural_mp.core.int8_accumulation import weight_quant_spec
from neural_mp.core.precision import Precision
from neural_mp.core.quant_spec import RANGE_ALGORITHMS, QuantSpec
from neural_mp.errors import ConversionError

#: Precisions of weights that are restored to floats on loading.
STORED_PRECISIONS = frozenset({Precision.FP16})
_NO_BF16 = "LiteRT has no kernels in bf16 for CPUs"
_NO_WEIGHT = "LiteRT computes in fp32 on CPUs; fp16 is for weights only, and this op has none"
_NO_HALF = "AI Edge Quantizer stores no weight of this op in fp16"
_TOO_LARGE = "its weight exceeds the range of fp16"
#: Reason of an op whose integer kernel is one of the slow reference kernels.
_NOT_DELEGATED = "XNNPACK has no INT8 kernel for it, and LiteRT's own is slower than float"
_RESTORED = "LiteRT multiplies only weights of dense layers in 4 bits"
_READ_IN_BYTES = "AI Edge Quantizer stores its table in 8 bits only"
#: One scale for a table whose rows stay in INT8 behind the op.
_ONE_SCALE = QuantSpec(QuantDType.INT8, Scheme.ASYMMETRIC, Granularity.PER_TENSOR)
_NO_4_BITS = "XNNPACK has no kernel for its weight in 4 bits"
#: Ops that call other graphs, of which only the main one is converted.
_CALLING = ("CALL_ONCE", "IF", "WHILE")
_CALLED = "only the main graph is converted, not loops and branches"
_QUANTIZED = "it is quantized already; give the float file"
#: Numbers of inputs that share a scale of a weight in 4 bits, best first.
_BLOCKS = (*GROUP_SIZES, *(size for size in BLOCKS if size not in GROUP_SIZES))


def find_kernels(model: LiteRtModel, accumulation: KernelAccumulation) -> dict[str, OpKernels]:
    """Return op → its kernels, or the reason for a missing kernel."""
    structure = model.structure
    obstacles = _Obstacles(find_slower_in_int8(structure), _find_low_bit_obstacles(structure))
    kernels, without_int8 = {}, dict[tuple[str, str | None], OpKernels]()
    for name in structure.ops:
        int8 = _find_integer_kernel(structure, name, accumulation, obstacles)
        half = _find_half_obstacle(structure, name)
        missing = {Precision.BF16: _NO_BF16} | ({} if half is None else {Precision.FP16: half})
        own = OpKernels(int8, missing, STORED_PRECISIONS)
        if isinstance(int8, str):  # ops that are alike share one object
            own = without_int8.setdefault((int8, half), own)
        kernels[name] = own
    part = OpKernels.none("a further result of an op has the precision of the op")
    return {**kernels, **dict.fromkeys(structure.parts, part)}


@dataclass(frozen=True)
class _Obstacles:
    """Reasons against forms of ops, from the quantizer and the runtime.

    Attributes:
        static: op → reason against INT8.
        low_bits: op → block of inputs, None for the channel → reason against 4 bits.
    """

    static: Mapping[str, str]
    low_bits: Mapping[str, Mapping[int | None, str]]


def _find_integer_kernel(
    structure: Structure, name: str, accumulation: KernelAccumulation, obstacles: _Obstacles
) -> IntegerKernel | str:
    kind = structure.get_type(name)
    row = get_op_row(kind)
    if kind in _CALLING:
        return _CALLED
    if not structure.is_float_op(name):
        result = structure.program.main.tensors[int(structure.ops[name].outputs[0])]
        return _QUANTIZED if is_quantized(result) else NO_FLOATS
    if is_moving(structure, name):
        return AGNOSTIC
    if row.role & Role.TABLE:
        return _find_table_kernel(structure, name, obstacles)
    if kind not in list_supported_types(STATIC) or not row.role:
        return NO_INTEGER_KERNEL
    if row.role & Role.LAYER and not structure.has_weight(name):
        return BOTH_FACTORS_COMPUTED if row.role is Role.DENSE else COMPUTED_WEIGHT
    if name in obstacles.static:
        return obstacles.static[name]
    if not row.role & Role.LAYER:
        return IntegerKernel(algorithms=RANGE_ALGORITHMS)
    if not is_usable(structure.get_weight(name)):
        return UNUSABLE_WEIGHT
    assert row.kernel is not None
    spec = weight_quant_spec(accumulation[row.kernel])
    if row.role is not Role.DENSE:
        return IntegerKernel(spec, RANGE_ALGORITHMS, weight_alone=spec, low_bits=_RESTORED)
    return IntegerKernel(
        spec,
        RANGE_ALGORITHMS,
        weight_alone=replace(spec, inputs=KernelInputs.INT8),
        low_bits=_list_low_bit_specs(structure, name, obstacles),
    )


def _find_table_kernel(
    structure: Structure, name: str, obstacles: _Obstacles
) -> IntegerKernel | str:
    if not structure.has_weight(name):
        return COMPUTED_WEIGHT
    table = structure.get_weight(name)
    reason = find_table_obstacle(table.reshape(len(table), -1))
    if reason is not None:
        return reason
    if structure.get_type(name) not in list_supported_types(DYNAMIC):
        return IntegerKernel(weight_alone=_ONE_SCALE, low_bits=_READ_IN_BYTES)
    return replace(table_in_bytes(), low_bits=_list_low_bit_specs(structure, name, obstacles))


def _list_low_bit_specs(
    structure: Structure, name: str, obstacles: _Obstacles
) -> tuple[QuantSpec, ...] | str:
    """Return the quantizations of a weight in 4 bits, best first, or a reason against all."""
    size = structure.get_weight(name)[0].size
    inputs = KernelInputs.FLOAT if structure.has_table(name) else KernelInputs.INT8
    reasons = obstacles.low_bits[name]
    specs = tuple(
        group_spec(4, block or size, inputs, Scheme.SYMMETRIC)
        for block in _list_blocks(structure, name)
        if block not in reasons
    )
    return specs or next(iter(reasons.values()))


def _list_blocks(structure: Structure, name: str) -> list[int | None]:
    """Return the numbers of inputs that may share a scale, best first; None for all."""
    size = structure.get_weight(name)[0].size
    return [*(block for block in _BLOCKS if size % block == 0 and size > block), None]


def _find_low_bit_obstacles(structure: Structure) -> dict[str, dict[int | None, str]]:
    """Return op → block of inputs → the reason against 4 bits, for dense layers and tables."""
    named = [
        name
        for name in structure.ops
        if has_role(structure.get_type(name), Role.DENSE | Role.TABLE)
        and structure.get_type(name) in list_supported_types(replace(DYNAMIC, bits=4))
        and structure.has_weight(name)
        and is_usable(structure.get_weight(name))
    ]
    reasons: dict[str, dict[int | None, str]] = {name: {} for name in named}
    for form in (replace(DYNAMIC, bits=4), *(replace(DYNAMIC, bits=4, block=b) for b in BLOCKS)):
        fitting = [name for name in named if form.block in _list_blocks(structure, name)]
        for name, reason in _find_obstacles(structure, fitting, form, _NO_4_BITS).items():
            # Tables are read by LiteRT's own kernel in every form.
            if reason != _NO_4_BITS or not structure.has_table(name):
                reasons[name][form.block] = reason
    return reasons


def _find_half_obstacle(structure: Structure, name: str) -> str | None:
    """Return the reason against a weight in FP16; None if there is none."""
    if not structure.has_weight(name):
        return _NO_WEIGHT
    if structure.get_type(name) not in list_supported_types(HALF):
        return _NO_HALF
    weight = structure.get_weight(name)
    if not is_usable(weight):
        return UNUSABLE_WEIGHT
    return _TOO_LARGE if np.abs(weight).max() > np.finfo(np.float16).max else None


def find_slower_in_int8(structure: Structure) -> dict[str, str]:
    """Return op → the reason why its INT8 form is slower than float, or refused.

    The graph with all ops in INT8 that the quantizer has is offered to the runtime: an op that
    XNNPACK runs in float, but not in INT8, falls to LiteRT's own kernels.
    """
    supported = list_supported_types(STATIC)
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
        for name, reason in _find_obstacles(structure, names, STATIC, _NOT_DELEGATED).items()
        if name not in in_float or reason != _NOT_DELEGATED
    }


def _find_obstacles(
    structure: Structure, names: Sequence[str], form: Form, undelegated: str
) -> dict[str, str]:
    """Return op → the reason why XNNPACK does not run the op if some ops have a form.

    Of ops that the quantizer or the runtime refuse together, each half is tried alone. The reason
    of those that both accept, but no delegate runs, is `undelegated`.
    """
    if not names:
        return {}
    ranges = {
        structure.program.tensor_name(index): (-1.0, 1.0)
        for name in names
        for index in structure.iterate_float_tensors(name)
    }
    steps = [Step(structure.get_scope(name), form) for name in names]
    try:
        converted = quantize_program(structure.program, Recipe(make_recipe(steps), ranges))
        left = _list_undelegated(converted)
    except ConversionError as error:
        if len(names) == 1:
            return {names[0]: str(error)}
        middle = len(names) // 2
        halves = (names[:middle], names[middle:])
        return {
            name: reason
            for part in halves
            for name, reason in _find_obstacles(structure, part, form, undelegated).items()
        }
    return dict.fromkeys((name for name in names if name in left), undelegated)


def _list_undelegated(program: Program) -> frozenset[str]:
    ops = list(program.iterate_ops())
    indices = find_undelegated(program.content)
    return frozenset(program.op_name(ops[index]) for index in indices)
