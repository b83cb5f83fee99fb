"""Comparison of ops between integer ops, as ONNX Runtime optimizes them; runs in a child process.

Every case is a model of one float op. The op is placed between DequantizeLinear, QuantizeLinear and
convolutions that keep their input, since ONNX Runtime moves the transpositions around integer
convolutions past other ops. The optimized model must load and yield the integers of the same model
without optimizations, but for rounding.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime as ort
from onnx import TensorProto, helper, numpy_helper

from neural_mp.adaptors.common.kernels.runtime_probe import try_each_file
from neural_mp.errors import one_line
from neural_mp.util.pytree import Array

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
    steps = max(map(_compute_greatest_difference, expected, actual))
    if steps <= _ROUNDING:
        return ""
    return f"computes other results, by up to {steps} of {_UINT8_MAX} steps"


def _compute_greatest_difference(expected: Array, actual: Array) -> int:
    if expected.shape != actual.shape:
        return _UINT8_MAX
    return int(np.abs(expected.astype(np.int64) - actual.astype(np.int64)).max(initial=0))


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
