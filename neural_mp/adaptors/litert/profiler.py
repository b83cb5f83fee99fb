"""Kernels and times of ops, from LiteRT's own profiler."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from ai_edge_litert import schema_py_generated as schema

from neural_mp.adaptors.common.threads import get_allowed_threads
from neural_mp.adaptors.litert.graph.program import Program
from neural_mp.adaptors.litert.kernel_events import (
    PREPARING_KERNELS,
    TABLE_KERNEL,
    KernelEvent,
    assign_events,
    record_events,
)
from neural_mp.adaptors.litert.model import LiteRtModel
from neural_mp.adaptors.litert.ops import Role, has_role
from neural_mp.core.op_timings import OpTrace, TracedKernel, build_op_trace
from neural_mp.core.precision import Precision

#: Element types of tensors → precision.
_PRECISIONS = {
    schema.TensorType.FLOAT32: Precision.FP32,
    schema.TensorType.FLOAT16: Precision.FP16,
}
_INTEGERS = (schema.TensorType.INT8, schema.TensorType.UINT8, schema.TensorType.INT4)
#: Kernels that multiply 8-bit values, also those that round floats first (QD8).
_INTEGER_KERNEL = re.compile(r"\(N\w+, (QS8|QU8|QC8|QD8|QDU8|QP8|PQS8)\b")
_PRODUCT = Role.LAYER | Role.PRODUCT
#: Roles of ops that no table stands for.
_APART = _PRODUCT | Role.TABLE | Role.MOVING


def time_ops(model: LiteRtModel, inputs: object, runs: int) -> dict[str, list[float]]:
    """Return op → seconds of every run; fused ops count towards the op that they are fused into.

    Times are whole microseconds. Conversions have entries of their own.

    Raises:
        ConversionError: the installed LiteRT has no profiler that can be read.
    """
    ops = list(_iterate_named_ops(model))
    # Ops without a kernel are fused into others.
    seconds = {
        name: [0.0] * runs
        for name, op in ops
        if not has_role(model.program.op_type(op), Role.CONVERSION)
    }
    for run, kernels in enumerate(_record_kernels(model, inputs, runs)):
        for event, owner in kernels:
            seconds.setdefault(ops[owner][0], [0.0] * runs)[run] += event.seconds
    return seconds


def trace_kernels(model: LiteRtModel, inputs: object) -> dict[str, OpTrace]:
    """Return op → its kernels in one run; see `Adaptor.trace_kernels`.

    Raises:
        ConversionError: the installed LiteRT has no profiler that can be read.
    """
    ops, operands = list(_iterate_named_ops(model)), _list_operands(model.program)
    kinds = [model.program.op_type(op) for _, op in ops]
    traces: dict[int, list[TracedKernel]] = {}
    [kernels] = _record_kernels(model, inputs, 1)
    for event, owner in kernels:
        prepares = event.name.startswith(PREPARING_KERNELS) and has_role(kinds[owner], _PRODUCT)
        if not prepares and not has_role(kinds[owner], Role.CONVERSION):
            kernel = _parse_traced_kernel(event, kinds[owner], operands[owner])
            traces.setdefault(owner, []).append(kernel)
    built = {
        owner: build_op_trace(
            kernels,
            rounded_to=Precision.FP16 if operands[owner].restores_halves else None,
            equals_float=not has_role(kinds[owner], _PRODUCT | Role.TABLE)
            or has_role(kinds[owner], Role.MOVING),
        )
        for owner, kernels in traces.items()
    }
    _share_table_kernels([op for _, op in ops], kinds, built)
    return {ops[owner][0]: trace for owner, trace in built.items()}


def _share_table_kernels(
    ops: Sequence[Any], kinds: Sequence[str], traces: dict[int, OpTrace]
) -> None:
    """Give the kernel of a table to all ops of its chain, e.g. to the MUL of a SiLU, in place."""
    inside: dict[int, OpTrace] = {}
    for position, op in enumerate(ops):
        trace = traces.get(position)
        if trace is None and not has_role(kinds[position], _APART):
            shared = (inside[int(index)] for index in op.inputs if int(index) in inside)
            trace = next(shared, None)
            if trace is not None and not has_role(kinds[position], Role.CONVERSION):
                traces[position] = trace
        elif trace is None or not any(kernel.startswith(TABLE_KERNEL) for kernel in trace.kernels):
            trace = None
        if trace is not None:
            inside.update(dict.fromkeys(map(int, op.outputs), trace))


def _iterate_named_ops(model: LiteRtModel) -> Iterator[tuple[str, Any]]:
    """Yield the ops of the graph, each after its name in the unconverted graph."""
    for op in model.program.iterate_ops():
        name = model.program.op_name(op)
        yield model.ops.get(name, name), op


def _record_kernels(
    model: LiteRtModel, inputs: object, runs: int
) -> Iterator[list[tuple[KernelEvent, int]]]:
    """Yield the kernels of every run, each before the position of its op."""
    program = model.program
    bound = model.signature.bind_inputs(inputs)
    names = (program.tensor_name(int(index)) for index in program.main.inputs)
    feeds = [model.make_feed(bound, name) for name in names]
    threads = get_allowed_threads() or os.cpu_count() or 1
    owners: dict[tuple[tuple[str, int], ...], list[int]] = {}
    for events in record_events(program.content, feeds, runs, threads):
        # Runs of the same kernels share an assignment.
        sequence = tuple((event.name, event.position) for event in events)
        if sequence not in owners:
            owners[sequence] = assign_events(program, events)
        yield list(zip(events, owners[sequence], strict=True))


@dataclass(frozen=True)
class _Operands:
    """Operands of an op.

    Attributes:
        precision: the first floating-point type of computed tensors; None if there is none.
        has_integers: whether a computed tensor holds quantized values.
        stores_integers: whether a constant is stored in quantized values.
        restores_floats: whether a conversion restores a constant for the op.
        restores_halves: whether this constant is stored in FP16.
    """

    precision: Precision | None
    has_integers: bool
    stores_integers: bool
    restores_floats: bool
    restores_halves: bool


def _list_operands(program: Program) -> list[_Operands]:
    """Return what the ops of the main subgraph read, in order."""
    ops, tensors = list(program.iterate_ops()), program.main.tensors
    restored = {
        int(op.outputs[0]): int(op.inputs[0])
        for op in ops
        if has_role(program.op_type(op), Role.CONVERSION) and program.is_constant(int(op.inputs[0]))
    }
    operands = []
    for op in ops:
        indices = [restored.get(int(index), int(index)) for index in op.inputs if index >= 0]
        constants = [tensors[index] for index in indices if program.is_constant(index)]
        computed = [tensors[index] for index in indices if not program.is_constant(index)]
        precisions = (_PRECISIONS.get(tensor.type) for tensor in computed)
        operands.append(
            _Operands(
                next(filter(None, precisions), None),
                any(map(_is_quantized, computed)),
                any(map(_is_quantized, constants)),
                any(int(index) in restored for index in op.inputs),
                any(tensor.type == schema.TensorType.FLOAT16 for tensor in constants),
            )
        )
    return operands


def _is_quantized(tensor: Any) -> bool:
    """Whether a tensor holds quantized values of 8 bits or fewer."""
    scales = None if tensor.quantization is None else tensor.quantization.scale
    return tensor.type in _INTEGERS and scales is not None and len(scales) > 0


def _parse_traced_kernel(event: KernelEvent, kind: str, operands: _Operands) -> TracedKernel:
    stores = operands.stores_integers
    if has_role(kind, Role.MOVING | Role.TABLE):
        return TracedKernel(event.name, operands.precision, operands.has_integers or stores)
    # LiteRT's own products of a float tensor by an integer weight round the tensor first.
    rounds = not (event.is_delegated or operands.restores_floats) and has_role(kind, _PRODUCT)
    is_integer = _INTEGER_KERNEL.search(event.name) or event.name.startswith(TABLE_KERNEL)
    if operands.has_integers or (stores and rounds) or is_integer:
        return TracedKernel(event.name, Precision.INT8, True)
    return TracedKernel(event.name, operands.precision, stores)
