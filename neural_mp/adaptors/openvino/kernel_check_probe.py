"""Comparison of ops next to integer kernels, as OpenVINO transforms them; runs in a child process.

Every case is a model of one float op. In one branch the op reads quantized values, in others the
results of integer convolutions and products; its result is quantized for a further kernel. The
compiled model must yield the results of the same model without low-precision transformations, but
for rounding.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np

from neural_mp.adaptors.common.fusion_check import (
    describe_mismatch,
    exceeds_rounding,
    is_close,
)
from neural_mp.adaptors.common.kernels.runtime_probe import try_each_file
from neural_mp.adaptors.common.quant_params import QuantParams
from neural_mp.adaptors.common.ranges import STEPS
from neural_mp.adaptors.openvino.kernel_check import FOLLOWS, MOVES, choose_fixed_shape, read_case
from neural_mp.adaptors.openvino.runtime import Runner, ops, ov
from neural_mp.errors import ConversionError
from neural_mp.util.pytree import Array

logger = logging.getLogger(__name__)

#: Signed weights up to this value never saturate 16-bit sums of two products with uint8.
_LARGEST_WEIGHT = 63
#: Ranks of the tensors that are convolved; the least rank of those multiplied by a matrix.
_IMAGE_RANKS, _LEAST_AXES = (3, 4, 5), 2
#: Size of the window of a convolution along the last axis: for 1, without low-precision
#: transformations, OpenVINO refuses some convolutions after transpositions.
_WINDOW = 3
#: Limits of the tensors that an op moves, which share a scale.
_MOVED = (-4.0, 4.0)


class _Ranges:
    """Quantization of tensors, in an order that is the same in each model of a case.

    Args:
        values: the value of each tensor; None leaves the tensors in float.
    """

    def __init__(self, values: Sequence[Array] | None) -> None:
        self._values = None if values is None else iter(values)
        self.tensors: list[ov.Output] = []

    def fake_quantize(
        self, output: ov.Output, limits: tuple[float, float] | None = None
    ) -> ov.Output:
        """Return a tensor after a FakeQuantize, to its own limits by default, or the tensor."""
        self.tensors.append(output)
        if self._values is None:
            return output
        array = next(self._values)
        own = float(array.min(initial=0)), float(array.max(initial=0))
        params = QuantParams.of(limits or own)
        ends = [np.array(end, np.float32) for end in (params.low, params.high)]
        return ops.fake_quantize(output, *ends, *ends, STEPS + 1).output(0)


@dataclass(frozen=True)
class _Graph:
    """A graph: parameters, results of all branches, tensors that are quantized or would be."""

    inputs: list[ov.Node]
    results: list[ov.Output]
    quantized: list[ov.Output]

    def run_outputs(
        self, outputs: list[ov.Output], feeds: list[Array], *, low_precision: bool
    ) -> list[Array]:
        """Return the values of some tensors."""
        model = ov.Model([ops.result(output) for output in outputs], self.inputs, "probe")
        return Runner(model, low_precision=low_precision)(feeds)


def find_deviation(path: Path) -> str:
    """Return the deviation of the op of a case, empty if none or if unknown."""
    content, random = path.read_bytes(), np.random.default_rng(0)
    try:
        graph = _build_branches(content, None)
        feeds = [
            random.normal(size=choose_fixed_shape(port.get_output_partial_shape(0))).astype(
                np.float32
            )
            for port in graph.inputs
        ]
        outputs = [*graph.results, *graph.quantized]
        values = graph.run_outputs(outputs, feeds, low_precision=False)
    except (ConversionError, RuntimeError):
        # Without a reference, nothing can be compared.
        logger.info("no reference for %s", path.name, exc_info=True)
        return ""
    if not all(array.size and np.isfinite(array).all() for array in values):
        return ""
    count = len(graph.results)
    quantized = _build_branches(content, values[count:])
    return _compare_results(quantized, feeds, values[:count])


def _build_branches(content: bytes, values: Sequence[Array] | None) -> _Graph:
    ranges = _Ranges(values)
    inputs: list[ov.Node] = []
    results = []
    layers = read_case(content).get_rt_info(list(FOLLOWS)).astype(str).split()
    for kernel in (None, *dict.fromkeys(_KERNELS[layer] for layer in layers)):
        case = read_case(content)
        is_mover = case.get_rt_info(list(MOVES)).astype(str) == "True"
        for index, parameter in enumerate(case.get_parameters()):
            if kernel is None:
                shape = parameter.get_output_partial_shape(0)
                inputs.append(ops.parameter(shape, np.float32, name=f"x{index}"))
            limits = _MOVED if is_mover else None
            source = ranges.fake_quantize(inputs[index].output(0), limits)
            if kernel is not None:
                source = kernel(source, values is not None)
            for reader in list(parameter.output(0).get_target_inputs()):
                reader.replace_source_output(source)
        for result in case.get_results():
            output = result.input(0).get_source_output()
            output.get_node().validate_and_infer_types()
            stored = output if is_mover and kernel is None else ranges.fake_quantize(output)
            last = _add_conv_relu if _rank_or_zero(stored) in _IMAGE_RANKS else _add_product
            results.append(last(stored, values is not None))
    return _Graph(inputs, results, ranges.tensors)


def _rank_or_zero(output: ov.Output) -> int:
    shape = output.get_partial_shape()
    return 0 if shape.rank.is_dynamic else len(shape)


# A bias in these layers would keep the scales, which are multiplied before, from moving.
def _add_conv_relu(output: ov.Output, in_int8: bool, is_transposed: bool = False) -> ov.Output:
    shape, axes = output.get_partial_shape(), _rank_or_zero(output) - 2
    if axes + 2 not in _IMAGE_RANKS or shape[1].is_dynamic:
        return output
    size = shape[1].get_length()
    window = [*[1] * (axes - 1), _WINDOW]
    weight = _per_channel_weight((size, size, *window), in_int8, int(is_transposed))
    ones, pads = [1] * axes, [*[0] * (axes - 1), _WINDOW // 2]
    if is_transposed:
        layer = ops.convolution_backprop_data(
            output, weight, ones, pads_begin=pads, pads_end=pads, dilations=ones
        )
    else:
        layer = ops.convolution(output, weight, ones, pads, pads, ones)
    return ops.relu(layer).output(0)


def _add_product(output: ov.Output, in_int8: bool) -> ov.Output:
    shape, rank = output.get_partial_shape(), _rank_or_zero(output)
    if rank < _LEAST_AXES or shape[rank - 1].is_dynamic:
        return output
    size = shape[rank - 1].get_length()
    weight = _per_channel_weight((size, size), in_int8)
    return ops.matmul(output, weight, False, True).output(0)


#: Type of a layer before an op → its kernel.
_KERNELS: Mapping[str, Callable[[ov.Output, bool], ov.Output]] = {
    "Convolution": _add_conv_relu,
    "GroupConvolution": _add_conv_relu,
    "ConvolutionBackpropData": partial(_add_conv_relu, is_transposed=True),
    "MatMul": _add_product,
}


def _per_channel_weight(shape: tuple[int, ...], in_int8: bool, channels: int = 0) -> ov.Node:
    random, limit = np.random.default_rng(shape[0]), _LARGEST_WEIGHT
    integers = random.integers(-limit, limit + 1, shape).astype(np.int8)
    size = shape[channels]
    steps = np.linspace(0.5, 1, size) / (limit * np.sqrt(np.prod(shape) / size))
    own = [size if axis == channels else 1 for axis in range(len(shape))]
    scales = steps.astype(np.float32).reshape(own)
    if not in_int8:
        return ops.constant(integers * scales)
    return ops.multiply(ops.convert(ops.constant(integers), "f32"), ops.constant(scales))


def _compare_results(quantized: _Graph, feeds: list[Array], expected: list[Array]) -> str:
    """Return a deviation of the results of quantized tensors, empty if none."""
    results = quantized.results
    try:
        actual = quantized.run_outputs(results, feeds, low_precision=True)
    except ConversionError:
        logger.info("not compiled or run", exc_info=True)
        return "does not compile it, or compiles it to another shape"
    if is_close(expected, actual):
        return ""
    try:
        plain = quantized.run_outputs(results, feeds, low_precision=False)
    except ConversionError:
        logger.info("no run without transformations", exc_info=True)
        return ""
    mismatch = describe_mismatch(plain, actual)
    if mismatch is not None:
        return f"computes {mismatch}"
    return "computes other values" if exceeds_rounding(expected, plain, actual) else ""


if __name__ == "__main__":
    try_each_file(find_deviation)
