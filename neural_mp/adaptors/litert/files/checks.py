"""Checks of untrusted `.tflite` files before anything else reads them.

LiteRT checks the references in a file, but not all contents: ops that lack operands, constants that
are inputs, or scales that are no numbers end the process.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Sequence
from pathlib import Path

from ai_edge_litert import schema_py_generated as schema

from neural_mp.adaptors.litert.files.file_graph import (
    FileFaultError,
    FileGraph,
    FileOperator,
    FileParts,
    require,
)
from neural_mp.adaptors.litert.files.flatbuffer import FlatbufferError, FlatbufferReader, Table
from neural_mp.adaptors.litert.files.op_checks import check_calls, check_operator
from neural_mp.adaptors.litert.files.op_operands import OPERANDS
from neural_mp.adaptors.litert.graph.program import ABSENT, OP_NAMES
from neural_mp.errors import ModelLoadError, one_line
from neural_mp.io.files import read_bounded, require_regular_file
from neural_mp.io.limits import MAX_FILE_BYTES, MAX_LITERT_RANK, MAX_LITERT_TENSOR_BYTES

_IDENTIFIER = b"TFL3"
_VERSION = 3
#: An offset of 1 stands for "not yet written".
_LEAST_OFFSET = 2
_SCALES = (1e-30, 1e30)
_BLOCK_SIZES = (32, 64, 128, 256)
_TYPE = schema.TensorType
#: Bits of an element by type; text and sequences of tensors are not supported.
_ELEMENT_BITS = {
    _TYPE.FLOAT32: 32,
    _TYPE.FLOAT16: 16,
    _TYPE.BFLOAT16: 16,
    _TYPE.FLOAT64: 64,
    _TYPE.INT2: 2,
    _TYPE.INT4: 4,
    _TYPE.UINT4: 4,
    _TYPE.INT8: 8,
    _TYPE.UINT8: 8,
    _TYPE.INT16: 16,
    _TYPE.UINT16: 16,
    _TYPE.INT32: 32,
    _TYPE.UINT32: 32,
    _TYPE.INT64: 64,
    _TYPE.UINT64: 64,
    _TYPE.BOOL: 8,
    _TYPE.COMPLEX64: 64,
    _TYPE.COMPLEX128: 128,
    _TYPE.RESOURCE: 0,
}
#: Smallest and largest zero point by type.
_ZERO_POINTS = {
    _TYPE.INT8: (-128, 127),
    _TYPE.UINT8: (0, 255),
    _TYPE.INT16: (-32768, 32767),
    _TYPE.INT4: (-8, 7),
    _TYPE.INT2: (-2, 1),
}


def read_flatbuffer(path: Path) -> bytes:
    """Return the content of a file, checked.

    Raises:
        ModelLoadError: the file is missing, too large, or refused by `check_flatbuffer`.
    """
    try:
        require_regular_file(path)
        content = read_bounded(path, MAX_FILE_BYTES)
    except OSError as error:
        raise ModelLoadError(f"{str(path)!r} cannot be read: {one_line(error)}") from error
    check_flatbuffer(content, repr(str(path)))
    return content


def check_flatbuffer(content: bytes, what: str) -> None:
    """Check that LiteRT can open and run a file without ending the process.

    Args:
        content: the file.
        what: description of the file for messages.

    Raises:
        ModelLoadError: the file is damaged, hostile, or contains ops that are not supported.
    """
    try:
        _check_model(content)
    except FlatbufferError as error:
        raise ModelLoadError(
            f"{what} is refused: it must be a whole .tflite file, but {error}; convert or download "
            f"the model again"
        ) from None
    except FileFaultError as error:
        raise ModelLoadError(f"{what} is refused: {error}") from None


def _check_model(content: bytes) -> None:
    if len(content) < 8 or content[4:8] != _IDENTIFIER:
        raise FlatbufferError(f"bytes 4 to 8 are {content[4:8]!r}, not {_IDENTIFIER!r}")
    model = FlatbufferReader(content).read_root()
    require(
        model.get("version") == _VERSION,
        f"its version must be {_VERSION}, got {model.get('version', 0)}; convert the model again",
    )
    require(
        not model.get("externalBuffers") and not model.get("externalBufferGroups"),
        "its weights are in other files; convert the model into one file",
    )
    require(bool(model.get("subgraphs")), "it contains no graph; convert the model again")
    parts = FileParts(
        sizes=_list_buffer_sizes(model.get("buffers", ()), len(content)),
        ops=[_name_op(code) for code in model.get("operatorCodes", ())],
        subgraphs=model["subgraphs"],
    )
    graphs = [FileGraph(parts, number) for number in range(len(parts.subgraphs))]
    total = sum(_check_tensor(g, index) for g in graphs for index in range(len(g.tensors)))
    require(
        total <= MAX_LITERT_TENSOR_BYTES,
        f"its tensors must have at most {MAX_LITERT_TENSOR_BYTES} bytes in all, got {total}; "
        f"convert the model with smaller inputs",
    )
    for graph in graphs:
        for index in range(len(graph.tensors)):
            _check_blocks(graph, index, graph.describe(index))
        _check_ops(graph)
    check_calls(graphs)
    _check_signatures(model.get("signatureDefs", ()), graphs)
    for entry in model.get("metadata", ()):
        buffer = entry.get("buffer", 0)
        require(
            buffer < len(parts.sizes),
            f"metadata {entry.get('name', '')!r} must be in one of {len(parts.sizes)} buffers, got "
            f"{buffer}; convert the model again",
        )


def _list_buffer_sizes(buffers: Iterable[Table], file_bytes: int) -> list[int]:
    """Return the bytes of each buffer, of which the first must be empty."""
    sizes = []
    for number, buffer in enumerate(buffers):
        offset, size = buffer.get("offset", 0), buffer.get("size", 0)
        if offset >= _LEAST_OFFSET:
            require(
                offset + size <= file_bytes,
                f"buffer {number} must end at byte {file_bytes}, got {offset + size}; the file is "
                f"cut off: copy or convert it again",
            )
        else:
            size = buffer["data"].size if "data" in buffer else 0
        sizes.append(size)
    require(bool(sizes) and not sizes[0], "its first buffer must be empty; convert again")
    return sizes


def _name_op(code: Table) -> str:
    """Return the name of an op, which must be supported."""
    number = max(code.get("builtinCode", 0), code.get("deprecatedBuiltinCode", 0))
    name = OP_NAMES.get(number, str(number))
    if number == schema.BuiltinOperator.CUSTOM:
        name = code.get("customCode", "")
        if name.startswith("Flex"):
            raise FileFaultError(
                f"op {name!r} runs inside of TensorFlow only; convert the model with "
                f"TFLITE_BUILTINS alone, or give the Keras model or SavedModel itself"
            )
        raise FileFaultError(
            f"op {name!r} is custom: its code is in another library; convert the model without it"
        )
    require(
        name in OPERANDS,
        f"op {name!r} is not supported; convert the model with TFLITE_BUILTINS alone, and without "
        f"sparse weights and text",
    )
    return name


def _check_tensor(graph: FileGraph, index: int) -> int:
    """Check a tensor, and return its bytes."""
    tensor, name = graph.tensors[index], graph.describe(index)
    sizes, kind = graph.get_sizes(index), graph.get_type(index)
    require(
        kind in _ELEMENT_BITS,
        f"{name} has the type {graph.get_type_name(index)}, which is not supported; convert the "
        f"model without text and sequences of tensors",
    )
    require(
        len(sizes) <= MAX_LITERT_RANK and all(size >= 0 for size in sizes),
        f"{name} must have at most {MAX_LITERT_RANK} sizes of at least 0, got "
        f"{list(sizes[: MAX_LITERT_RANK + 1])}; convert the model again",
    )
    free = tensor.get("shapeSignature", ())
    require(
        not free or (len(free) == len(sizes) and all(size >= -1 for size in free)),
        f"{name} must have one size, or -1, for each of its {len(sizes)} axes; convert again",
    )
    require("sparsity" not in tensor, f"{name} has sparse weights; convert without sparsity")
    require(
        not tensor.get("externalBuffer"),
        f"{name} is in another file; convert the model into one file",
    )
    _check_buffer(graph, index, name)
    if "quantization" in tensor:
        _check_quantization(tensor["quantization"], sizes, kind, name)
    return _count_bytes(graph, index)


def _count_bytes(graph: FileGraph, index: int) -> int:
    bits = _ELEMENT_BITS[graph.get_type(index)]
    return (math.prod(graph.get_sizes(index)) * bits + 7) // 8


def _check_buffer(graph: FileGraph, index: int, name: str) -> None:
    buffer, sizes = graph.tensors[index].get("buffer", 0), graph.parts.sizes
    require(
        buffer < len(sizes),
        f"{name} must be in one of {len(sizes)} buffers, got {buffer}; convert the model again",
    )
    size = _count_bytes(graph, index)
    require(
        sizes[buffer] in (0, size),
        f"{name} must have {size} bytes, got {sizes[buffer]}; convert the model again",
    )


def _check_ops(graph: FileGraph) -> None:
    """Check that each op reads what is there, in this order, and fits its kernel."""
    _check_indices(graph, "inputs", graph.inputs)
    _check_indices(graph, "outputs", graph.outputs)
    fixed = {
        index
        for index, tensor in enumerate(graph.tensors)
        if graph.is_constant(index) or tensor.get("isVariable")
    }
    for index in graph.inputs:
        # The runtime would write into the file's memory.
        require(
            index not in fixed,
            f"{graph.describe(index)} must be an input or a constant, not both; convert the model "
            f"again",
        )
    require(
        len(set(graph.inputs)) == len(graph.inputs),
        f"the inputs of graph {graph.number} must differ; convert the model again",
    )
    computed = fixed | set(graph.inputs)
    for operator in graph.iterate_operators():
        _check_order(operator, computed)
        check_operator(operator)
        computed.update(operator.outputs)
    for index in graph.outputs:
        require(
            index in computed,
            f"{graph.describe(index)} is an output that no op computes; convert the model again",
        )


def _check_indices(graph: FileGraph, side: str, indices: Iterable[int], least: int = 0) -> None:
    for index in indices:
        require(
            least <= index < len(graph.tensors),
            f"{side} of graph {graph.number} must be among {len(graph.tensors)} tensors, got "
            f"{index}; convert the model again",
        )


def _check_order(operator: FileOperator, computed: Collection[int]) -> None:
    """Check that an op reads tensors that are computed, and writes others."""
    graph, code = operator.graph, operator.table.get("opcodeIndex", 0)
    require(
        code < len(graph.parts.ops),
        f"an op must be of one of {len(graph.parts.ops)} types, got {code}; convert again",
    )
    _check_indices(graph, "operands", operator.inputs, ABSENT)
    _check_indices(graph, "results", operator.outputs)
    _check_indices(graph, "intermediates", operator.table.get("intermediates", ()))
    for index in operator.operands:
        require(
            index in computed or 0 in graph.get_sizes(index),
            f"{operator.describe()} reads {graph.describe(index)} before it is computed; convert "
            f"the model again",
        )
    require(
        len(set(operator.outputs)) == len(operator.outputs)
        and not any(index in computed for index in operator.outputs),
        f"{operator.describe()} writes a tensor that has a value before; convert the model again",
    )
    require(
        not operator.table.get("largeCustomOptionsOffset"),
        f"{operator.describe()} has options that only custom ops have; convert the model again",
    )


def _check_quantization(quantization: Table, sizes: Sequence[int], kind: int, name: str) -> None:
    """Check the scales and zero points of a tensor."""
    scales: tuple[float, ...] = quantization.get("scale", ())
    zero_points: tuple[int, ...] = quantization.get("zeroPoint", ())
    for scale in scales:
        # False for NaN, too.
        require(
            _SCALES[0] <= scale <= _SCALES[1],
            f"{name} must have scales from {_SCALES[0]} to {_SCALES[1]}, got {scale}; quantize the "
            f"model again",
        )
    least, largest = _ZERO_POINTS.get(kind, (-(1 << 31), (1 << 31) - 1))
    for zero_point in zero_points:
        require(
            least <= zero_point <= largest,
            f"{name} must have zero points from {least} to {largest}, got {zero_point}; quantize "
            f"the model again",
        )
    require(
        len(zero_points) in (0, 1, len(scales)),
        f"{name} must have one zero point for each of its {len(scales)} scales, got "
        f"{len(zero_points)}; quantize the model again",
    )
    if len(scales) > 1:
        axis = quantization.get("quantizedDimension", 0)
        require(
            0 <= axis < len(sizes) and len(scales) == sizes[axis],
            f"{name} must have one scale for each of its channels, got {len(scales)} for axis "
            f"{axis} of {list(sizes)}; quantize the model again",
        )


def _check_blocks(graph: FileGraph, index: int, name: str) -> None:
    """Check the scales of a matrix whose blocks of inputs share scales."""
    blocks, sizes = graph.get_blocks(index), graph.get_sizes(index)
    if blocks is None:
        return
    size, scales = blocks.get("blockSize", 0), blocks.get("scales", 0)
    require(
        graph.get_type(index) == _TYPE.INT4 and graph.is_constant(index) and len(sizes) == 2,
        f"{name} must be a constant matrix of type INT4 to have blocks; quantize the model again",
    )
    require(
        size in _BLOCK_SIZES and sizes[1] % size == 0,
        f"{name} must have blocks of {', '.join(map(str, _BLOCK_SIZES))} that divide {sizes[1]}, "
        f"got {size}; quantize the model again",
    )
    require(
        0 < scales < len(graph.tensors)
        and graph.get_type(scales) == _TYPE.FLOAT16
        and graph.is_constant(scales)
        and math.prod(graph.get_sizes(scales)) == sizes[0] * (sizes[1] // size)
        and blocks.get("zeroPoints", 0) <= 0,
        f"{name} must have a constant of type FLOAT16 with one scale for each block, and no zero "
        f"points; quantize the model again",
    )


def _check_signatures(signatures: Iterable[Table], graphs: Sequence[FileGraph]) -> None:
    for signature in signatures:
        key, number = signature.get("signatureKey", ""), signature.get("subgraphIndex", 0)
        require(
            number < len(graphs),
            f"signature {key!r} must be of one of {len(graphs)} graphs, got {number}; convert the "
            f"model again",
        )
        for side in ("inputs", "outputs"):
            ends = getattr(graphs[number], side)
            for entry in signature.get(side, ()):
                index = entry.get("tensorIndex", 0)
                require(
                    index in ends,
                    f"signature {key!r} must name tensors among the {side} {list(ends)} of its "
                    f"graph, got {index}; convert the model again",
                )
