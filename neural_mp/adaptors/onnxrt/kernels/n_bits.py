"""Kernels of ONNX Runtime for weights of 2, 4 and 8 bits in groups, and their operators.

`com.microsoft.MatMulNBits` multiplies, `com.microsoft.GatherBlockQuantized` reads rows of tables
(ONNX Runtime's `ContribOperators.md`). At accuracy level 4, MatMulNBits rounds its inputs to INT8
and multiplies integers; every other level restores floats first, which with 2 and 8 bits is slower
than FP32 by orders of magnitude. The runtime falls back to floats without a message if it has no
integer kernel for the CPU, so the module, as a child process, is a probe that compares results.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import starmap

import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime as ort
from onnx import TensorProto, helper, numpy_helper

from neural_mp.adaptors.common.kernels.runtime_probe import (
    find_installed_version,
    probe_results,
    try_each,
)
from neural_mp.adaptors.common.weights.grouped_weight import (
    GROUP_SIZES,
    BitOrder,
    GroupedWeight,
    GroupParameters,
    Quantizer,
    group_spec,
    iterate_product_specs,
    pack_codes,
    round_grouped_inputs,
)
from neural_mp.adaptors.onnxrt.graph.sessions import CPU
from neural_mp.adaptors.onnxrt.kernels.registry import CONTRIB
from neural_mp.core.enums import KernelInputs, Scheme
from neural_mp.core.quant_spec import QuantSpec
from neural_mp.util.pytree import Array

PRODUCT, TABLE = "MatMulNBits", "GatherBlockQuantized"
#: Position of the bias among the inputs of MatMulNBits.
BIAS = 5
#: Accuracy level at which MatMulNBits multiplies integers, and the level of float inputs.
INT8_LEVEL, FLOAT_LEVEL = 4, 0
#: Fewer inputs do not fill a group.
MIN_INPUTS = min(GROUP_SIZES)
_ORDER = BitOrder.LOWER_FIRST
_TOO_FEW = f"weights in groups require at least {MIN_INPUTS} inputs"
#: Must change with the probe.
_VERSION = 4


@dataclass(frozen=True)
class Case:
    """A kernel to probe: operator, quantization of its weight."""

    op: str
    spec: QuantSpec

    def __str__(self) -> str:
        return f"{self.op} {self.spec}"


def probe_cases() -> Iterator[Case]:
    """Yield the kernels to probe, best first."""
    for spec in iterate_product_specs(KernelInputs.INT8, fewer_bits=(2,)):
        yield Case(PRODUCT, spec)
    for op in (TABLE, PRODUCT):
        for size in GROUP_SIZES:
            yield Case(op, group_spec(4, size, KernelInputs.FLOAT))


def list_kernel_specs(op: str, inputs: int) -> tuple[QuantSpec, ...] | str:
    """Return the quantizations that an operator multiplies in integers or reads, best first.

    The reason for the absence of 4 bits if there are none. Only groups that the inputs fill.
    """
    if inputs < MIN_INPUTS:
        return f"{_TOO_FEW}, got {inputs}"
    kind = KernelInputs.INT8 if op == PRODUCT else KernelInputs.FLOAT
    specs = list_working_specs(op, inputs, kind)
    if any(spec.dtype.bits == 4 for spec in specs):
        return specs
    return f"this build of ONNX Runtime has no {op} of 4 bits that is fast on this CPU"


def list_working_specs(op: str, inputs: int, kind: KernelInputs) -> tuple[QuantSpec, ...]:
    """Return the quantizations that the probe found to work, with groups that the inputs fill."""
    version = find_installed_version("onnxruntime", "onnxruntime-gpu", "onnxruntime-openvino")
    working = probe_results(__name__, f"{_VERSION} {version}")
    return tuple(
        case.spec
        for case in probe_cases()
        if (case.op, case.spec.inputs) == (op, kind)
        and (case.spec.group_size or 0) <= inputs
        and str(case) in working
    )


@dataclass(frozen=True)
class Operator:
    """An operator with a weight in groups: codes, scales, zero points by name, and attributes.

    Without zero points, the code in the middle stands for 0.
    """

    constants: Mapping[str, Array]
    attributes: Mapping[str, int]


def build_product(weight: GroupedWeight, spec: QuantSpec) -> Operator:
    """Return MatMulNBits for a weight."""
    level = INT8_LEVEL if spec.inputs is KernelInputs.INT8 else FLOAT_LEVEL
    outputs = len(weight.codes)
    attributes = {
        "K": weight.num_inputs,
        "N": outputs,
        "accuracy_level": level,
        **_make_kernel_attributes(spec),
    }
    return Operator(_pack_constants(weight, spec, weight.full_groups()), attributes)


def build_table(weight: GroupedWeight, spec: QuantSpec) -> Operator:
    """Return GatherBlockQuantized for a table."""
    attributes = {"gather_axis": 0, "quantize_axis": 1, **_make_kernel_attributes(spec)}
    return Operator(_pack_constants(weight, spec, weight.codes), attributes)


def _make_kernel_attributes(spec: QuantSpec) -> dict[str, int]:
    return {"bits": spec.dtype.bits, "block_size": int(spec.group_size or 0)}


def _pack_constants(weight: GroupedWeight, spec: QuantSpec, codes: Array) -> dict[str, Array]:
    constants: dict[str, Array] = {
        str(spec.dtype): pack_codes(codes, weight.bits, _ORDER),
        "scale": weight.scales,
    }
    if spec.scheme is Scheme.ASYMMETRIC:
        constants["zero_point"] = pack_codes(weight.zero_points, weight.bits, _ORDER)
    return constants


def multiplies_integers(node: ir.Node) -> bool:
    """Whether a node is a MatMulNBits that multiplies integers."""
    return node.op_type == PRODUCT and node.attributes.get_int("accuracy_level", 0) == INT8_LEVEL


_OPSET, _IR_VERSION = 17, 9
#: A last group that is not full, and several blocks of outputs.
_INPUTS, _OUTPUTS, _ROWS = 416, 80, 5
_BIASES = np.linspace(-50, 50, _OUTPUTS, dtype=np.float32)
#: Relative error below which results are equal; rounding of the inputs causes 4e-3 or more.
_TOLERANCE = 1e-4


def _probe_case(name: str) -> Iterator[str]:
    """Yield a case if its results are those of the weight as stored.

    Its inputs are float or rounded to INT8 as the case requires: a kernel that falls back to floats
    yields other results.
    """
    (case,) = (case for case in probe_cases() if str(case) == name)
    random = np.random.default_rng(0)
    weight = random.standard_normal((_OUTPUTS, _INPUTS), np.float32)
    grouped = Quantizer(case.spec, GroupParameters.ZERO_POINTS).round_to_nearest(weight)
    stored = grouped.to_floats()
    if case.op == TABLE:
        data: Array = np.arange(_ROWS)
        actual = _run_operator(build_table(grouped, case.spec), case.op, data)
        expected = stored[data]
    else:
        data = random.standard_normal((_ROWS, _INPUTS), np.float32)
        actual = _run_operator(build_product(grouped, case.spec), case.op, data)
        if case.spec.inputs is KernelInputs.INT8:
            data = round_grouped_inputs(data, case.spec.group_size or 1)
        expected = data @ stored.T + _BIASES
    if np.linalg.norm(actual - expected) < _TOLERANCE * np.linalg.norm(expected):
        yield name


def _run_operator(operator: Operator, op: str, data: Array) -> Array:
    constants = dict(operator.constants)
    integers, *parameters = constants
    if op == TABLE:
        names = [integers, "x", *parameters]
    else:
        names = ["x", integers, *parameters]
        names += [""] * (BIAS - len(names)) + ["bias"]
        constants["bias"] = _BIASES
    node = helper.make_node(op, names, ["y"], domain=CONTRIB)
    node.attribute.extend(starmap(helper.make_attribute, operator.attributes.items()))
    return run_kernel(node, data, TensorProto.FLOAT, constants)


def run_kernel(
    node: onnx.NodeProto, x: Array, result: int, constants: Mapping[str, Array]
) -> Array:
    """Return the output `y`, of the type `result`, of a node that reads `x` and constants."""
    kind = helper.np_dtype_to_tensor_dtype(x.dtype)
    graph = helper.make_graph(
        [node],
        "kernel",
        [helper.make_tensor_value_info("x", kind, x.shape)],
        [helper.make_tensor_value_info("y", result, None)],
        [numpy_helper.from_array(value, name) for name, value in constants.items()],
    )
    versions = [helper.make_opsetid("", _OPSET), helper.make_opsetid(CONTRIB, 1)]
    model: onnx.ModelProto = helper.make_model(
        graph, opset_imports=versions, ir_version=_IR_VERSION
    )
    session = ort.InferenceSession(model.SerializeToString(), providers=[CPU])
    return np.asarray(session.run(None, {"x": x})[0])


if __name__ == "__main__":
    # The bindings raise their own types.
    try_each(map(str, probe_cases()), _probe_case, Exception)
