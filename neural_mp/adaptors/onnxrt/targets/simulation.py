"""Simulation of QDQ files on the CPU: pairs of Q/DQ ops are computed as written."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import numpy as np
import onnx
import onnx_ir as ir

from neural_mp.adaptors.common.signatures.signature import Array
from neural_mp.adaptors.onnxrt.graph.edit import get_constant_array
from neural_mp.adaptors.onnxrt.graph.sessions import Runner
from neural_mp.adaptors.onnxrt.kernels.ops import is_quantize

#: Session setting by which ONNX Runtime computes pairs of Q/DQ ops as written: its fused integer
#: kernels, and those with weights in integers only, would round otherwise than a target does.
PLAIN_QDQ = {"session.disable_quant_qdq": "1"}


def simulate_file(
    model: onnx.ModelProto, feeds: Iterable[Mapping[str, Array]]
) -> list[dict[str, Array]]:
    """Return the outputs of a file for each sample, by name.

    Raises:
        ConversionError: ONNX Runtime rejects the file.
    """
    program = ir.from_proto(model)
    names = [str(value.name) for value in program.graph.outputs]
    run = Runner(program, None, entries=PLAIN_QDQ).make_fetcher(names)
    return [dict(zip(names, run(sample), strict=True)) for sample in feeds]


def collect_input_ranges(model: onnx.ModelProto) -> dict[str, tuple[float, float]]:
    """Return input → the range of its integers, for inputs that the file quantizes."""
    ranges = {}
    for value in ir.from_proto(model).graph.inputs:
        for use in value.uses():
            scale = get_constant_array(use.node.inputs[1]) if is_quantize(use.node) else None
            zero = get_constant_array(use.node.inputs[2]) if scale is not None else None
            if scale is not None and zero is not None and scale.size == 1:
                info = np.iinfo(zero.dtype)
                low, high = (float(scale) * (end - int(zero)) for end in (info.min, info.max))
                ranges[str(value.name)] = low, high
    return ranges
