"""Ops of a model that ONNX Runtime miscompiles between integer ops.

A child process runs this module as a program, which compares ops as ONNX Runtime optimizes them.
"""

from __future__ import annotations

import copy
import json
import math
from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime as ort
from onnx import TensorProto, helper, numpy_helper

from neural_mp.adaptors.common.kernels.runtime_probe import (
    find_deviations,
    find_installed_version,
    try_each_file,
)
from neural_mp.adaptors.onnxrt.fusion import GraphStructure, graph_structure
from neural_mp.adaptors.onnxrt.graph.edit import (
    PLAIN_ATTRIBUTES,
    get_known_sizes,
    is_float32,
    list_used_outputs,
)
from neural_mp.adaptors.onnxrt.graph.opset import get_onnx_opset
from neural_mp.adaptors.onnxrt.graph.subgraphs import iterate_node_bodies
from neural_mp.adaptors.onnxrt.kernels.ops import has_weight, is_product
from neural_mp.errors import one_line
from neural_mp.util.pytree import Array

#: Must change with the cases or the probe.
_VERSION = 1
_PROBE = "neural_mp.adaptors.onnxrt.kernel_check"
#: Metadata of a case: the role of the op, the shapes to run, the constants to generate, and the
#: results that are read.
ROLE, SHAPES, GENERATED, READ = "role", "shapes", "generated", "read"
#: Roles: a layer with a quantized weight, an op that moves stored values, and all others.
LAYER, MOVER, JOINER = "layer", "mover", "joiner"
#: Greatest difference of integers that rounding explains: fused kernels round once, not twice.
_ROUNDING = 1
#: Ranks of the images that are convolved.
_IMAGE_RANKS = (3, 4)
#: Signed weights up to this value never saturate 16-bit sums of two products with uint8.
_LARGEST_WEIGHT = 63
_FATAL = 4
_CPU = "CPUExecutionProvider"
_ALL = ort.GraphOptimizationLevel.ORT_ENABLE_ALL
_PLAIN = ort.GraphOptimizationLevel.ORT_DISABLE_ALL
_UINT8_MAX = 255

Feeds = dict[str, Array]


@dataclass(frozen=True, eq=False)
class KernelCheck:
    """The check of the ops of a model, run when needed.

    Attributes:
        program: the canonicalized graph.
    """

    program: ir.Model

    @cached_property
    def rejected_ops(self) -> Mapping[str, str]:
        """Op → the reason why it cannot run between integer ops."""
        return {
            op: f"between integer ops, ONNX Runtime {reason}"
            for op, reason in _find_deviations(self.build_cases()).items()
        }

    @cached_property
    def structure(self) -> GraphStructure:
        """The structure of the graph if no op is rejected."""
        return graph_structure(self.program)

    def build_cases(self) -> dict[str, bytes]:
        """Return op → its case, for the ops that may be fused with integer ops."""
        graph, opset = self.structure, get_onnx_opset(self.program)
        cases, built = dict[str, bytes](), dict[Hashable, bytes | None]()
        for name, node in graph.nodes.items():
            if name in graph.agnostic_ops:
                role = MOVER
            elif name in graph.fusion_groups and has_weight(node):
                role = LAYER
            else:
                role = JOINER
            # Products are written as their kernel.
            if role == LAYER and is_product(node):
                continue
            key = _make_case_key(node, role)
            if key is None or key not in built:
                built[key] = build_op_case(node, role, opset)
            case = built[key]
            if case is not None:
                cases[name] = case
        return cases


def compare_ahead(checks: Iterable[KernelCheck]) -> None:
    """Compare the ops of several models in one child process."""
    cases = (case for check in checks for case in check.build_cases().values())
    _find_deviations({str(index): case for index, case in enumerate(cases)})


def _find_deviations(cases: Mapping[str, bytes]) -> dict[str, str]:
    version = find_installed_version("onnxruntime", "onnxruntime-gpu", "onnxruntime-openvino")
    return find_deviations(_PROBE, f"{_VERSION} {version}", cases)


_IR_VERSION = 8
#: Sizes of free axes: the first axis; the others, once each: two pairs of remainders.
_FIRST_SIZE, _OTHER_SIZES = 2, (13, 16)
#: Shape of an input of unknown rank.
_UNKNOWN_SHAPE = (2, 6, 13, 14)
#: Greater sizes are reduced to a size with the same remainder by most strides.
_MAX_SIZE, _REMAINDER_OF = 48, 24
#: Maximum number of elements of an input in its own shape.
_MAX_ELEMENTS = 4_000_000
#: Maximum number of channels and groups of a layer.
_MAX_CHANNELS = 16

Shape = tuple[int, ...]
Dims = tuple[int | None, ...]


def _make_case_key(node: ir.Node, role: str) -> Hashable | None:
    """Return all that a case depends on; None for attributes without a simple value.

    Long graphs repeat a few ops, and a case takes far longer to write than its key.
    """
    attributes = tuple(node.attributes.values())
    if any(item.is_ref() or item.type not in PLAIN_ATTRIBUTES for item in attributes):
        return None
    settings = frozenset((item.name, item.type, str(item.value)) for item in attributes)
    numbers: dict[ir.Value, int] = {}
    operands = tuple(
        None
        if value is None
        else (numbers.setdefault(value, len(numbers)), *_describe_input(node, value))
        for value in node.inputs
    )
    used = list_used_outputs(node)
    results = tuple((bool(value.name), value in used) for value in node.outputs)
    kind = node.op_type, node.domain, is_float32(node.outputs[0])
    return role, kind, settings, operands, results


def _describe_input(node: ir.Node, value: ir.Value) -> tuple[Hashable, ...]:
    """Return the type and sizes of an input, and the values of a constant that matter."""
    constant, values = value.const_value, None
    if constant is not None and not _has_arbitrary_values(node, value):
        values = constant.numpy().tobytes()
    is_known = value.shape is not None
    return value.dtype, is_known, _choose_input_dims(value), constant is None, values


def build_op_case(node: ir.Node, role: str, opset: int) -> bytes | None:
    """Return the case of an op, a serialized model of it; None if no integer op can precede it."""
    if node.domain or list(iterate_node_bodies(node)) or not is_float32(node.outputs[0]):
        return None
    fed = [value for value in node.inputs if value is not None and value.const_value is None]
    kinds = {value.dtype for value in fed}
    # Arbitrary indices would not be valid.
    if ir.DataType.FLOAT not in kinds or kinds - {ir.DataType.FLOAT, ir.DataType.BOOL}:
        return None
    names = {
        value: f"x{index}"
        for index, value in enumerate(dict.fromkeys(_iterate_present_inputs(node)))
    }
    proto = ir.serde.serialize_node(node)
    del proto.input[:], proto.output[:]
    proto.name = proto.doc_string = ""
    proto.ClearField("metadata_props")
    proto.input.extend("" if value is None else names[value] for value in node.inputs)
    proto.output.extend(
        f"y{index}" if value.name else "" for index, value in enumerate(node.outputs)
    )
    ordered = sorted(proto.attribute, key=lambda attribute: attribute.name)
    del proto.attribute[:]
    if role == LAYER:
        ordered = [attribute for attribute in ordered if attribute.name != "group"]
    proto.attribute.extend(ordered)
    free = [
        value for value in names if value.const_value is None or _has_arbitrary_values(node, value)
    ]
    if role == LAYER:
        shapes, groups = _choose_convolution_shapes(node)
        proto.attribute.append(onnx.helper.make_attribute("group", groups))
    else:
        shapes = list(_iterate_candidate_shapes([_choose_input_dims(value) for value in free]))
    inputs = [
        onnx.helper.make_tensor_value_info(names[value], int(value.dtype or 0), None)
        for value in free
    ]
    constants = [
        onnx.numpy_helper.from_array(value.const_value.numpy(), names[value])
        for value in names
        if value not in free and value.const_value is not None
    ]
    graph = onnx.helper.make_graph([proto], "op", inputs, [], constants)
    model = onnx.helper.make_model(
        graph, opset_imports=[onnx.helper.make_opsetid("", opset)], ir_version=_IR_VERSION
    )
    details: Mapping[str, object] = {
        ROLE: role,
        SHAPES: shapes,
        READ: [f"y{node.outputs.index(value)}" for value in list_used_outputs(node)],
        GENERATED: [names[value] for value in free if value.const_value is not None],
    }
    onnx.helper.set_model_props(model, {key: json.dumps(value) for key, value in details.items()})
    return model.SerializeToString(deterministic=True)


def _iterate_present_inputs(node: ir.Node) -> Iterator[ir.Value]:
    return (value for value in node.inputs if value is not None)


def _has_arbitrary_values(node: ir.Node, value: ir.Value) -> bool:
    """Whether the values of a constant are of no importance; those of Resize are sizes."""
    constant = value.const_value
    return (
        constant is not None
        and is_float32(value)
        and constant.size > 1
        and node.op_type != "Resize"
    )


def _choose_input_dims(value: ir.Value) -> Dims:
    if value.const_value is not None:
        return tuple(value.const_value.shape.numpy())
    sizes = get_known_sizes(value)
    return _UNKNOWN_SHAPE if sizes is None else sizes


def _iterate_candidate_shapes(given: Sequence[Dims]) -> Iterator[list[list[Shape]]]:
    """Yield the shapes to run, each with alternatives: those which the op accepts count.

    Reduced shapes come first, as they take less time and apply to more models.
    """
    is_free = any(size is None for dims in given for size in dims[1:])
    for extent in _OTHER_SIZES if is_free else _OTHER_SIZES[:1]:
        whole = [
            tuple(
                size if size is not None else (extent if axis else _FIRST_SIZE)
                for axis, size in enumerate(dims)
            )
            for dims in given
        ]
        rank = max(map(len, whole))
        smaller = [
            [size if size <= _MAX_SIZE else _REMAINDER_OF + size % _REMAINDER_OF for size in shape]
            for shape in whole
        ]
        reduced = [
            tuple(
                min(size, _FIRST_SIZE) if rank > 2 and len(shape) == rank and not axis else size
                for axis, size in enumerate(shape)
            )
            for shape in smaller
        ]
        alternatives = [reduced, whole] if whole != reduced else [whole]
        yield [shapes for shapes in alternatives if max(map(math.prod, shapes)) <= _MAX_ELEMENTS]


def _choose_convolution_shapes(node: ir.Node) -> tuple[list[list[list[Shape]]], int]:
    """Return the shapes of a convolution's data, weight and bias with few channels, and groups."""
    data, weight, *bias = _iterate_present_inputs(node)
    assert weight.const_value is not None
    outputs, inputs, *window = weight.const_value.shape.numpy()
    groups = node.attributes.get_int("group", 1)
    few = min(groups, _MAX_CHANNELS)
    out_channels = few * min(outputs // groups, _MAX_CHANNELS)
    in_channels = min(inputs, _MAX_CHANNELS)
    constants: list[Shape] = [(out_channels, in_channels, *window), *[(out_channels,)] * len(bias)]
    dims = _choose_input_dims(data) if data.shape is not None else (None,) * (2 + len(window))
    return [
        [[(_FIRST_SIZE, few * in_channels, *shapes[0][2:]), *constants] for shapes in alternatives]
        for alternatives in _iterate_candidate_shapes([dims])
    ], few


@dataclass
class _Parameters:
    """Scale and zero point of a tensor, as names of constants."""

    scale: str
    zero: str


@dataclass
class _Builder:
    """The nodes and constants of a model under construction, with the arrays of its inputs."""

    case: onnx.ModelProto
    inputs: dict[str, Array] = field(default_factory=dict)
    nodes: list[onnx.NodeProto] = field(default_factory=list)
    constants: dict[str, Array] = field(default_factory=dict)
    outputs: list[str] = field(default_factory=list)

    @property
    def op_node(self) -> onnx.NodeProto:
        """The op."""
        return self.case.graph.node[0]

    def add_parameters(self, stem: str, scale: float, zero: int) -> _Parameters:
        """Add the quantization parameters of a tensor."""
        names = _Parameters(f"{stem}.scale", f"{stem}.zero")
        self.constants[names.scale] = np.asarray(scale, np.float32)
        self.constants[names.zero] = np.asarray(zero, np.uint8)
        return names

    def add_dequantize(self, stored: str, by: _Parameters) -> str:
        """Return the float form of a stored tensor."""
        result = f"{stored}.float"
        self.nodes.append(
            helper.make_node("DequantizeLinear", [stored, by.scale, by.zero], [result])
        )
        return result

    def add_quantize(self, real: str, by: _Parameters, result: str) -> str:
        """Store a float tensor."""
        self.nodes.append(helper.make_node("QuantizeLinear", [real, by.scale, by.zero], [result]))
        return result

    def add_convolution(self, stored: str, shape: tuple[int, ...], by: _Parameters) -> str:
        """Return a stored tensor after an integer convolution that keeps each value."""
        if len(shape) not in _IMAGE_RANKS:
            return stored
        channels, stem = shape[1], f"{stored}.kept"
        self.constants[f"{stem}.w"] = np.full((channels, *[1] * (len(shape) - 1)), 127, np.int8)
        self.constants[f"{stem}.w.scale"] = np.full(channels, 1 / 127, np.float32)
        self.constants[f"{stem}.w.zero"] = np.zeros(channels, np.int8)
        weight = self._add_float_weight(f"{stem}.w")
        image = self.add_dequantize(stored, by)
        self.nodes.append(helper.make_node("Conv", [image, weight], [f"{stem}.y"], group=channels))
        return self.add_quantize(f"{stem}.y", by, stem)

    def _add_float_weight(self, name: str) -> str:
        inputs = [name, f"{name}.scale", f"{name}.zero"]
        self.nodes.append(helper.make_node("DequantizeLinear", inputs, [f"{name}.float"], axis=0))
        return f"{name}.float"

    def add_quantized_weight(self, weight: str, shape: tuple[int, ...], data: _Parameters) -> None:
        """Store the weight of a convolution and its bias in integers."""
        integers = np.random.default_rng(1).integers(-_LARGEST_WEIGHT, _LARGEST_WEIGHT + 1, shape)
        scales = np.linspace(0.5, 1, shape[0]) / (_LARGEST_WEIGHT * np.sqrt(np.prod(shape[1:])))
        self.constants[weight] = integers.astype(np.int8)
        self.constants[f"{weight}.scale"] = scales.astype(np.float32)
        self.constants[f"{weight}.zero"] = np.zeros(shape[0], np.int8)
        self.op_node.input[1] = self._add_float_weight(weight)
        if len(self.op_node.input) > 2:
            bias = self.op_node.input[2]
            steps = self.constants[f"{weight}.scale"] * self.constants[data.scale]
            self.constants[bias] = np.round(np.linspace(-1, 1, shape[0]) / steps).astype(np.int32)
            self.constants[f"{bias}.scale"] = steps
            self.constants[f"{bias}.zero"] = np.zeros(shape[0], np.int32)
            self.op_node.input[2] = self._add_float_weight(bias)

    def create_session(self, level: ort.GraphOptimizationLevel) -> ort.InferenceSession:
        """Return a session of the model."""
        graph = helper.make_graph(
            self.nodes,
            "kernel",
            [
                helper.make_tensor_value_info(
                    name, helper.np_dtype_to_tensor_dtype(array.dtype), array.shape
                )
                for name, array in self.inputs.items()
            ],
            [helper.make_tensor_value_info(n, TensorProto.UNDEFINED, None) for n in self.outputs],
            [numpy_helper.from_array(np.asarray(a), name) for name, a in self.constants.items()],
        )
        for output in graph.output:
            output.ClearField("type")
        model = helper.make_model(
            graph, opset_imports=self.case.opset_import, ir_version=self.case.ir_version
        )
        options = ort.SessionOptions()
        options.log_severity_level, options.graph_optimization_level = _FATAL, level
        options.intra_op_num_threads = 1
        return ort.InferenceSession(model.SerializeToString(), options, providers=[_CPU])

    def run_model(self, level: ort.GraphOptimizationLevel) -> list[Array]:
        """Return the outputs of the model."""
        return [np.asarray(output) for output in self.create_session(level).run(None, self.inputs)]


def _compare_results(case: onnx.ModelProto, shapes: list[list[int]]) -> str | None:
    """Return a deviation of an op on inputs of some shapes, empty if none; None if unknown."""
    try:
        reference = _build_float_model(case, shapes)
        results = reference.run_model(_PLAIN)
        if not all(actual.size and np.isfinite(actual).all() for actual in results):
            return None
        written = _store_results(reference, results)
        expected = written.run_model(_PLAIN)
        fused = _build_mover_model(case, shapes) if _read_case_role(case) == MOVER else written
    except Exception:  # noqa: BLE001 (the bindings raise their own types)
        # Without a reference, nothing can be compared.
        return None
    try:
        session = fused.create_session(_ALL)
    except Exception as error:  # noqa: BLE001 (as above)
        return f"cannot load it: {one_line(error)}"
    try:
        actual = session.run(None, fused.inputs)
    except Exception as error:  # noqa: BLE001 (as above)
        return f"fails to run it: {one_line(error)}"
    steps = max(
        int(np.abs(x.astype(np.int64) - y.astype(np.int64)).max(initial=0))
        if x.shape == y.shape
        else _UINT8_MAX
        for x, y in zip(expected, actual, strict=False)
    )
    if steps <= _ROUNDING:
        return ""
    return f"computes other results, by up to {steps} of {_UINT8_MAX} steps"


def _read_case_role(case: onnx.ModelProto) -> str:
    return _read_case_details(case)[ROLE]


def _read_case_details(case: onnx.ModelProto) -> Mapping[str, Any]:
    return {entry.key: json.loads(entry.value) for entry in case.metadata_props}


def _build_float_model(case: onnx.ModelProto, shapes: list[list[int]]) -> _Builder:
    built = _start_builder(case, shapes)
    renamed = {}
    for name in [value.name for value in case.graph.input]:
        if name in built.constants or f"{name}.scale" not in built.constants:
            continue
        by = _Parameters(f"{name}.scale", f"{name}.zero")
        stored = built.add_convolution(name, built.inputs[name].shape, by)
        renamed[name] = built.add_dequantize(stored, by)
    if _read_case_role(case) == LAYER:
        first, weight, *_ = built.op_node.input
        by = _Parameters(f"{first}.scale", f"{first}.zero")
        built.add_quantized_weight(weight, built.constants[weight].shape, by)
    for position, name in enumerate(built.op_node.input):
        built.op_node.input[position] = renamed.get(name, name)
    built.nodes.append(built.op_node)
    built.outputs = _read_case_details(case)[READ]
    return built


def _start_builder(case: onnx.ModelProto, shapes: list[list[int]]) -> _Builder:
    """Return a builder with the inputs, stored if of floats, and the constants of a case."""
    built = _Builder(copy.deepcopy(case))
    random, generated = np.random.default_rng(0), _read_case_details(case)[GENERATED]
    for tensor in case.graph.initializer:
        built.constants[tensor.name] = numpy_helper.to_array(tensor)
    for index, (value, shape) in enumerate(zip(case.graph.input, shapes, strict=True)):
        kind = value.type.tensor_type.elem_type
        if value.name in generated:
            numbers = np.linspace(0.5, 1.5, int(np.prod(shape))).astype(np.float32)
            built.constants[value.name] = numbers.reshape(shape)
        elif kind == TensorProto.FLOAT:
            built.inputs[value.name] = random.integers(0, _UINT8_MAX + 1, shape, np.uint8)
            built.add_parameters(value.name, 0.02 + 0.005 * (index % 3), 100 + 7 * (index % 8))
        elif kind == TensorProto.BOOL:
            built.inputs[value.name] = random.integers(0, 2, shape).astype(bool)
        else:
            built.inputs[value.name] = np.zeros(shape, helper.tensor_dtype_to_np_dtype(kind))
    return built


def _store_results(built: _Builder, results: list[Array]) -> _Builder:
    own = built.inputs.keys()
    mover = _read_case_role(built.case) == MOVER
    outputs = []
    for name, array in zip(built.outputs, results, strict=True):
        if array.dtype != np.float32:
            outputs.append(name)
            continue
        by = _Parameters(*(f"{next(iter(own))}.{part}" for part in ("scale", "zero")))
        if not mover:
            low, high = min(float(array.min()), 0.0), max(float(array.max()), 0.0)
            scale = (high - low) / _UINT8_MAX or 1.0
            by = built.add_parameters(name, scale, round(-low / scale))
        stored = built.add_quantize(name, by, f"{name}.stored")
        outputs.append(built.add_convolution(stored, array.shape, by))
    built.outputs = outputs
    return built


def _build_mover_model(case: onnx.ModelProto, shapes: list[list[int]]) -> _Builder:
    built = _start_builder(case, shapes)
    (name,) = built.inputs
    by = _Parameters(f"{name}.scale", f"{name}.zero")
    built.op_node.input[0] = built.add_convolution(name, built.inputs[name].shape, by)
    if built.op_node.op_type == "Pad":
        while len(built.op_node.input) <= 2:
            built.op_node.input.append("")
        built.op_node.input[2] = by.zero
    built.nodes.append(built.op_node)
    reference = _build_float_model(case, shapes)
    sizes = [output.shape for output in reference.run_model(_PLAIN)]
    built.outputs = [
        built.add_convolution(name, shape, by)
        for name, shape in zip(_read_case_details(case)[READ], sizes, strict=True)
    ]
    return built


def find_deviation(path: Path) -> str:
    """Return the deviation of the op of a case on the shapes that it may run on."""
    case = onnx.load(str(path))
    for alternatives in _read_case_details(case)[SHAPES]:
        results = (_compare_results(case, shapes) for shapes in alternatives)
        deviation = next((result for result in results if result is not None), "")
        if deviation:
            return deviation
    return ""


if __name__ == "__main__":
    try_each_file(find_deviation)
