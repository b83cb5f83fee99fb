"""Probe of kernels for weights in groups; runs in a child process.

Prints a case if the results are those of the weight as stored, with inputs rounded to INT8 where
the case requires: a kernel that falls back to floats yields other results.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from neural_mp.adaptors.common.cross_layer_scaling import rounded_weight
from neural_mp.adaptors.common.grouped_weight import GroupParameters, Quantizer, rounded_inputs
from neural_mp.adaptors.common.runtime_probe import try_each
from neural_mp.adaptors.openvino import low_bits
from neural_mp.adaptors.openvino.int8_weights import product_weight
from neural_mp.adaptors.openvino.ops import Role
from neural_mp.adaptors.openvino.runtime import Runner, ops, ov
from neural_mp.core.int8_accumulation import weight_qmax
from neural_mp.errors import ConversionError
from neural_mp.util.pytree import Array

_INPUTS, _OUTPUTS, _ROWS = 384, 80, 5
#: Relative error below which results are equal; rounding of the inputs causes 4e-3 or more.
_TOLERANCE = 1e-4


def _find(name: str) -> Iterator[str]:
    (case,) = (case for case in low_bits.cases() if str(case) == name)
    random = np.random.default_rng(0)
    weight = random.standard_normal((_OUTPUTS, _INPUTS), np.float32)
    if case.spec.group_size is None:
        stored = rounded_weight(weight, weight_qmax(case.spec), (1,))
        factor = product_weight("w", weight, case.spec)
    else:
        grouped = Quantizer(case.spec, GroupParameters.ZERO_POINTS).nearest(weight)
        stored = grouped.floats()
        factor = low_bits.grouped_weight("w", "w/stored", grouped, case.spec)
    if case.op is Role.TABLE:
        inputs: Array = np.arange(_ROWS)
        parameter = ops.parameter([-1], np.int64, name="x")
        result, expected = ops.gather(factor, parameter, ops.constant(np.int64(0))), stored[inputs]
    else:
        inputs = random.standard_normal((_ROWS, _INPUTS), np.float32)
        parameter = ops.parameter([-1, _INPUTS], np.float32, name="x")
        result = ops.matmul(parameter, factor, False, True)
        expected = rounded_inputs(inputs, case.input_group) @ stored.T
    model = ov.Model([result], [parameter], "probe")
    model.set_rt_info(str(case.input_group), list(low_bits.INPUT_GROUP))
    (output,) = Runner(model)([inputs])
    if np.linalg.norm(output - expected) < _TOLERANCE * np.linalg.norm(expected):
        yield name


if __name__ == "__main__":
    try_each(map(str, low_bits.cases()), _find, ConversionError)
