"""Probe of kernels for weights in groups; runs in a child process.

Prints a case if the results are those of the weight as stored, with inputs in float or rounded to
INT8 as the case requires: a kernel that falls back to floats yields other results.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import starmap

import numpy as np
import onnx
import onnxruntime as ort
from onnx import TensorProto, helper, numpy_helper

from neural_mp.adaptors.common.runtime_probe import try_each
from neural_mp.adaptors.common.weights.grouped_weight import (
    GroupParameters,
    Quantizer,
    rounded_inputs,
)
from neural_mp.adaptors.onnxrt.graph.sessions import CPU
from neural_mp.adaptors.onnxrt.kernels import n_bits
from neural_mp.adaptors.onnxrt.kernels.registry import CONTRIB
from neural_mp.core.enums import KernelInputs
from neural_mp.util.pytree import Array

_OPSET, _IR_VERSION = 17, 9
#: A last group that is not full, and several blocks of outputs.
_INPUTS, _OUTPUTS, _ROWS = 416, 80, 5
_BIASES = np.linspace(-50, 50, _OUTPUTS, dtype=np.float32)
#: Relative error below which results are equal; rounding of the inputs causes 4e-3 or more.
_TOLERANCE = 1e-4


def _probe_case(name: str) -> Iterator[str]:
    (case,) = (case for case in n_bits.cases() if str(case) == name)
    random = np.random.default_rng(0)
    weight = random.standard_normal((_OUTPUTS, _INPUTS), np.float32)
    grouped = Quantizer(case.spec, GroupParameters.ZERO_POINTS).nearest(weight)
    stored = grouped.floats()
    if case.op == n_bits.TABLE:
        data: Array = np.arange(_ROWS)
        actual, expected = (
            _run_operator(n_bits.table(grouped, case.spec), case.op, data),
            stored[data],
        )
    else:
        data = random.standard_normal((_ROWS, _INPUTS), np.float32)
        actual = _run_operator(n_bits.product(grouped, case.spec), case.op, data)
        if case.spec.inputs is KernelInputs.INT8:
            data = rounded_inputs(data, case.spec.group_size or 1)
        expected = data @ stored.T + _BIASES
    if np.linalg.norm(actual - expected) < _TOLERANCE * np.linalg.norm(expected):
        yield name


def _run_operator(operator: n_bits.Operator, op: str, data: Array) -> Array:
    constants = dict(operator.constants)
    integers, *parameters = constants
    if op == n_bits.TABLE:
        names = [integers, "x", *parameters]
    else:
        names = ["x", integers, *parameters]
        names += [""] * (n_bits.BIAS - len(names)) + ["bias"]
        constants["bias"] = _BIASES
    kind = helper.np_dtype_to_tensor_dtype(data.dtype)
    node = helper.make_node(op, names, ["y"], domain=CONTRIB)
    node.attribute.extend(starmap(helper.make_attribute, operator.attributes.items()))
    graph = helper.make_graph(
        [node],
        "kernel",
        [helper.make_tensor_value_info("x", kind, data.shape)],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, None)],
        [numpy_helper.from_array(value, name) for name, value in constants.items()],
    )
    versions = [helper.make_opsetid("", _OPSET), helper.make_opsetid(CONTRIB, 1)]
    model: onnx.ModelProto = helper.make_model(
        graph, opset_imports=versions, ir_version=_IR_VERSION
    )
    session = ort.InferenceSession(model.SerializeToString(), providers=[CPU])
    return np.asarray(session.run(None, {"x": data})[0])


if __name__ == "__main__":
    # The bindings raise their own types.
    try_each(map(str, n_bits.cases()), _probe_case, Exception)
