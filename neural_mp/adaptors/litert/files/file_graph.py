"""Graphs of a `.tflite` file as its tables describe them, unchecked."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

from ai_edge_litert import schema_py_generated as schema

from neural_mp.adaptors.litert.files.flatbuffer import Table
from neural_mp.adaptors.litert.graph.program import ABSENT

TYPE_NAMES = {
    number: name for name, number in vars(schema.TensorType).items() if isinstance(number, int)
}

_BLOCKWISE = schema.QuantizationDetails.BlockwiseQuantization


class FileFaultError(ValueError):
    """A reason to refuse a file, as a message without the name of the file."""


def require(condition: bool, fault: str) -> None:
    """Raise the fault unless the condition holds.

    Raises:
        FileFaultError: with this message.
    """
    if not condition:
        raise FileFaultError(fault)


@dataclass(frozen=True)
class FileParts:
    """Parts that all graphs of a file share.

    Attributes:
        sizes: bytes of each buffer.
        ops: names of the ops by operator code.
        subgraphs: the tables of the graphs.
    """

    sizes: Sequence[int]
    ops: Sequence[str]
    subgraphs: Sequence[Table]


@dataclass(frozen=True)
class FileGraph:
    """A graph of a file.

    Attributes:
        parts: those that the graphs of the file share.
        number: position of this graph in the file.
    """

    parts: FileParts
    number: int

    @cached_property
    def tensors(self) -> Sequence[Table]:
        """The tables of the tensors."""
        return self.parts.subgraphs[self.number].get("tensors", ())

    @cached_property
    def inputs(self) -> Sequence[int]:
        """Positions of the inputs among the tensors."""
        return self.parts.subgraphs[self.number].get("inputs", ())

    @cached_property
    def outputs(self) -> Sequence[int]:
        """Positions of the outputs among the tensors."""
        return self.parts.subgraphs[self.number].get("outputs", ())

    def iterate_operators(self) -> Iterator[FileOperator]:
        """Yield the ops in order of execution."""
        for table in self.parts.subgraphs[self.number].get("operators", ()):
            yield FileOperator(self, table)

    def describe(self, index: int) -> str:
        """Return a description of a tensor for messages."""
        return f"tensor {self.tensors[index].get('name') or index!r}"

    def get_sizes(self, index: int) -> Sequence[int]:
        """Return the stored sizes of a tensor."""
        sizes: Sequence[int] = self.tensors[index].get("shape", ())
        return sizes

    def get_type(self, index: int) -> int:
        """Return the type of a tensor."""
        return int(self.tensors[index].get("type", 0))

    def get_type_name(self, index: int) -> str:
        """Return the type of a tensor for messages."""
        return TYPE_NAMES.get(self.get_type(index), str(self.get_type(index)))

    def get_blocks(self, index: int) -> Table | None:
        """Return how blocks of a tensor share scales; None if channels do, or the whole tensor."""
        quantization = self.tensors[index].get("quantization", {})
        is_in_blocks = quantization.get("detailsType", 0) == _BLOCKWISE
        return (quantization.get("details") or {}) if is_in_blocks else None

    def is_constant(self, index: int) -> bool:
        """Whether a tensor has a value in the file."""
        return bool(self.parts.sizes[self.tensors[index].get("buffer", 0)])


@dataclass(frozen=True)
class FileOperator:
    """An op of a graph.

    Attributes:
        graph: the graph.
        table: the table of the op.
    """

    graph: FileGraph
    table: Table

    @cached_property
    def name(self) -> str:
        """The name of the op as in the schema; its code is checked."""
        return self.graph.parts.ops[self.table.get("opcodeIndex", 0)]

    @cached_property
    def inputs(self) -> Sequence[int]:
        """Positions of the operands among the tensors, -1 for one that is left out."""
        return self.table.get("inputs", ())

    @cached_property
    def operands(self) -> Sequence[int]:
        """Positions of the operands that are there."""
        return [index for index in self.inputs if index != ABSENT]

    @cached_property
    def outputs(self) -> Sequence[int]:
        """Positions of the results among the tensors."""
        return self.table.get("outputs", ())

    @cached_property
    def options(self) -> Table:
        """Options that differ from their defaults."""
        return self.table.get("builtinOptions") or self.table.get("builtinOptions2") or {}

    def describe(self) -> str:
        """Return a description of the op for messages."""
        results = [index for index in self.outputs if 0 <= index < len(self.graph.tensors)]
        behind = f" before {self.graph.describe(results[0])}" if results else ""
        return f"op {self.name}{behind}"
