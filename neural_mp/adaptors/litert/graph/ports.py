"""INT8 inputs and outputs of a graph, for callers that have integers, such as pixels."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from ai_edge_litert import schema_py_generated as schema

from neural_mp.adaptors.common.quant_params import MIDDLE, QuantParams
from neural_mp.adaptors.litert.graph.outputs import find_op_code, list_main_signatures
from neural_mp.adaptors.litert.graph.program import Program
from neural_mp.core.observations import Range
from neural_mp.util.pytree import Array

_INT8, _FLOAT32 = schema.TensorType.INT8, schema.TensorType.FLOAT32
_OP = schema.BuiltinOperator


def read_encoding(tensor: Any) -> QuantParams | None:
    """Return the parameters of an INT8 tensor (`TensorT`), with its own zero point, or None."""
    if tensor.type != _INT8 or tensor.quantization is None:
        return None
    scales, zeros = tensor.quantization.scale, tensor.quantization.zeroPoint
    return QuantParams(float(np.ravel(scales)[0]), int(np.ravel(zeros)[0]))


def encode_values(values: Array, encoding: QuantParams) -> Array:
    """Return floats as INT8."""
    steps = np.rint(np.asarray(values) / np.float32(encoding.scale)) + encoding.zero_point
    return np.clip(steps, -MIDDLE, MIDDLE - 1).astype(np.int8)


def decode_values(values: Array, encoding: QuantParams) -> Array:
    """Return INT8 as floats."""
    return (values.astype(np.float32) - encoding.zero_point) * np.float32(encoding.scale)


def with_integer_ports(program: Program, ranges: Mapping[str, Range]) -> Program:
    """Return a graph whose float inputs and outputs are INT8, under the same names.

    An input that the graph quantizes, and an output that it restores from INT8, have the scale of
    the graph. `ranges` are those of the other ones, by tensor.
    """
    edited = _PortEditor(program.copy())
    for index in map(int, program.main.inputs):
        if edited.program.is_float(index):
            edited.quantize_input(index, ranges)
    for index in dict.fromkeys(map(int, program.main.outputs)):
        if edited.program.is_float(index):
            edited.quantize_output(index, ranges)
    edited.remove_idle_conversions()
    return Program.wrap(edited.program.tree)


class _PortEditor:
    """Changes the types of inputs and outputs of a copy of a graph in place."""

    def __init__(self, program: Program) -> None:
        self.program = program
        self.main = program.main

    def quantize_input(self, index: int, ranges: Mapping[str, Range]) -> None:
        """Make an input INT8; float readers read its restored values."""
        tensor, name = self.main.tensors[index], self.program.tensor_name(index)
        readers = [op for op in self.program.iterate_ops() if index in op.inputs]
        quantizers = [op for op in readers if self.program.op_type(op) == "QUANTIZE"]
        if quantizers:
            quantized = int(quantizers[0].outputs[0])
            parameters = self.main.tensors[quantized].quantization
            for op in self.main.operators:
                op.inputs = [index if i == quantized else int(i) for i in op.inputs]
            self._set_output(quantized, index)
            self.main.operators = [op for op in self.main.operators if op is not quantizers[0]]
        else:
            parameters = _make_parameters(ranges[name])
        tensor.type, tensor.quantization = _INT8, parameters
        others = [op for op in readers if op not in quantizers]
        if others:
            restored = self._add_tensor(f"{name}_dequant", tensor, _FLOAT32, None)
            for op in others:
                op.inputs = [restored if i == index else int(i) for i in op.inputs]
            self._add_op(_OP.DEQUANTIZE, index, restored, 0)

    def quantize_output(self, index: int, ranges: Mapping[str, Range]) -> None:
        """Return the INT8 values that an output is restored from, or quantize the output."""
        writers = [op for op in self.program.iterate_ops() if index in op.outputs]
        if writers and self.program.op_type(writers[0]) == "DEQUANTIZE":
            source = int(writers[0].inputs[0])
            if self.main.tensors[source].type == _INT8:
                self._set_output(index, source)
                return
        tensor, name = self.main.tensors[index], self.program.tensor_name(index)
        parameters = _make_parameters(ranges[name])
        quantized = self._add_tensor(f"{name}_int8", tensor, _INT8, parameters)
        self._add_op(_OP.QUANTIZE, index, quantized, len(self.main.operators))
        self._set_output(index, quantized)

    def remove_idle_conversions(self) -> None:
        """Remove conversions whose results nobody reads."""
        read = self.program.list_read_tensors()
        self.main.operators = [
            op
            for op in self.main.operators
            if self.program.op_type(op) not in ("QUANTIZE", "DEQUANTIZE")
            or not read.isdisjoint(map(int, op.outputs))
        ]

    def _set_output(self, old: int, new: int) -> None:
        self.main.outputs = [new if index == old else int(index) for index in self.main.outputs]
        for signature in list_main_signatures(self.program.tree):
            for entry in signature.outputs:
                entry.tensorIndex = new if entry.tensorIndex == old else entry.tensorIndex

    def _add_tensor(self, name: str, like: Any, kind: int, parameters: Any) -> int:
        tensor = schema.TensorT()
        tensor.name, tensor.type, tensor.buffer = name.encode(), kind, 0
        tensor.shape, tensor.shapeSignature = like.shape, like.shapeSignature
        tensor.quantization = parameters
        self.main.tensors.append(tensor)
        return len(self.main.tensors) - 1

    def _add_op(self, number: int, source: int, result: int, position: int) -> None:
        op = schema.OperatorT()
        op.opcodeIndex = find_op_code(self.program.tree, number)
        op.inputs, op.outputs = [source], [result]
        self.main.operators.insert(position, op)


def _make_parameters(span: Range) -> Any:
    encoding, parameters = QuantParams.of(span), schema.QuantizationParametersT()
    parameters.scale = np.array([encoding.scale], np.float32)
    parameters.zeroPoint = np.array([encoding.zero_point - MIDDLE], np.int64)
    return parameters
