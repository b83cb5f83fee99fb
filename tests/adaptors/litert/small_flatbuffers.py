"""Graphs of a few ops, written by hand, in the forms of older and of other converters."""

from __future__ import annotations

from typing import Any

import numpy as np
from ai_edge_litert import schema_py_generated as schema
from ai_edge_litert.interpreter import Interpreter
from ai_edge_litert.tools import flatbuffer_utils

OP, TYPE = schema.BuiltinOperator, schema.TensorType
_TYPES = {"float32": TYPE.FLOAT32, "float16": TYPE.FLOAT16, "int8": TYPE.INT8, "int32": TYPE.INT32}


class Net:
    """A graph that grows op by op."""

    def __init__(self) -> None:
        self.tree = schema.ModelT()
        self.tree.version, self.tree.buffers = 3, [schema.BufferT()]
        self.tree.operatorCodes, self.tree.description = [], b"by hand"
        self.graph = schema.SubGraphT()
        self.graph.tensors, self.graph.operators = [], []
        self.graph.inputs, self.graph.outputs = [], []
        self.tree.subgraphs = [self.graph]

    def tensor(self, name: str, shape: tuple[int, ...], kind: str = "float32", value=None) -> int:
        tensor = schema.TensorT()
        tensor.name, tensor.shape, tensor.type = name.encode(), list(shape), _TYPES[kind]
        tensor.buffer = 0
        if value is not None:
            buffer = schema.BufferT()
            buffer.data = np.ascontiguousarray(value, kind).view(np.uint8).reshape(-1)
            self.tree.buffers.append(buffer)
            tensor.buffer = len(self.tree.buffers) - 1
        self.graph.tensors.append(tensor)
        return len(self.graph.tensors) - 1

    def op(self, code: int, inputs: list[int], outputs: list[int], options: Any = None) -> Any:
        entry, op = schema.OperatorCodeT(), schema.OperatorT()
        entry.builtinCode, entry.deprecatedBuiltinCode, entry.version = code, min(code, 127), 1
        self.tree.operatorCodes.append(entry)
        op.opcodeIndex = len(self.tree.operatorCodes) - 1
        op.inputs, op.outputs, op.builtinOptions = inputs, outputs, options
        if options is not None:
            kind = type(options).__name__.removesuffix("T")
            op.builtinOptionsType = getattr(schema.BuiltinOptions, kind)
        self.graph.operators.append(op)
        return op


def pack(tree: Any) -> bytes:
    return bytes(flatbuffer_utils.convert_object_to_bytearray(tree))


def parse(content: bytes) -> Any:
    return flatbuffer_utils.read_model_from_bytearray(bytearray(content))


def dense_net(activation: int | None = OP.RELU, rows: int = 3) -> Net:
    """x [1, 4] → a dense layer → an activation as an op of its own → y [1, rows]."""
    drawn, net = np.random.default_rng(0), Net()
    x = net.tensor("x", (1, 4))
    weight = net.tensor("w", (rows, 4), "float32", drawn.normal(size=(rows, 4)))
    bias = net.tensor("b", (rows,), "float32", drawn.normal(size=rows))
    y = net.tensor("h" if activation is not None else "y", (1, rows))
    net.op(OP.FULLY_CONNECTED, [x, weight, bias], [y], schema.FullyConnectedOptionsT())
    if activation is not None:
        hidden, y = y, net.tensor("y", (1, rows))
        net.op(activation, [hidden], [y])
    net.graph.inputs, net.graph.outputs = [x], [y]
    return net


def half_net() -> Net:
    """Two dense layers that share float16 weights, each with its own DEQUANTIZE."""
    drawn, net = np.random.default_rng(0), Net()
    x = net.tensor("x", (1, 4))
    half = net.tensor("w16", (4, 4), "float16", drawn.normal(size=(4, 4)))
    for number in (0, 1):
        weight, y = net.tensor(f"w{number}", (4, 4)), net.tensor(f"y{number}", (1, 4))
        net.op(OP.DEQUANTIZE, [half], [weight])
        net.op(OP.FULLY_CONNECTED, [x, weight], [y], schema.FullyConnectedOptionsT())
        net.graph.outputs.append(y)
    net.graph.inputs = [x]
    return net


def run(content: bytes, seed: int = 0) -> list[bytes]:
    """The results of a file for random inputs, as bytes."""
    runtime = Interpreter(model_content=content, num_threads=1)
    runtime.allocate_tensors()
    drawn = np.random.default_rng(seed)
    for entry in runtime.get_input_details():
        value = drawn.normal(0, 3, entry["shape"]).astype(entry["dtype"])
        runtime.set_tensor(entry["index"], value)
    runtime.invoke()
    return [runtime.get_tensor(entry["index"]).tobytes() for entry in runtime.get_output_details()]
