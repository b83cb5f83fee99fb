"""Ops of a model that OpenVINO miscompiles next to integer kernels.

A child process runs this module as a program, which compares ops as OpenVINO transforms them.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, MutableMapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from weakref import WeakKeyDictionary

import numpy as np

from neural_mp.adaptors.common.fusion_check import (
    describe_mismatch,
    exceeds_rounding,
    is_close,
)
from neural_mp.adaptors.common.kernels.runtime_probe import (
    find_deviations,
    find_installed_version,
    try_each_file,
)
from neural_mp.adaptors.common.quant_params import STEPS, QuantParams
from neural_mp.adaptors.openvino.fusion import moves_values
from neural_mp.adaptors.openvino.graph.edit import (
    get_constant_array,
    get_op_type,
    get_tensor_name,
    give_name,
    is_constant,
    is_float,
    iterate_nodes_before,
    iterate_op_nodes,
    list_read_outputs,
    name_of,
    rank_of,
    redirect_inputs,
)
from neural_mp.adaptors.openvino.ops import Check, Role, get_op_row, has_role
from neural_mp.adaptors.openvino.runtime import Runner, from_bytes, ops, ov, to_bytes
from neural_mp.errors import ConversionError
from neural_mp.util.pytree import Array

#: Must change with the cases or the probe.
_VERSION = 7
_PROBE = "neural_mp.adaptors.openvino.kernel_check"
#: Places in the runtime information of a case: whether its op moves quantized values, and the types
#: of the layers before.
MOVES, FOLLOWS = ("neural_mp", "moves"), ("neural_mp", "follows")
#: Sizes of free axes: the first axis, and the others in turn.
_FREE_SIZES = (2, 16, 13)
#: Maximum number of elements of an input.
_MAX_ELEMENTS = 4_000_000
#: Graph → its rejected ops.
_REJECTED: MutableMapping[ov.Model, dict[str, str]] = WeakKeyDictionary()
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


def find_rejected_ops(program: ov.Model) -> dict[str, str]:
    """Return op → the reason why it cannot run next to integer kernels, for ops of a graph."""
    if program not in _REJECTED:
        version = f"{_VERSION} {find_installed_version('openvino')}"
        reasons = find_deviations(_PROBE, version, build_op_cases(program))
        _REJECTED[program] = {
            op: f"next to integer kernels, OpenVINO {reason}" for op, reason in reasons.items()
        }
    return _REJECTED[program]


def keep_rejected(program: ov.Model, renamed: ov.Model, names: Mapping[str, str]) -> None:
    """Take over the rejected ops of a graph for its copy with new names of ops."""
    if program in _REJECTED:
        reasons = _REJECTED[program]
        _REJECTED[renamed] = {names.get(op, op): reason for op, reason in reasons.items()}


def build_op_cases(program: ov.Model) -> dict[str, bytes]:
    """Return op → case, a stored model of the op alone, for the ops to compare."""
    cases, cached = dict[str, bytes](), dict[str, bytes | None]()
    for node in iterate_op_nodes(program):
        if _is_compared(node):
            key = _make_case_key(node)
            if key not in cached:
                cached[key] = _build_case(program.clone(), name_of(node))
            case = cached[key]
            if case is not None:
                cases[name_of(node)] = case
    return cases


def _make_case_key(node: ov.Node) -> str:
    sources = node.input_values()
    tensors = [*map(get_tensor_name, sources)]
    repeated = [tensors.index(tensor) for tensor in tensors]
    constants = [
        np.asarray(get_constant_array(o)).tobytes() if is_constant(o) else None for o in sources
    ]
    shapes = [str(output.get_partial_shape()) for output in sources]
    results = [output.get_index() for output in list_read_outputs(node)]
    attributes = sorted(node.get_attributes().items(), key=str)
    layers = _preceding_layer_types(node)
    return f"{get_op_type(node)} {attributes} {shapes} {repeated} {constants} {results} {layers}"


def _preceding_layer_types(node: ov.Node) -> str:
    """Return the types of the layers whose scales may move to a node."""
    layers = (
        source for source in iterate_nodes_before(node, Role.LAYER) if has_role(source, Role.LAYER)
    )
    return " ".join(sorted({*map(get_op_type, layers)}))


def _build_case(copied: ov.Model, name: str) -> bytes | None:
    """Return the case of an op, cut from a copy of the graph; None if no data can be drawn."""
    node = next(node for node in iterate_op_nodes(copied) if name_of(node) == name)
    details = {MOVES: str(moves_values(node)), FOLLOWS: _preceding_layer_types(node)}
    case = _isolate_op(node)
    if case is None:
        return None
    for path, text in details.items():
        case.set_rt_info(text, list(path))
    graph, weights = to_bytes(case)
    return len(graph).to_bytes(8, "little") + graph + weights


def read_case(content: bytes) -> ov.Model:
    """Return the model of a case."""
    start = 8 + int.from_bytes(content[:8], "little")
    return from_bytes(content[8:start], content[start:])


def choose_fixed_shape(shape: ov.PartialShape) -> list[int]:
    """Return the sizes of a tensor, with numbers for free axes."""
    return [
        size.get_length() if size.is_static else _FREE_SIZES[min(axis, 1 + axis % 2)]
        for axis, size in enumerate(shape)
    ]


def _is_compared(node: ov.Node) -> bool:
    sources = node.input_values()
    computed = [output for output in sources if not is_constant(output)]
    # Arbitrary indices and sizes would not be valid.
    if not computed or not all(map(is_float, [*computed, *list_read_outputs(node)])):
        return False
    check = get_op_row(node).check
    if check is Check.BROADCASTING:
        return len({rank_of(output) for output in computed}) > 1
    return check is Check.ALWAYS


def _isolate_op(node: ov.Node) -> ov.Model | None:
    """Return a model of an op, cut from its graph; None if no data can be drawn for its inputs."""
    inputs: dict[str, ov.Node] = {}
    for position, port in enumerate(node.inputs()):
        output = port.get_source_output()
        if is_constant(output):
            redirect_inputs([port], _copy_constant(output, position))
            continue
        shape = output.get_partial_shape()
        if shape.rank.is_dynamic or np.prod(choose_fixed_shape(shape)) > _MAX_ELEMENTS:
            return None
        tensor = get_tensor_name(output)
        if tensor not in inputs:
            inputs[tensor] = ops.parameter(shape, np.float32, name=f"x{len(inputs)}")
        redirect_inputs([port], inputs[tensor])
    node.set_friendly_name("op")
    node.validate_and_infer_types()
    results = []
    for position, output in enumerate(list_read_outputs(node)):
        output.set_names({f"y{position}"})
        results.append(give_name(f"y{position}", ops.result(output)))
    return ov.Model(results, [*inputs.values()], "op")


def _copy_constant(output: ov.Output, position: int) -> ov.Node:
    """Return a constant input; the values of vectors of floats are of no importance."""
    values = np.asarray(get_constant_array(output))
    if is_float(output) and values.size > 1:
        values = np.linspace(0.5, 1.5, values.size, dtype=np.float32).reshape(values.shape)
    return give_name(f"c{position}", ops.constant(values, output.get_element_type()))


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
