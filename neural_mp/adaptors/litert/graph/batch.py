"""Batch sizes of graphs: files mostly fix them to one sample, although the runtime resizes."""

from __future__ import annotations

from typing import Any

import numpy as np
from ai_edge_litert import schema_py_generated as schema

from neural_mp.adaptors.litert.graph.program import Program, get_numpy_dtype, get_sizes
from neural_mp.adaptors.litert.runtime import Runner
from neural_mp.errors import ConversionError
from neural_mp.util.pytree import Array


def free_batch(program: Program) -> Program | None:
    """Return a graph for one sample as a graph for any number; None if the graph fixes others.

    Constant sizes of reshapes lose their batch size. Samples of a batch must have the results that
    they have alone, bit for bit.
    """
    inputs = [program.main.tensors[index] for index in program.main.inputs]
    shapes = [get_sizes(tensor) for tensor in inputs]
    is_free = any(-1 in (tensor.shapeSignature or ()) for tensor in inputs)
    if is_free or not shapes or not all(shape and shape[0] == 1 for shape in shapes):
        return None
    freed = program.copy()
    for op in freed.iterate_ops():
        if freed.op_type(op) == "RESHAPE":
            _free_reshape(freed, op)
    return freed if _runs_for_two(freed, inputs) else None


def _free_reshape(program: Program, op: Any) -> None:
    """Leave the first size of a reshape to the runtime, if it is that of one sample."""
    tensors = program.main.tensors
    source, result = tensors[op.inputs[0]], tensors[op.outputs[0]]
    sizes = get_sizes(result)
    if len(op.inputs) < 2 or sizes[:1] != (1,) or get_sizes(source)[:1] != (1,):
        return
    constant = program.get_constant(int(op.inputs[1]))
    if constant is None or -1 in constant:
        return
    # Other ops may read the constant.
    buffer, tensor = schema.BufferT(), schema.TensorT()
    buffer.data = np.frombuffer(np.array([-1, *sizes[1:]], np.int32).tobytes(), np.uint8)
    program.tree.buffers.append(buffer)
    tensor.name, tensor.type = bytes(result.name) + b"/sizes", schema.TensorType.INT32
    tensor.shape, tensor.buffer = [len(sizes)], len(program.tree.buffers) - 1
    tensors.append(tensor)
    op.inputs = [op.inputs[0], len(tensors) - 1]
    if op.builtinOptions is not None:
        op.builtinOptions.newShape = [-1, *sizes[1:]]


def _runs_for_two(program: Program, inputs: list[Any]) -> bool:
    """Whether two samples have the results that they have one by one."""
    indices, fetched = (
        list(map(int, ends)) for ends in (program.main.inputs, program.main.outputs)
    )
    runner = Runner(program.content, indices, fetched)
    draw = np.random.default_rng(0)
    samples = [[_draw_values(draw, tensor) for tensor in inputs] for _ in range(2)]
    try:
        singles = [runner(sample) for sample in samples]
        batch = runner([np.concatenate(pair) for pair in zip(*samples, strict=True)])
    except ConversionError:
        return False
    return all(
        result.ndim and np.array_equal(result, np.concatenate(parts))
        for result, *parts in zip(batch, *singles, strict=True)
    )


def _draw_values(draw: np.random.Generator, tensor: Any) -> Array:
    dtype, sizes = get_numpy_dtype(tensor), get_sizes(tensor)
    if dtype is not None and dtype.kind == "f":
        return draw.random(sizes).astype(dtype)
    return np.zeros(sizes, dtype)
