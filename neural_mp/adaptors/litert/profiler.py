"""Kernels and times of ops, from LiteRT's own profiler."""

from __future__ import annotations

import os
import re
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise, takewhile
from typing import Any

import numpy as np
from ai_edge_litert import schema_py_generated as schema

from neural_mp.adaptors.common.threads import get_allowed_threads
from neural_mp.adaptors.litert.graph.program import Program
from neural_mp.adaptors.litert.model import LiteRtModel
from neural_mp.adaptors.litert.ops import Role, has_role
from neural_mp.adaptors.litert.profiled_run import KernelEvent, load_library, open_profiled_run
from neural_mp.adaptors.litert.runtime import Runner, find_undelegated
from neural_mp.core.op_timings import OpTrace, TracedKernel, build_op_trace
from neural_mp.core.precision import Precision
from neural_mp.util.pytree import Array

#: Op type → beginnings of the names of XNNPACK's kernels (`xnn_operator_type_to_string`), unless
#: these begin like the type, as in `Squared Difference (ND)`.
_KERNEL_NAMES = {
    "CONV_2D": ("Convolution", "Fully Connected"),
    "DEPTHWISE_CONV_2D": ("Convolution",),
    "TRANSPOSE_CONV": ("Deconvolution",),
    "BATCH_MATMUL": ("Batch Matrix Multiply", "Fully Connected", "Dynamic Fully Connected"),
    "FULLY_CONNECTED": ("Fully Connected", "Dynamic Fully Connected"),
    "LOGISTIC": ("Sigmoid",),
    "RELU": ("Clamp",),
    "RELU6": ("Clamp",),
    "RELU_N1_TO_1": ("Clamp",),
    "RELU_0_TO_1": ("Clamp",),
    "HARD_SWISH": ("HardSwish",),
    "LEAKY_RELU": ("LeakyReLU",),
    "GELU": ("GELU", "ApproxGELU"),
    "SQRT": ("Square Root",),
    "RSQRT": ("Reciprocal Square Root",),
    "ROUND": ("Bank",),
    "FLOOR_MOD": ("Modulus",),
    "QUANTIZE": ("Convert",),
    "DEQUANTIZE": ("Convert",),
    "MAX_POOL_2D": ("Max Pooling",),
    "AVERAGE_POOL_2D": ("Average Pooling",),
    "PAD": ("Constant Pad",),
    "PADV2": ("Constant Pad",),
    "STRIDED_SLICE": ("Slice",),
    "SPLIT": ("Copy", "Slice"),
    "CONCATENATION": ("Copy",),
    "PACK": ("Copy",),
    "UNPACK": ("Copy",),
    "RESHAPE": ("Static Reshape", "Copy"),
    "SQUEEZE": ("Static Reshape", "Copy"),
    "EXPAND_DIMS": ("Static Expand Dims", "Static Reshape", "Copy"),
}
#: Kernel of a table of 256 values, for a chain of ops in INT8 such as SiLU.
TABLE_KERNEL = "Invalid Unary"
#: Op type that counts towards another op of such a chain, and roles that end a chain.
_ACCOMPANYING = "MUL"
_APART = Role.LAYER | Role.PRODUCT | Role.TABLE | Role.MOVING
_MAX_CHAIN = 6
#: Kernels that prepare the inputs of a product.
PREPARING_KERNELS = ("Static Reshape", "Convert")
#: Kernels that never stand for an op of an unknown type.
_AUXILIARY = (*PREPARING_KERNELS, "Copy")
#: Event around those of a delegate's kernels.
_AROUND = "Delegate"
#: Scores of an op with its kernel, of a chain besides its length, and of a chain of one op.
_MATCH, _CHAIN, _SINGLE = 3, 2, 1
#: Ops or kernels that an alignment may leave out beyond the difference of their numbers.
_SLACK = 24


@dataclass(frozen=True)
class _Op:
    kind: str
    reads: frozenset[int]
    writes: frozenset[int]


def is_available() -> bool:
    """Whether the installed LiteRT has a profiler that can be read."""
    return load_library() is not None


def record_events(
    content: bytes, feeds: Sequence[Array], runs: int, threads: int
) -> list[list[KernelEvent]]:
    """Return the kernels of the main subgraph in every run, in order, after a first run.

    Times are whole microseconds: those of small ops mean something over many runs only. Loops are
    single kernels, whose time includes their bodies.

    Args:
        content: the flatbuffer, which is checked.
        feeds: the inputs of the main subgraph, in order.
        runs: number of recorded runs.
        threads: number of threads.

    Raises:
        ConversionError: there is no profiler, or LiteRT rejects the model or the inputs.
    """
    program = _without_own_outputs(Program.parse(content), find_undelegated(content))
    arrays = [np.ascontiguousarray(feed) for feed in feeds]
    main = program.main
    # Some sizes of results follow from a run only.
    results = Runner(program.content, list(main.inputs), list(main.outputs))(arrays)
    with open_profiled_run(program.content, arrays, results, threads) as run:
        run()
        return [
            [event for event in run() if not event.name.startswith(_AROUND)] for _ in range(runs)
        ]


def _without_own_outputs(program: Program, own: Collection[int]) -> Program:
    """Return a program without the outputs that LiteRT's own kernels write.

    The C library runs a model once only if the size of such an output is free. All own kernels run
    in any case, but those of a delegate for outputs only.
    """
    written = {int(index) for op in own for index in program.main.operators[op].outputs}
    kept = [int(index) for index in program.main.outputs if int(index) not in written]
    if len(kept) == len(program.main.outputs):
        return program
    reduced = program.copy()
    reduced.main.outputs = np.array(kept, np.int32)
    for signature in reduced.tree.signatureDefs or ():
        if not signature.subgraphIndex:
            signature.outputs = [
                output for output in signature.outputs if output.tensorIndex not in written
            ]
    return reduced


def assign_events(program: Program, events: Sequence[KernelEvent]) -> list[int]:
    """Return, for every kernel of a run, the position of its op in the main subgraph.

    The kernel of several ops belongs to the first that computes. A kernel of unknown name belongs
    to the next op without a kernel, else to the op before.
    """
    ops = [
        _Op(program.op_type(op), _collect_tensors(op.inputs), _collect_tensors(op.outputs))
        for op in program.iterate_ops()
    ]
    groups = list(_group_events(events))
    parts = list(_iterate_parts(ops, {e.position for e in events if not e.is_delegated}))
    delegated = [group for group in groups if group[0].is_delegated]
    has_own_ops = all(
        event.is_delegated
        or (event.position < len(ops) and ops[event.position].kind == event.op_type)
        for event in events
    )
    if len(parts) != len(delegated) or not has_own_ops:
        # The runtime rewrote the graph: the order is all that is left.
        return _align_kernels(ops, range(len(ops)), events)
    waiting, owners = iter(parts), list[int]()
    for group in groups:
        if group[0].is_delegated:
            owners += _align_kernels(ops, next(waiting), group)
        else:
            owners += [event.position for event in group]
    return owners


def _collect_tensors(indices: Any) -> frozenset[int]:
    return frozenset(int(index) for index in (() if indices is None else indices) if index >= 0)


def _group_events(events: Sequence[KernelEvent]) -> Iterator[list[KernelEvent]]:
    """Yield the kernels of every part that a delegate runs, and single ops between."""
    group: list[KernelEvent] = []
    for event in events:
        if group and not (event.is_delegated and event.position):
            yield group
            group = []
        group.append(event)
    if group:
        yield group


def _iterate_parts(ops: Sequence[_Op], own: Collection[int]) -> Iterator[list[int]]:
    """Yield the ops of every part that a delegate runs; `own` are those of LiteRT itself.

    Like the runtime (`PartitionGraphIntoIndependentNodeSubsets`): a part has all ops of one side
    that need nothing from the other, also those that follow an op of the other side.
    """
    waiting = list(range(len(ops)))
    written = {tensor for op in ops for tensor in op.writes}
    computed = set[int]()
    while waiting:
        part: list[int] = []
        for index in waiting:
            is_ready = ops[index].reads & written <= computed
            if is_ready and (not part or (index in own) == (part[0] in own)):
                part.append(index)
                computed |= ops[index].writes
        if not part:  # ops that need their own results
            return
        if part[0] not in own:
            yield part
        members = set(part)
        waiting = [index for index in waiting if index not in members]


def _align_kernels(
    ops: Sequence[_Op], part: Sequence[int], events: Sequence[KernelEvent]
) -> list[int]:
    """Return the op of every kernel, for ops and kernels in the same order."""
    members = [ops[index] for index in part]
    owners: list[int | None] = []
    joined = set[int]()
    op, best = 0, _find_best_moves(members, events)
    while len(owners) < len(events):
        move = best[op, len(owners)]
        if move.takes_kernel:
            owners.append(move.owner)
        if move.owner is not None:
            joined.update(range(op, op + move.ops))
        op += move.ops
    return [part[owner] for owner in _assign_others(members, events, owners, joined)]


@dataclass(frozen=True)
class _Move:
    """A step of an alignment.

    Attributes:
        ops: number of ops passed.
        takes_kernel: whether a kernel is passed.
        owner: the kernel's op; None if one of both is left out.
        score: the score of this step and all after.
    """

    ops: int
    takes_kernel: bool
    owner: int | None
    score: int


def _find_best_moves(
    ops: Sequence[_Op], events: Sequence[KernelEvent]
) -> dict[tuple[int, int], _Move]:
    """Return number of ops and of kernels passed → the best next step."""
    surplus = len(events) - len(ops)
    lowest, highest = min(0, surplus) - _SLACK, max(0, surplus) + _SLACK
    best: dict[tuple[int, int], _Move] = {}
    for op in reversed(range(len(ops) + 1)):
        last = min(len(events), op + highest)
        for kernel in reversed(range(max(0, op + lowest), last + 1)):
            moves = [
                _Move(passed, takes, owner, score + after.score)
                for passed, takes, owner, score in _iterate_steps(ops, op, events, kernel)
                if (after := best.get((op + passed, kernel + takes))) is not None
            ]
            end = _Move(0, False, None, 0)
            best[op, kernel] = max(moves, key=lambda move: move.score, default=end)
    return best


def _iterate_steps(
    ops: Sequence[_Op], op: int, events: Sequence[KernelEvent], kernel: int
) -> Iterator[tuple[int, bool, int | None, int]]:
    """Yield the ops passed, whether a kernel is passed, its op, and the score; likelier first."""
    if op < len(ops) and kernel < len(events):
        event = events[kernel]
        if _fits_kernel(ops[op], event):
            yield 1, True, op, _MATCH
        if event.name.startswith(TABLE_KERNEL):
            for length in reversed(range(1, _measure_chain(ops, op) + 1)):
                chain = range(op, op + length)
                own = (
                    index
                    for index in chain
                    if ops[index].kind != _ACCOMPANYING
                    and not has_role(ops[index].kind, Role.CONVERSION)
                )
                score = _CHAIN + length if length > 1 else _SINGLE
                yield length, True, next(own, op), score
    if op < len(ops):
        yield 1, False, None, 0
    if kernel < len(events):
        yield 0, True, None, 0


def _fits_kernel(op: _Op, event: KernelEvent) -> bool:
    """Whether the name of a kernel fits an op."""
    if not event.is_delegated:
        return op.kind == event.op_type
    names = _KERNEL_NAMES.get(op.kind)
    if names is None:
        return event.name.lower().startswith(op.kind.replace("_", " ").lower())
    return event.name.startswith(names)


def _measure_chain(ops: Sequence[_Op], start: int) -> int:
    """Return the number of ops from `start` on that one table may stand for."""
    several = ops[start : start + _MAX_CHAIN]
    chain = list(takewhile(lambda op: not has_role(op.kind, _APART), several))
    for length, (before, after) in enumerate(pairwise(chain), 1):
        if not before.writes & after.reads:
            return length
    return len(chain)


def _assign_others(
    ops: Sequence[_Op],
    events: Sequence[KernelEvent],
    owners: Sequence[int | None],
    joined: Collection[int],
) -> Iterator[int]:
    """Yield the op of every kernel, also of those that fit none."""
    previous = -1
    waiting = [index for index in range(len(ops)) if index not in joined]
    for position, (event, owner) in enumerate(zip(events, owners, strict=True)):
        if owner is None:
            later = (index for index in owners[position:] if index is not None)
            following = next(later, len(ops))
            skipped = [index for index in waiting if previous < index < following]
            is_before_product = following < len(ops) and has_role(
                ops[following].kind, Role.LAYER | Role.PRODUCT
            )
            if is_before_product and event.name.startswith(PREPARING_KERNELS):
                owner = following
            elif skipped and not event.name.startswith(_AUXILIARY):
                owner = skipped[0]
                waiting.remove(owner)
            else:
                owner = previous if previous >= 0 else min(following, len(ops) - 1)
        previous = owner
        yield owner


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
