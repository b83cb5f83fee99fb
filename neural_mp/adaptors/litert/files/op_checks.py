"""Checks of ops in untrusted files that kernels of LiteRT rely on, but do not make themselves."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from ai_edge_litert import schema_py_generated as schema

from neural_mp.adaptors.litert.files.file_graph import (
    TYPE_NAMES,
    FileGraph,
    FileOperator,
    require,
)
from neural_mp.adaptors.litert.files.op_operands import (
    COMPARISONS,
    MOVING,
    OPERANDS,
    SAME_TYPES,
    TYPES_OF_FIRST,
)
from neural_mp.adaptors.litert.graph.program import ABSENT

_TYPE = schema.TensorType
_INTEGERS = frozenset({_TYPE.INT8, _TYPE.UINT8, _TYPE.INT16, _TYPE.INT4, _TYPE.INT2})
#: Ops and their operands that may have scales of blocks.
_READS_BLOCKS = frozenset({("FULLY_CONNECTED", 1), ("EMBEDDING_LOOKUP", 1)})
#: Ops with a number of results in their options.
_RESULT_COUNTS = {"SPLIT": "numSplits", "SPLIT_V": "numSplits", "UNPACK": "num"}
_WINDOW = ("strideW", "strideH")
_DILATED = (*_WINDOW, "dilationWFactor", "dilationHFactor")
_VOLUME = (*_DILATED, "strideD", "dilationDFactor")
_POOL = ("Pool2DOptions", (*_WINDOW, "filterWidth", "filterHeight"))
#: Op → type of its options, and those that must be at least 1, as kernels divide by them.
_POSITIVE: Mapping[str, tuple[str, tuple[str, ...]]] = {
    "CONV_2D": ("Conv2DOptions", _DILATED),
    "DEPTHWISE_CONV_2D": ("DepthwiseConv2DOptions", _DILATED),
    "TRANSPOSE_CONV": ("TransposeConvOptions", _WINDOW),
    "CONV_3D": ("Conv3DOptions", _VOLUME),
    "CONV_3D_TRANSPOSE": ("Conv3DOptions", _VOLUME),
    "AVERAGE_POOL_2D": _POOL,
    "MAX_POOL_2D": _POOL,
    "L2_POOL_2D": _POOL,
    "DEPTH_TO_SPACE": ("DepthToSpaceOptions", ("blockSize",)),
    "SPACE_TO_DEPTH": ("SpaceToDepthOptions", ("blockSize",)),
}
#: Op → options with the numbers of the graphs that are called.
_CALLS: Mapping[str, tuple[str, ...]] = {
    "IF": ("thenSubgraphIndex", "elseSubgraphIndex"),
    "WHILE": ("condSubgraphIndex", "bodySubgraphIndex"),
    "CALL_ONCE": ("initSubgraphIndex",),
    "STABLEHLO_COMPOSITE": ("decompositionSubgraphIndex",),
}
#: Op → type of its results, which its kernel sets whatever the file says.
_RESULT_TYPES: Mapping[str, int] = {
    **dict.fromkeys(COMPARISONS, _TYPE.BOOL),
    "DEQUANTIZE": _TYPE.FLOAT32,
    "RANK": _TYPE.INT32,
    "WHERE": _TYPE.INT64,
}
_LARGEST_OPTION = 1 << 16


def check_operator(operator: FileOperator) -> None:
    """Check the operands, results and options of an op, whose tensors exist.

    Raises:
        FileFaultError: a kernel would read or write outside of its tensors.
    """
    name = operator.describe()
    _check_counts(operator, name)
    _check_types(operator, name)
    _check_scales(operator, name)
    _check_options(operator, name)


def _check_counts(operator: FileOperator, name: str) -> None:
    operands, inputs, outputs = OPERANDS[operator.name], operator.inputs, operator.outputs
    require(
        operands.required <= len(inputs) <= operands.most and len(outputs) >= operands.results,
        f"{name} must have {operands.required} operands and {operands.results} results, got "
        f"{len(inputs)} and {len(outputs)}; convert the model again",
    )
    for position, index in enumerate(inputs):
        require(
            index != ABSENT or position in operands.optional,
            f"{name} lacks operand {position}; convert the model again",
        )
    key = _RESULT_COUNTS.get(operator.name)
    if key is not None:
        count = operator.options.get(key, 0)
        require(
            count == len(outputs),
            f"{name} must have {count} results, got {len(outputs)}; convert the model again",
        )


def _check_types(operator: FileOperator, name: str) -> None:
    """Check that operands and results are of one type where the kernel takes that for granted."""
    graph = operator.graph
    result = _RESULT_TYPES.get(operator.name)
    for index in operator.outputs:
        require(
            result is None or graph.get_type(index) == result,
            f"{name} must have a result of type {TYPE_NAMES.get(result or 0)}, got "
            f"{graph.get_type_name(index)}; convert the model again",
        )
    if operator.name in SAME_TYPES:
        alike = [*operator.operands, *operator.outputs]
    elif operator.name in TYPES_OF_FIRST:
        alike = [operator.inputs[0], *operator.outputs]
    else:
        return
    types = {graph.get_type_name(index) for index in alike}
    require(
        len(types) == 1,
        f"{name} must read and write one type, got {' and '.join(sorted(types))}; convert the "
        f"model again",
    )


def _check_scales(operator: FileOperator, name: str) -> None:
    """Check that integers that an op computes with have scales, of blocks if it reads these."""
    graph = operator.graph
    for position, index in enumerate(operator.inputs):
        require(
            index == ABSENT
            or graph.get_blocks(index) is None
            or (operator.name, position) in _READS_BLOCKS,
            f"{name} cannot read {graph.describe(index)} in blocks; quantize the model again",
        )
    if operator.name in MOVING:
        return
    for index in (*operator.operands, *operator.outputs):
        require(
            graph.get_type(index) not in _INTEGERS
            or graph.tensors[index].get("quantization", {}).get("scale")
            or graph.get_blocks(index) is not None,
            f"{name} computes with {graph.describe(index)}, whose type "
            f"{graph.get_type_name(index)} requires a scale; quantize the model again",
        )


def _check_options(operator: FileOperator, name: str) -> None:
    options = operator.options
    if operator.name in _POSITIVE:
        kind, keys = _POSITIVE[operator.name]
        require(
            operator.table.get("builtinOptionsType", 0) == getattr(schema.BuiltinOptions, kind),
            f"{name} lacks its {kind}; convert the model again",
        )
        for key in keys:
            value = options.get(key, 1 if key.startswith("dilation") else 0)
            require(
                1 <= value <= _LARGEST_OPTION,
                f"{name} must have {key} from 1 to {_LARGEST_OPTION}, got {value}; convert again",
            )
    if operator.name == "LOCAL_RESPONSE_NORMALIZATION":
        radius = options.get("radius", 0)
        require(
            0 <= radius <= _LARGEST_OPTION,
            f"{name} must have a radius from 0 to {_LARGEST_OPTION}, got {radius}; convert again",
        )
    if operator.name == "STRIDED_SLICE":
        require(
            not (options.get("offset") and options.get("shrinkAxisMask")),
            f"{name} must count its ends from 0 where it removes axes; convert the model again",
        )


def check_calls(graphs: Sequence[FileGraph]) -> None:
    """Check that graphs call others with the tensors that these take, and never themselves.

    Raises:
        FileFaultError: a call does not fit, or graphs call each other in a circle.
    """
    called = [[n for op in g.iterate_operators() for n in _check_call(op, graphs)] for g in graphs]
    callers = [0] * len(graphs)
    for numbers in called:
        for number in numbers:
            callers[number] += 1
    waiting = [number for number, count in enumerate(callers) if not count]
    ordered = 0
    while waiting:
        ordered += 1
        for number in called[waiting.pop()]:
            callers[number] -= 1
            if not callers[number]:
                waiting.append(number)
    require(
        ordered == len(graphs) and not any(0 in numbers for numbers in called),
        "its graphs call each other in a circle, which has no end; convert the model again",
    )


def _check_call(operator: FileOperator, graphs: Sequence[FileGraph]) -> list[int]:
    """Check a call of other graphs, and return their numbers; none for other ops."""
    if operator.name not in _CALLS:
        return []
    name, graph = operator.describe(), operator.graph
    numbers = [operator.options.get(key, 0) for key in _CALLS[operator.name]]
    for number in numbers:
        require(
            0 < number < len(graphs),
            f"{name} must call one of {len(graphs)} graphs, got {number}; convert again",
        )
    operands = _list_types(graph, operator.inputs)
    results = _list_types(graph, operator.outputs)
    if operator.name == "IF":
        operands = operands[1:]
        require(
            _is_flag(graph, operator.inputs[0]),
            f"{name} must have a boolean as condition; convert the model again",
        )
    for position, number in enumerate(numbers):
        callee = graphs[number]
        is_condition = operator.name == "WHILE" and position == 0
        fits = _list_types(callee, callee.inputs) == operands
        if is_condition:
            fits = fits and len(callee.outputs) == 1 and _is_flag(callee, callee.outputs[0])
        else:
            fits = fits and _list_types(callee, callee.outputs) == results
        require(
            fits, f"{name} calls graph {number} with other tensors than that has; convert again"
        )
    require(
        operator.name != "WHILE" or operands == results,
        f"{name} must return the types that it takes; convert the model again",
    )
    return numbers


def _list_types(graph: FileGraph, indices: Sequence[int]) -> list[int]:
    return [ABSENT if index == ABSENT else graph.get_type(index) for index in indices]


def _is_flag(graph: FileGraph, index: int) -> bool:
    return graph.get_type(index) == _TYPE.BOOL and math.prod(graph.get_sizes(index)) == 1
