"""A LiteRT graph: a flatbuffer in parsed form, and the bytes that an interpreter runs."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
from ai_edge_litert import schema_py_generated as schema
from ai_edge_litert.tools import flatbuffer_utils

from neural_mp.util.pytree import Array

#: The deprecated number of op types beyond it.
_LAST_DEPRECATED_CODE = 127
#: Position of an operand that an op leaves out.
ABSENT = -1
OP_NAMES: dict[int, str] = {
    code: name for name, code in vars(schema.BuiltinOperator).items() if isinstance(code, int)
}
_NUMPY_DTYPES: dict[int, str] = {
    schema.TensorType.FLOAT32: "float32",
    schema.TensorType.FLOAT16: "float16",
    schema.TensorType.FLOAT64: "float64",
    schema.TensorType.INT64: "int64",
    schema.TensorType.INT32: "int32",
    schema.TensorType.UINT32: "uint32",
    schema.TensorType.UINT64: "uint64",
    schema.TensorType.INT16: "int16",
    schema.TensorType.UINT16: "uint16",
    schema.TensorType.INT8: "int8",
    schema.TensorType.UINT8: "uint8",
    schema.TensorType.BOOL: "bool",
}


@dataclass(frozen=True, eq=False)
class Program:
    """A graph, which nobody changes once it is wrapped.

    Attributes:
        tree: the parsed flatbuffer (`ModelT`), with every constant in its buffer.
    """

    tree: Any

    @classmethod
    def parse(cls, content: bytes) -> Program:
        """Return the graph of a flatbuffer, which is not checked here."""
        return cls.wrap(flatbuffer_utils.read_model_from_bytearray(bytearray(content)))

    @classmethod
    def wrap(cls, tree: Any) -> Program:
        """Return the graph of a parsed flatbuffer, which is completed in place.

        Names are bytes, op codes are in both fields, and signatures are a list.
        """
        for tensor in (tensor for graph in tree.subgraphs for tensor in graph.tensors):
            if isinstance(tensor.name, str):  # as AI Edge Quantizer names added tensors
                tensor.name = tensor.name.encode()
        for code in tree.operatorCodes:
            # Older files have the deprecated number only, which AI Edge Quantizer does not read and
            # does not write; OpenVINO reads both.
            code.builtinCode = max(code.builtinCode, code.deprecatedBuiltinCode)
            code.deprecatedBuiltinCode = min(code.builtinCode, _LAST_DEPRECATED_CODE)
        tree.signatureDefs = tree.signatureDefs or []
        return cls(tree)

    @cached_property
    def content(self) -> bytes:
        """The flatbuffer, with constants inline: OpenVINO reads no constants behind the tables."""
        for buffer in self.tree.buffers:
            if buffer.data is not None and not isinstance(buffer.data, np.ndarray):
                buffer.data = np.frombuffer(bytes(buffer.data), np.uint8)
        return bytes(flatbuffer_utils.convert_object_to_bytearray(self.tree))

    def copy(self) -> Program:
        """Return a copy whose tree may be changed until it is wrapped elsewhere."""
        return self.parse(self.content)

    @property
    def main(self) -> Any:
        """The main subgraph (`SubGraphT`)."""
        return self.tree.subgraphs[0]

    def op_type(self, op: Any) -> str:
        """Return the type of an op (`OperatorT`) as in the schema, or the name of a custom op."""
        code = self.tree.operatorCodes[op.opcodeIndex]
        if code.builtinCode == schema.BuiltinOperator.CUSTOM:
            return bytes(code.customCode or b"").decode(errors="replace")
        return OP_NAMES.get(code.builtinCode, str(code.builtinCode))

    def op_name(self, op: Any) -> str:
        """Return the name of the first result of an op; empty for ops without results."""
        return self.tensor_name(int(op.outputs[0])) if len(op.outputs) else ""

    def tensor_name(self, index: int) -> str:
        """Return the name of a tensor of the main subgraph."""
        return bytes(self.main.tensors[index].name or b"").decode(errors="replace")

    def is_constant(self, index: int) -> bool:
        """Whether a tensor of the main subgraph is a constant."""
        tensor = self.main.tensors[index]
        data = self.tree.buffers[tensor.buffer].data
        if data is not None and len(data) > 0:
            return True
        # Constants without elements, like other tensors, have no data.
        return 0 in get_sizes(tensor) and not any(index in op.outputs for op in self.iterate_ops())

    def is_float(self, index: int) -> bool:
        """Whether a tensor of the main subgraph holds float32."""
        return bool(self.main.tensors[index].type == schema.TensorType.FLOAT32)

    def get_constant(self, index: int) -> Array | None:
        """Return the value of a tensor of the main subgraph; None unless a numpy constant."""
        tensor = self.main.tensors[index]
        kind = _NUMPY_DTYPES.get(tensor.type)
        if kind is None or not self.is_constant(index):
            return None
        data = self.tree.buffers[tensor.buffer].data
        return np.frombuffer(b"" if data is None else bytes(data), kind).reshape(get_sizes(tensor))

    def list_read_tensors(self) -> frozenset[int]:
        """Return the positions of the tensors of the main subgraph that ops or callers read."""
        read = {int(index) for op in self.iterate_ops() for index in op.inputs}
        return frozenset(read.union(map(int, self.main.outputs)))

    def iterate_ops(self) -> Iterator[Any]:
        """Yield the ops (`OperatorT`) of the main subgraph in order of execution."""
        yield from self.main.operators


def drop_unused_buffers(tree: Any) -> None:
    """Empty the buffers of a parsed flatbuffer that no tensor and no metadata refer to, in place.

    They would stay in files, like the weights that a correction replaced.
    """
    used = {tensor.buffer for graph in tree.subgraphs for tensor in graph.tensors}
    used.update(entry.buffer for entry in tree.metadata or ())
    for index, buffer in enumerate(tree.buffers):
        if index not in used:
            buffer.data = None


def get_sizes(tensor: Any) -> tuple[int, ...]:
    """Return the stored sizes of a tensor (`TensorT`), 1 for a free size."""
    return () if tensor.shape is None else tuple(int(size) for size in tensor.shape)


def get_known_sizes(tensor: Any) -> tuple[int | None, ...]:
    """Return the sizes of a tensor (`TensorT`), None for a free size."""
    signature = tensor.shapeSignature
    sizes = tensor.shape if signature is None or not len(signature) else signature
    return () if sizes is None else tuple(int(size) if size >= 0 else None for size in sizes)


def get_numpy_dtype(tensor: Any) -> np.dtype[Any] | None:
    """Return the dtype of a tensor (`TensorT`), object for strings; None without one in numpy."""
    if tensor.type == schema.TensorType.STRING:
        return np.dtype(object)
    kind = _NUMPY_DTYPES.get(tensor.type)
    return None if kind is None else np.dtype(kind)
