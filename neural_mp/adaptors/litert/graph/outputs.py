"""Outputs of a graph around its quantization, and results that nobody reads.

AI Edge Quantizer 0.10 writes broken files for a float output that an INT8 op reads, too. Such
outputs are therefore set aside, and written afterwards.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from ai_edge_litert import schema_py_generated as schema

from neural_mp.adaptors.litert.graph.program import Program


@dataclass(frozen=True)
class OutputsAside:
    """All outputs of a main subgraph, of which some are set aside.

    Attributes:
        names: the tensors of the outputs; None for those that stay in the graph.
        signatures: names of outputs, and their positions among `names`, of each signature.
    """

    names: tuple[str | None, ...]
    signatures: tuple[tuple[tuple[bytes, int], ...], ...]


def set_outputs_aside(program: Program) -> tuple[Program, OutputsAside]:
    """Return a graph without outputs that its ops read, and all outputs."""
    read = {int(index) for op in program.iterate_ops() for index in op.inputs}
    outputs = [int(index) for index in program.main.outputs]
    definitions = list_main_signatures(program.tree)
    aside = OutputsAside(
        tuple(program.tensor_name(index) if index in read else None for index in outputs),
        tuple(
            tuple((bytes(entry.name), outputs.index(int(entry.tensorIndex))) for entry in d.outputs)
            for d in definitions
        ),
    )
    if not any(aside.names):
        return program, aside
    copy = program.copy()
    copy.main.outputs = [index for index in outputs if index not in read]
    for definition in list_main_signatures(copy.tree):
        definition.outputs = [e for e in definition.outputs if int(e.tensorIndex) not in read]
    return copy, aside


def restore_outputs(program: Program, aside: OutputsAside) -> None:
    """Give a graph all its outputs, in float, in place.

    Signatures are written again: the quantizer leaves the second name of one output as it was.
    """
    tensors = {program.tensor_name(i): i for i in range(len(program.main.tensors))}
    remaining = iter(list(program.main.outputs))
    outputs = [
        int(next(remaining)) if name is None else _find_float(program, tensors[name])
        for name in aside.names
    ]
    program.main.outputs = outputs
    for definition, entries in zip(
        list_main_signatures(program.tree), aside.signatures, strict=True
    ):
        definition.outputs = []
        for name, position in entries:
            entry = schema.TensorMapT()
            entry.name, entry.tensorIndex = name, outputs[position]
            definition.outputs.append(entry)


def list_main_signatures(tree: Any) -> list[Any]:
    """Return the signatures (`SignatureDefT`) of the main subgraph."""
    return [entry for entry in tree.signatureDefs if (entry.subgraphIndex or 0) == 0]


def _find_float(program: Program, index: int) -> int:
    """Return a tensor itself, or its values in float, by an op that is added if there is none."""
    tensor = program.main.tensors[index]
    if tensor.type != schema.TensorType.INT8:
        return index
    for op in program.iterate_ops():
        if program.op_type(op) == "DEQUANTIZE" and int(op.inputs[0]) == index:
            return int(op.outputs[0])
    restored = schema.TensorT()
    restored.name = bytes(tensor.name) + b"_dequant"
    restored.type, restored.buffer = schema.TensorType.FLOAT32, 0
    restored.shape, restored.shapeSignature = tensor.shape, tensor.shapeSignature
    program.main.tensors.append(restored)
    op = schema.OperatorT()
    op.opcodeIndex = find_op_code(program.tree, schema.BuiltinOperator.DEQUANTIZE)
    op.inputs, op.outputs = [index], [len(program.main.tensors) - 1]
    program.main.operators.append(op)
    return int(op.outputs[0])


def find_op_code(tree: Any, number: int) -> int:
    """Return the position of an op code of a conversion, which is added if there is none."""
    for position, code in enumerate(tree.operatorCodes):
        if code.builtinCode == number:
            return position
    code = schema.OperatorCodeT()
    code.builtinCode = code.deprecatedBuiltinCode = number
    code.version = _CONVERSION_VERSION
    tree.operatorCodes.append(code)
    return len(tree.operatorCodes) - 1


#: Version of conversions from and to INT8 (TensorFlow, `lite/tools/versioning/op_version.cc`).
_CONVERSION_VERSION = 2


def quantize_unread_results(program: Program) -> None:
    """Give float results that nobody reads the type of the INT8 results of their op, in place."""
    read, tensors = program.list_read_tensors(), program.main.tensors
    for op in program.iterate_ops():
        results = [tensors[index] for index in op.outputs]
        int8 = next((entry for entry in results if entry.type == schema.TensorType.INT8), None)
        if int8 is None:
            continue
        for index in op.outputs:
            if int(index) not in read and program.is_float(index):
                tensors[index].type, tensors[index].quantization = int8.type, int8.quantization
