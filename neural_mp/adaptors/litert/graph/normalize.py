"""One form for all graphs, which converters write in several ways."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable
from typing import Any

import numpy as np
from ai_edge_litert import schema_py_generated as schema

from neural_mp.adaptors.litert.graph.program import ABSENT

_OP = schema.BuiltinOperator
_ACTIVATION = schema.ActivationFunctionType
_TYPE = schema.TensorType
#: Activation ops with the fused form that computes the same.
_FUSED_FORMS = {
    _OP.RELU: _ACTIVATION.RELU,
    _OP.RELU6: _ACTIVATION.RELU6,
    _OP.RELU_N1_TO_1: _ACTIVATION.RELU_N1_TO_1,
}
#: Ops whose kernels apply an activation; others have the option, but refuse or ignore it.
_ACTIVATED = frozenset(
    {
        _OP.ADD,
        _OP.AVERAGE_POOL_2D,
        _OP.CONV_2D,
        _OP.CONV_3D,
        _OP.DEPTHWISE_CONV_2D,
        _OP.DIV,
        _OP.FULLY_CONNECTED,
        _OP.MAX_POOL_2D,
        _OP.MUL,
        _OP.SUB,
    }
)
_ACTIVATED_TYPES = frozenset({_TYPE.FLOAT32, _TYPE.INT8, _TYPE.UINT8, _TYPE.INT16})


def normalize_tree(tree: Any) -> None:
    """Rewrite the tree of a `Program` (`ModelT`) in place; results stay equal, bit by bit.

    Float16 weights become float32, tensors have unique names, and activations are part of the ops
    before. A second call changes nothing.
    """
    _widen_constants(tree)
    for number, graph in enumerate(tree.subgraphs):
        _name_tensors(graph)
        _fold_activations(tree, graph, _list_ends(tree, number))


def _get_op_code(tree: Any, op: Any) -> int:
    return int(tree.operatorCodes[op.opcodeIndex].builtinCode)


def _list_indices(values: Iterable[int] | None) -> list[int]:
    """Return the tensors in a list of the schema, which may be missing."""
    return [] if values is None else [int(index) for index in values if index != ABSENT]


def _widen_constants(tree: Any) -> None:
    """Replace float16 constants behind DEQUANTIZE by float32 constants."""
    results: dict[int, list[Any]] = {}
    for graph in tree.subgraphs:
        outputs = _list_indices(graph.outputs)
        remaining = []
        for op in graph.operators or ():
            source = _find_half_constant(tree, graph, op)
            if source is None or op.outputs[0] in outputs:
                remaining.append(op)
            else:
                results.setdefault(source, []).append(graph.tensors[op.outputs[0]])
        graph.operators = remaining
    read = _list_read_buffers(tree) if results else set()
    for source, tensors in results.items():
        halves = np.frombuffer(bytes(tree.buffers[source].data), np.float16)
        target = source
        if source in read:
            target = len(tree.buffers)
            tree.buffers.append(schema.BufferT())
        else:
            _detach_tensors(tree, source)
        tree.buffers[target].data = halves.astype(np.float32).view(np.uint8)
        for tensor in tensors:
            tensor.buffer = target


def _find_half_constant(tree: Any, graph: Any, op: Any) -> int | None:
    """Return the buffer of the float16 constant that an op dequantizes; None for other ops."""
    if _get_op_code(tree, op) != _OP.DEQUANTIZE:
        return None
    tensor = graph.tensors[op.inputs[0]]
    data = tree.buffers[tensor.buffer].data
    if tensor.type != _TYPE.FLOAT16 or data is None or not len(data):
        return None
    return int(tensor.buffer)


def _list_read_buffers(tree: Any) -> set[int]:
    """Return the buffers that an op reads, or an output holds."""
    return {
        graph.tensors[index].buffer
        for graph in tree.subgraphs
        for indices in (graph.outputs, *(op.inputs for op in graph.operators))
        for index in _list_indices(indices)
    }


def _detach_tensors(tree: Any, buffer: int) -> None:
    """Let no tensor refer to a buffer; the first one is always empty."""
    for graph in tree.subgraphs:
        for tensor in graph.tensors:
            if tensor.buffer == buffer:
                tensor.buffer = 0


def _name_tensors(graph: Any) -> None:
    """Give every tensor a name of its own; the first of several alike keeps its name."""
    names = {bytes(tensor.name or b"") for tensor in graph.tensors}
    used = {b""}
    for index, tensor in enumerate(graph.tensors):
        name = bytes(tensor.name or b"")
        if name in used:
            name = _find_free_name(name or b"tensor", index, names)
            names.add(name)
        tensor.name = name
        used.add(name)


def _find_free_name(name: bytes, index: int, names: Collection[bytes]) -> bytes:
    candidate = b"%s_%d" % (name, index)
    while candidate in names:
        candidate += b"_"
    return candidate


def _list_ends(tree: Any, number: int) -> set[int]:
    """Return the outputs of a graph, and the tensors that its signatures name."""
    ends = set(_list_indices(tree.subgraphs[number].outputs))
    for signature in tree.signatureDefs:
        if signature.subgraphIndex == number:
            entries = (*(signature.inputs or ()), *(signature.outputs or ()))
            ends.update(entry.tensorIndex for entry in entries)
    return ends


def _fold_activations(tree: Any, graph: Any, ends: Collection[int]) -> None:
    """Make each activation a part of the op before, whose result nothing else reads."""
    readers = Counter(index for op in graph.operators for index in _list_indices(op.inputs))
    producers: dict[int, Any] = {}
    remaining = []
    for op in graph.operators:
        source = _list_indices(op.inputs)[:1]
        producer = producers.get(source[0]) if source else None
        fused = _FUSED_FORMS.get(_get_op_code(tree, op))
        if (
            fused is not None
            and producer is not None
            and readers[source[0]] == 1
            and source[0] not in ends
            and _can_activate(tree, graph, producer, op)
        ):
            producer.builtinOptions.fusedActivationFunction = fused
            producer.outputs = [int(op.outputs[0])]
            op = producer
        else:
            remaining.append(op)
        producers.update({index: op for index in _list_indices(op.outputs)})
    graph.operators = remaining


def _can_activate(tree: Any, graph: Any, producer: Any, op: Any) -> bool:
    """Whether an op can compute an activation of its own result without another rounding."""
    options = producer.builtinOptions
    if _get_op_code(tree, producer) not in _ACTIVATED or options is None:
        return False
    before, behind = graph.tensors[op.inputs[0]], graph.tensors[op.outputs[0]]
    return (
        options.fusedActivationFunction == _ACTIVATION.NONE
        and before.type == behind.type
        and before.type in _ACTIVATED_TYPES
        and _list_scales(before) == _list_scales(behind)
    )


def _list_scales(tensor: Any) -> tuple[list[float], list[int]]:
    """Return the scales and zero points of a tensor; none for floats."""
    quantization = tensor.quantization
    if quantization is None:
        return [], []
    scales, zero_points = quantization.scale, quantization.zeroPoint
    return (
        [] if scales is None else [float(scale) for scale in scales],
        [] if zero_points is None else [int(point) for point in zero_points],
    )
