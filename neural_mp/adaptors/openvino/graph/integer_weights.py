"""Weights in integers: constants with decompression, and the kernels that read them as stored.

The CPU plugin multiplies the weight of a product as stored even if no input is quantized; it
restores the weights of convolutions and recurrent layers to floats when it compiles a model.

A weight in groups is multiplied as stored if the graph restores its floats as Convert → Subtract →
Multiply → Reshape. Its kernel rounds the inputs to INT8, with a scale for each row and group of
inputs, if a group of the weight holds whole groups of the inputs; otherwise the kernel restores
floats, which is slower. The group of the inputs is a property of the whole model, which
`DYNAMIC_QUANTIZATION_GROUP_SIZE` sets and the file of the model keeps.

The module is also the probe of these kernels, in a child process. A case works if the results are
those of the weight as stored, with inputs rounded to INT8 where the case requires: a kernel that
falls back to floats yields other results.
"""

from __future__ import annotations

from collections.abc import Iterator, MutableMapping
from dataclasses import dataclass, replace

import numpy as np

from neural_mp.adaptors.common.kernels.runtime_probe import (
    find_installed_version,
    probe_results,
    try_each,
)
from neural_mp.adaptors.common.quant_params import round_to_int8, weight_scales
from neural_mp.adaptors.common.weights.cross_layer_scaling import round_int8_weight
from neural_mp.adaptors.common.weights.grouped_weight import (
    GROUP_SIZES,
    BitOrder,
    GroupedWeight,
    GroupParameters,
    Quantizer,
    group_spec,
    input_group_size,
    iterate_product_specs,
    middle_code,
    pack_codes,
    round_grouped_inputs,
)
from neural_mp.adaptors.openvino.graph.edit import (
    get_constant_array,
    get_weight_output,
    give_name,
    is_constant,
    is_float,
    name_of,
    redirect_inputs,
)
from neural_mp.adaptors.openvino.ops import Role, get_op_row, has_role
from neural_mp.adaptors.openvino.runtime import Runner, ops, ov
from neural_mp.core.enums import KernelInputs, Scheme
from neural_mp.core.int8_accumulation import Int8Accumulation, weight_qmax, weight_quant_spec
from neural_mp.core.quant_spec import QuantSpec
from neural_mp.errors import ConversionError
from neural_mp.util.pytree import Array

#: Setting of the plugin, in the model's own options for the runtime.
INPUT_GROUP = ("runtime_options", "DYNAMIC_QUANTIZATION_GROUP_SIZE")
#: Must change with the probe.
_VERSION = 5
_MIN_OUTPUTS = 2
#: The quantization of a product with one scale per output, whose kernel rounds its inputs.
BY_CHANNEL = replace(weight_quant_spec(Int8Accumulation.EXACT), inputs=KernelInputs.INT8)
#: Suffixes of the names of a weight: beside a quantized input, and of one stored alone.
WEIGHT, ALONE = "/weight", "/weight_alone"
#: Suffix of the name of the integer constant of a weight.
STORED = "/int8"
#: The zero point of a table in uint8.
_MIDDLE = 128
_INPUTS, _OUTPUTS, _ROWS = 384, 80, 5
#: Relative error below which results are equal; rounding of the inputs causes 4e-3 or more.
_TOLERANCE = 1e-4


@dataclass(frozen=True)
class Case:
    """A kernel to probe: role of its op, quantization of its weight, group of the inputs."""

    op: Role
    spec: QuantSpec
    input_group: int

    def __str__(self) -> str:
        return f"{self.op.name} {self.spec} at {self.input_group}"


def probe_cases() -> Iterator[Case]:
    """Yield the kernels to probe; a model may have a smaller group of inputs than of weights."""
    for spec in iterate_product_specs(KernelInputs.INT8):
        for group in dict.fromkeys((spec.group_size or 0, min(GROUP_SIZES))):
            yield Case(Role.PRODUCT, spec, group)
    for size in GROUP_SIZES:
        yield Case(Role.PRODUCT, BY_CHANNEL, size)
    # Tables of u8 are restored to floats in models with quantized inputs, those of u4 are not.
    for size in GROUP_SIZES:
        yield Case(Role.TABLE, group_spec(4, size, KernelInputs.FLOAT), size)


def low_bit_specs(op: Role, outputs: int, inputs: int) -> tuple[QuantSpec, ...] | str:
    """Return the quantizations of a weight in groups, best first, or the reason for their absence.

    Group sizes divide the number of inputs.
    """
    if op is Role.PRODUCT and outputs < _MIN_OUTPUTS:
        return f"weights in groups require at least {_MIN_OUTPUTS} outputs, got {outputs}"
    fitting = [size for size in GROUP_SIZES if inputs % size == 0]
    if not fitting:
        sizes = ", ".join(map(str, GROUP_SIZES))
        return f"weights in groups require inputs that a group size divides ({sizes}), got {inputs}"
    probed = _probe_working_cases()
    working: dict[QuantSpec, bool] = {}
    for case in probe_cases():
        if case.op is op and case.spec.group_size in fitting:
            working[case.spec] = working.get(case.spec, True) and str(case) in probed
    specs = tuple(spec for spec, works in working.items() if works)
    return specs or "this CPU has no kernel of OpenVINO that multiplies 4-bit weights as stored"


def by_channel_spec(outputs: int, inputs: int) -> QuantSpec | None:
    """Return the quantization of a product with one scale per output; None without a kernel.

    The kernel restores floats for fewer inputs than a group, at run time, and for a single output.
    """
    if outputs < _MIN_OUTPUTS or inputs < min(GROUP_SIZES):
        return None
    case = Case(Role.PRODUCT, BY_CHANNEL, input_group_size(BY_CHANNEL, inputs))
    return BY_CHANNEL if str(case) in _probe_working_cases() else None


def _probe_working_cases() -> frozenset[str]:
    return probe_results(__name__, f"{_VERSION} {find_installed_version('openvino')}")


def set_input_group(program: ov.Model, size: int) -> None:
    """Set the group of the inputs of a model, the smallest of its kernels."""
    program.set_rt_info(str(size), list(INPUT_GROUP))


def build_grouped_weight(
    name: str, stored_name: str, weight: GroupedWeight, spec: QuantSpec
) -> ov.Node:
    """Return a constant with its decompression, in place of a weight [outputs, inputs]."""
    codes = give_name(stored_name, _pack_codes(weight.full_groups(), spec))
    steps = give_name(f"{name}/float", ops.convert(codes, "f32"))
    if spec.scheme is Scheme.ASYMMETRIC:
        zeros = _pack_codes(weight.zero_points[..., None], spec)
        steps = give_name(f"{name}/steps", ops.subtract(steps, ops.convert(zeros, "f32")))
    scaled = give_name(
        f"{name}/grouped", ops.multiply(steps, ops.constant(weight.scales[..., None]))
    )
    return give_name(name, _add_reshape(scaled, weight.codes.shape))


def _add_reshape(node: ov.Node, shape: tuple[int, ...]) -> ov.Node:
    return ops.reshape(node, ops.constant(np.array(shape, np.int64)), False)


def _pack_codes(codes: Array, spec: QuantSpec) -> ov.Node:
    if spec.dtype.bits == 8:
        return ops.constant(np.ascontiguousarray(codes))
    kind = ov.Type.u4
    if spec.scheme is Scheme.SYMMETRIC:
        # The middle code is 0; without its upper bit, a code is in two's complement.
        kind, codes = ov.Type.i4, codes ^ np.uint8(middle_code(4))
    tensor = ov.Tensor(
        pack_codes(codes.reshape(-1), 4, BitOrder.LOWER_FIRST), ov.Shape(list(codes.shape)), kind
    )
    # Shared memory would be that of a temporary.
    return ops.constant(tensor, shared_memory=False)


def is_table(node: ov.Node) -> bool:
    """Whether an op reads rows of a constant float32 table, e.g. an embedding."""
    if not has_role(node, Role.TABLE) or not is_constant(get_weight_output(node)):
        return False
    axis = get_constant_array(node.input_value(2))
    at_start = axis is not None and not np.any(axis)
    computed = not is_constant(node.input_value(1))
    is_matrix = len(get_weight_output(node).get_partial_shape()) == 2
    return at_start and computed and is_matrix and is_float(get_weight_output(node))


def make_weight_matrix(node: ov.Node) -> Array:
    """Return the weight of a product as [outputs, inputs], or the rows of a table."""
    weight = np.asarray(get_constant_array(get_weight_output(node)), np.float32)
    as_stored = has_role(node, Role.TABLE) or node.get_attributes()["transpose_b"]
    return weight if as_stored else np.ascontiguousarray(weight.T)


def count_matrix_sizes(node: ov.Node) -> tuple[int, int]:
    """Return the numbers of outputs and inputs of a product."""
    sizes = list(get_weight_output(node).get_shape())
    outputs, inputs = sizes if node.get_attributes()["transpose_b"] else sizes[::-1]
    return int(outputs), int(inputs)


def put_matrix(node: ov.Node, weight: ov.Node) -> None:
    """Replace the weight of a product or a table by a node shaped as `make_weight_matrix`."""
    if has_role(node, Role.PRODUCT):
        node.set_attribute("transpose_b", True)
    redirect_inputs([node.input(get_op_row(node).weight)], weight)


#: An int8 weight, and the scales of its channels.
Rounded = tuple[Array, Array]


def build_layer_weight(
    stem: str, node: ov.Node, spec: QuantSpec, known: MutableMapping[tuple[str, int], Rounded]
) -> ov.Node:
    """Return an int8 constant with its dequantization, in place of a layer's weight.

    The weight is rounded unless it is `known`.
    """
    key = name_of(node), weight_qmax(spec)
    if key not in known:
        weight = np.asarray(get_constant_array(get_weight_output(node)), np.float32)
        channels = get_op_row(node).weight_outputs
        if has_role(node, Role.PRODUCT):
            channels = (0 if node.get_attributes()["transpose_b"] else 1,)
        known[key] = _round_weight(weight, channels, spec)
    return _dequantized(stem, known[key])


def _round_weight(weight: Array, channels: tuple[int, ...], spec: QuantSpec) -> Rounded:
    axes = tuple(axis for axis in range(weight.ndim) if axis not in channels)
    limit = weight_qmax(spec)
    scales = weight_scales(weight, axes, limit)
    return round_to_int8(weight, scales, limit), scales


def _dequantized(stem: str, rounded: Rounded) -> ov.Node:
    integers, scales = rounded
    stored = give_name(f"{stem}{STORED}", ops.constant(integers))
    widened = give_name(f"{stem}/float", ops.convert(stored, "f32"))
    return give_name(stem, ops.multiply(widened, ops.constant(scales)))


def build_product_weight(stem: str, matrix: Array, spec: QuantSpec) -> ov.Node:
    """Return an int8 constant with its dequantization, in place of a weight [outputs, inputs].

    A Reshape ends it: when OpenVINO infers shapes, a reshaped input gets sizes of the weight, and
    two readers of the multiplication would make the plugin restore the weight to floats.
    """
    rounded = _round_weight(matrix[:, None], (0,), spec)
    scaled = give_name(f"{stem}/scaled", _dequantized(stem, rounded))
    return give_name(stem, _add_reshape(scaled, matrix.shape))


def rows_of_table(stem: str, node: ov.Node, spec: QuantSpec) -> list[ov.Node]:
    """Return the nodes that read rows of a table in bytes, the result last.

    Codes and scales are read apart and multiplied: the plugin restores a whole table to floats if
    other tensors of the model are quantized. With uint8, which has a zero point, both steps run as
    one kernel.
    """
    table, limit = (
        np.asarray(get_constant_array(get_weight_output(node)), np.float32),
        weight_qmax(spec),
    )
    scales = weight_scales(table, (1,), limit)
    codes = round_to_int8(table, scales, limit).astype(np.int16) + _MIDDLE
    stored = give_name(f"{stem}{STORED}", ops.constant(codes.astype(np.uint8)))
    indices, start = node.input_value(1), ops.constant(np.int64(0))
    rows, steps = (ops.gather(values, indices, start) for values in (stored, ops.constant(scales)))
    widened = ops.convert(rows, "f32")
    centred = ops.subtract(widened, ops.constant(np.float32(_MIDDLE)))
    parts = {"rows": rows, "scales": steps, "float": widened, "steps": centred}
    nodes = [give_name(f"{stem}/{part}", node) for part, node in parts.items()]
    return [*nodes, ops.multiply(centred, steps)]


def _probe_case(name: str) -> Iterator[str]:
    """Yield the name of a case that works."""
    (case,) = (case for case in probe_cases() if str(case) == name)
    random = np.random.default_rng(0)
    weight = random.standard_normal((_OUTPUTS, _INPUTS), np.float32)
    if case.spec.group_size is None:
        stored = round_int8_weight(weight, weight_qmax(case.spec), (1,))
        factor = build_product_weight("w", weight, case.spec)
    else:
        grouped = Quantizer(case.spec, GroupParameters.ZERO_POINTS).round_to_nearest(weight)
        stored = grouped.to_floats()
        factor = build_grouped_weight("w", "w/stored", grouped, case.spec)
    if case.op is Role.TABLE:
        inputs: Array = np.arange(_ROWS)
        parameter = ops.parameter([-1], np.int64, name="x")
        result, expected = ops.gather(factor, parameter, ops.constant(np.int64(0))), stored[inputs]
    else:
        inputs = random.standard_normal((_ROWS, _INPUTS), np.float32)
        parameter = ops.parameter([-1, _INPUTS], np.float32, name="x")
        result = ops.matmul(parameter, factor, False, True)
        expected = round_grouped_inputs(inputs, case.input_group) @ stored.T
    model = ov.Model([result], [parameter], "probe")
    set_input_group(model, case.input_group)
    (output,) = Runner(model)([inputs])
    if np.linalg.norm(output - expected) < _TOLERANCE * np.linalg.norm(expected):
        yield name


if __name__ == "__main__":
    try_each(map(str, probe_cases()), _probe_case, ConversionError)
