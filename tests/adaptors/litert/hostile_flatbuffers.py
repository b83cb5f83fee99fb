"""Damaged `.tflite` files, and processes that run them."""

from __future__ import annotations

import random
import struct
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from ai_edge_litert import schema_py_generated as schema
from small_flatbuffers import pack, parse

INTEGERS = (-(1 << 31), -2, -1, 0, 1, 2, 7, 100_000, (1 << 31) - 1)
#: Files that a process runs, until one ends it.
A_PROCESS = 40
#: Own seconds of a file: loops without an end are no crash.
SECONDS = 5
CHILD = f"""
import resource, signal, sys
resource.setrlimit(resource.RLIMIT_AS, (6 << 30, 6 << 30))
resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
import numpy as np
from ai_edge_litert.interpreter import Interpreter
for path in sys.argv[1:]:
    print("START", path, flush=True)
    signal.setitimer(signal.ITIMER_VIRTUAL, {SECONDS})
    try:
        runtime = Interpreter(model_path=path, num_threads=1)
        runtime.allocate_tensors()
        for x in runtime.get_input_details():
            runtime.set_tensor(x["index"], np.ones(x["shape"], x["dtype"]))
        for _ in range(2):
            runtime.invoke()
        for x in runtime.get_output_details():
            runtime.get_tensor(x["index"])
        del runtime
        print("RAN", flush=True)
    except Exception as error:
        print("ERROR", str(error).replace("\\n", " ")[:200], flush=True)
"""


def run_in_children(files: Sequence[Path]) -> dict[Path, str]:
    """The end of each file: RAN, ERROR and words, or CRASH and the number of a signal."""
    outcomes: dict[Path, str] = {}
    while rest := [file for file in files if file not in outcomes]:
        command = [sys.executable, "-c", CHILD, *map(str, rest[:A_PROCESS])]
        done = subprocess.run(command, capture_output=True, text=True, errors="replace")
        current = None
        for line in done.stdout.splitlines():
            if line.startswith("START "):
                current = Path(line.removeprefix("START "))
            elif current and line.startswith(("RAN", "ERROR")):
                outcomes[current], current = line, None
        if current:
            # 26: the clock of the child.
            kind = "HANGS" if done.returncode == -26 else f"CRASH {done.returncode}"
            outcomes[current] = kind
        elif not done.stdout:
            raise RuntimeError(done.stderr[-2000:])
    return outcomes


def damage_bytes(content: bytes, drawn: random.Random) -> bytes:
    """Change some bytes, mostly of the tables; or cut the file off."""
    changed = bytearray(content)
    if drawn.random() < 0.1:
        return content[: drawn.randrange(8, len(content))]
    for _ in range(drawn.choice((1, 1, 2, 4))):
        position = drawn.randrange(len(changed) - 8) & ~3
        kind = drawn.randrange(4)
        if kind == 0:
            changed[position + drawn.randrange(4)] ^= 1 << drawn.randrange(8)
        elif kind == 1:
            changed[position : position + 4] = drawn.randbytes(4)
        else:
            value = drawn.choice(INTEGERS)
            changed[position : position + 4] = value.to_bytes(4, "little", signed=True)
    return bytes(changed)


def _any_tensor(graph: Any, drawn: random.Random) -> int:
    return drawn.choice((-1, drawn.randrange(len(graph.tensors)), len(graph.tensors), 1 << 30, -5))


def _change_operand(tree: Any, graph: Any, drawn: random.Random) -> None:
    op = drawn.choice([op for op in graph.operators if len(op.inputs)])
    op.inputs = list(op.inputs)
    alike = drawn.randrange(len(graph.tensors))
    op.inputs[drawn.randrange(len(op.inputs))] = drawn.choice((_any_tensor(graph, drawn), alike))


def _drop_operand(tree: Any, graph: Any, drawn: random.Random) -> None:
    op = drawn.choice([op for op in graph.operators if len(op.inputs)])
    op.inputs = list(op.inputs)
    if drawn.random() < 0.5:
        op.inputs.pop(drawn.randrange(len(op.inputs)))
    else:
        op.inputs.append(drawn.randrange(len(graph.tensors)))


def _change_result(tree: Any, graph: Any, drawn: random.Random) -> None:
    op = drawn.choice([op for op in graph.operators if len(op.outputs)])
    op.outputs = list(op.outputs)
    position, kind = drawn.randrange(len(op.outputs)), drawn.randrange(3)
    if kind == 0:
        op.outputs[position] = _any_tensor(graph, drawn)
    elif kind == 1:
        op.outputs.pop(position)
    else:
        graph.tensors.append(schema.TensorT())
        graph.tensors[-1].shape, graph.tensors[-1].name = [1], b"more"
        op.outputs.append(len(graph.tensors) - 1)


def _change_shape(tree: Any, graph: Any, drawn: random.Random) -> None:
    tensor = drawn.choice(graph.tensors)
    sizes = [] if tensor.shape is None else [int(size) for size in tensor.shape]
    kind = drawn.randrange(4)
    if kind == 0 or not sizes:
        sizes.append(drawn.choice((1, 2, 3)))
    elif kind == 1:
        sizes.pop(drawn.randrange(len(sizes)))
    elif kind == 2:
        drawn.shuffle(sizes)
    else:
        sizes[drawn.randrange(len(sizes))] = drawn.choice(INTEGERS)
    tensor.shape, tensor.shapeSignature = sizes, None


def _change_type(tree: Any, graph: Any, drawn: random.Random) -> None:
    tensor = drawn.choice(graph.tensors)
    alike = {0: (2, 15), 2: (0, 15), 4: (10, 12, 8), 9: (3, 6), 1: (7, 16, 18)}
    tensor.type = drawn.choice((drawn.randrange(23), *alike.get(tensor.type, ())))


def _change_buffer(tree: Any, graph: Any, drawn: random.Random) -> None:
    buffers = len(tree.buffers)
    tensor = drawn.choice(graph.tensors)
    tensor.buffer = drawn.choice((0, drawn.randrange(buffers), buffers + 3, 1 << 20))


def _change_option(tree: Any, graph: Any, drawn: random.Random) -> None:
    op = drawn.choice(
        [op for op in graph.operators if op.builtinOptions and vars(op.builtinOptions)]
    )
    options = op.builtinOptions
    name = drawn.choice(list(vars(options)))
    value = getattr(options, name)
    if isinstance(value, bool):
        setattr(options, name, not value)
    elif isinstance(value, int):
        is_byte = (
            "ctivation" in name or "ype" in name or name in ("padding", "weightsFormat", "mode")
        )
        setattr(options, name, drawn.choice((0, 1, 2, 3, 5, 9, 100) if is_byte else INTEGERS))
    elif isinstance(value, float):
        setattr(options, name, drawn.choice((0.0, -1.0, float("nan"), float("inf"), 1e30)))
    elif isinstance(value, list) and value:
        value[drawn.randrange(len(value))] = drawn.choice(INTEGERS)
    else:
        op.builtinOptions, op.builtinOptionsType = None, 0


def _drop_options(tree: Any, graph: Any, drawn: random.Random) -> None:
    op = drawn.choice(graph.operators)
    if drawn.random() < 0.5:
        op.builtinOptions, op.builtinOptionsType = None, 0
    else:
        second = drawn.choice(graph.operators)
        op.builtinOptions = second.builtinOptions
        op.builtinOptionsType = second.builtinOptionsType


def _change_constant(tree: Any, graph: Any, drawn: random.Random) -> None:
    widths = {schema.TensorType.INT32: np.int32, schema.TensorType.INT64: np.int64}
    tensor = drawn.choice([t for t in graph.tensors if t.type in widths and _has_data(tree, t)])
    values = np.frombuffer(bytes(tree.buffers[tensor.buffer].data), widths[tensor.type]).copy()
    values[drawn.randrange(len(values))] = drawn.choice(INTEGERS)
    tree.buffers[tensor.buffer].data = values.view(np.uint8)


def _has_data(tree: Any, tensor: Any) -> bool:
    data = tree.buffers[tensor.buffer].data
    return data is not None and len(data) > 0


def _change_op(tree: Any, graph: Any, drawn: random.Random) -> None:
    code = drawn.choice(tree.operatorCodes)
    used = drawn.randrange(210)
    code.builtinCode, code.deprecatedBuiltinCode = used, min(used, 127)
    if drawn.random() < 0.5:
        code.version = drawn.choice((0, 1, 2, 3, 5, 99))


def _swap_ops(tree: Any, graph: Any, drawn: random.Random) -> None:
    op = drawn.choice(graph.operators)
    op.opcodeIndex = drawn.randrange(len(tree.operatorCodes) + (drawn.random() < 0.1))


def _change_order(tree: Any, graph: Any, drawn: random.Random) -> None:
    graph.operators = list(graph.operators)
    drawn.shuffle(graph.operators)


def _change_ends(tree: Any, graph: Any, drawn: random.Random) -> None:
    side = drawn.choice(("inputs", "outputs"))
    ends = list(getattr(graph, side))
    if ends and drawn.random() < 0.7:
        ends[drawn.randrange(len(ends))] = _any_tensor(graph, drawn)
    elif ends and drawn.random() < 0.5:
        ends.pop()
    else:
        ends.append(drawn.randrange(len(graph.tensors)))
    setattr(graph, side, ends)


def _change_quantization(tree: Any, graph: Any, drawn: random.Random) -> None:
    quantized = [t for t in graph.tensors if t.quantization and t.quantization.scale is not None]
    tensor = drawn.choice(quantized or graph.tensors)
    if drawn.random() < 0.3:
        tensor.quantization = None
        return
    values = tensor.quantization or schema.QuantizationParametersT()
    tensor.quantization = values
    kind = drawn.randrange(3)
    scales = ([0.0], [float("nan")], [1e30], [1e-38], [-1.0], [0.1] * 3, [float("inf")])
    if kind == 0:
        values.scale = np.array(drawn.choice(scales), np.float32)
    if kind == 1:
        points = drawn.choice(([0], [300], [0] * 3, [-(1 << 60)], [1]))
        values.zeroPoint = np.array(points, np.int64)
    if kind == 2:
        values.quantizedDimension = drawn.choice((0, 1, 3, 9, -1))
    if drawn.random() < 0.1:
        values.detailsType = schema.QuantizationDetails.BlockwiseQuantization
        values.details = schema.BlockwiseQuantizationT()
        values.details.scales = drawn.choice(INTEGERS)
        values.details.blockSize = drawn.choice(INTEGERS)


def _make_cycle(tree: Any, graph: Any, drawn: random.Random) -> None:
    op = drawn.choice([op for op in graph.operators if len(op.inputs) and len(op.outputs)])
    op.inputs = [op.outputs[0], *list(op.inputs)[1:]]


def _change_call(tree: Any, graph: Any, drawn: random.Random) -> None:
    calls = [
        (op.builtinOptions, name)
        for graph in tree.subgraphs
        for op in graph.operators
        if op.builtinOptions
        for name in vars(op.builtinOptions)
        if name.endswith("SubgraphIndex")
    ]
    options, name = drawn.choice(calls)
    setattr(options, name, drawn.choice((0, 1, 2, -1, 99)))


def _change_signature(tree: Any, graph: Any, drawn: random.Random) -> None:
    signature = drawn.choice(tree.signatureDefs)
    ends = drawn.choice([signature.inputs, signature.outputs])
    drawn.choice(ends).tensorIndex = drawn.choice((0, 1, 7, 1 << 30))
    if drawn.random() < 0.3:
        signature.subgraphIndex = drawn.choice((0, 1, 99))


def _change_variable(tree: Any, graph: Any, drawn: random.Random) -> None:
    tensor = drawn.choice(graph.tensors)
    tensor.isVariable = not tensor.isVariable


CHANGES: Mapping[str, Callable[[Any, Any, random.Random], None]] = {
    "operand": _change_operand,
    "operand count": _drop_operand,
    "result": _change_result,
    "shape": _change_shape,
    "type": _change_type,
    "buffer": _change_buffer,
    "option": _change_option,
    "options": _drop_options,
    "constant": _change_constant,
    "op": _change_op,
    "swapped op": _swap_ops,
    "order": _change_order,
    "ends": _change_ends,
    "quantization": _change_quantization,
    "cycle": _make_cycle,
    "call": _change_call,
    "signature": _change_signature,
    "variable": _change_variable,
}


def damage_contents(content: bytes, drawn: random.Random) -> tuple[str, bytes] | None:
    """Change what a well-formed file says; None where that is not possible."""
    tree = parse(content)
    cases = []
    for _ in range(drawn.choice((1, 1, 1, 2))):
        kind = drawn.choice(list(CHANGES))
        try:
            CHANGES[kind](tree, drawn.choice(tree.subgraphs), drawn)
        except (IndexError, ValueError, TypeError, AttributeError):  # there is nothing of this kind
            return None
        cases.append(kind)
    try:
        return " and ".join(cases), pack(tree)
    except (TypeError, ValueError, OverflowError, struct.error):  # no value of its field
        return None
