"""Graphs of growing size: CPU seconds and peak memory of `inspect`, beside the runtime's own load.

    OMP_NUM_THREADS=1 python -m benchmarks.graph_sizes [--runtimes onnx,openvino,tensorflow]
                                    [--chains relu,mixed,conv] [--ops 1000,2000,4000,8000]

A chain of kind `relu` is ReLUs alone; `mixed` repeats a product with a weight, a bias, a ReLU, the
sum with the block's input, and a Tanh; `conv` a 1×1 convolution with a ReLU and such a sum.

Each way runs in a process of its own. Imports of the runtime count in memory only. `plain` loads
the file in the runtime, with the level of optimization that `inspect` uses, and compiles for
dynamic shapes.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from importlib import import_module
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from rich.console import Console
from rich.table import Table

from benchmarks.measurement.children import ChildError, run_child
from benchmarks.measurement.clock import peak_memory

WAYS = ("plain", "inspect")
MAX_SECONDS = 600.0
#: Columns of the input, or channels of the image.
WIDTH = 8
BLOCKS = {
    "relu": ("Relu",),
    "mixed": ("MatMul", "Bias", "Relu", "Residual", "Tanh"),
    "conv": ("Conv", "Relu", "Residual"),
}


class Step(NamedTuple):
    """One op of a chain: an index, a kind as in `BLOCKS`, and the number of the block."""

    index: int
    kind: str
    block: int


def list_steps(chain: str, ops: int) -> Iterator[Step]:
    """Yield the ops of a chain in order."""
    block = BLOCKS[chain]
    for index in range(ops):
        yield Step(index, block[index % len(block)], index // len(block))


def input_shape(chain: str) -> tuple[int, ...]:
    """Return the shape of one sample."""
    return (WIDTH, 4, 4) if chain == "conv" else (WIDTH,)


def weight(step: Step) -> np.ndarray:
    """Return the constant of an op, in the layout of ONNX."""
    draw = np.random.default_rng(step.index)
    shapes = {"MatMul": (WIDTH, WIDTH), "Bias": (WIDTH,), "Conv": (WIDTH, WIDTH, 1, 1)}
    return draw.standard_normal(shapes[step.kind], dtype=np.float32) / WIDTH


def build_chain(chain: str, ops: int, source: Any, add: Callable[[Step, Any, Any], Any]) -> Any:
    """Return the last result: `add(step, x, residual)` adds an op of a runtime."""
    value = residual = source
    for step in list_steps(chain, ops):
        if step.index % len(BLOCKS[chain]) == 0:
            residual = value
        value = add(step, value, residual)
    return value


def write_onnx(chain: str, ops: int, path: Path) -> None:
    """Write a chain as an ONNX file."""
    import onnx
    from onnx import TensorProto, helper, numpy_helper

    nodes, constants = [], []

    def add(step: Step, x: str, residual: str) -> str:
        result, second = f"r{step.index}", residual
        if step.kind in ("MatMul", "Bias", "Conv"):
            second = f"w{step.index}"
            constants.append(numpy_helper.from_array(weight(step), second))
        kind = "Add" if step.kind in ("Bias", "Residual") else step.kind
        inputs = [x] if kind in ("Relu", "Tanh") else [x, second]
        nodes.append(helper.make_node(kind, inputs, [result], name=f"n{step.index}"))
        return result

    last = build_chain(chain, ops, "x", add)
    shape = ["batch", *input_shape(chain)]
    ports = [helper.make_tensor_value_info(n, TensorProto.FLOAT, shape) for n in ("x", last)]
    graph = helper.make_graph(nodes, "chain", ports[:1], ports[1:], constants)
    opsets = [helper.make_opsetid("", 18)]
    onnx.save(helper.make_model(graph, opset_imports=opsets, ir_version=9), path)


def write_openvino(chain: str, ops: int, path: Path) -> None:
    """Write a chain as OpenVINO IR."""
    import openvino as ov
    from openvino import opset13 as ops13

    def add(step: Step, x: Any, residual: Any) -> Any:
        name = f"n{step.index}"
        match step.kind:
            case "MatMul":
                return ops13.matmul(x, ops13.constant(weight(step)), False, False, name=name)
            case "Bias":
                return ops13.add(x, ops13.constant(weight(step)), name=name)
            case "Conv":
                w = ops13.constant(weight(step))
                return ops13.convolution(x, w, [1, 1], [0, 0], [0, 0], [1, 1], name=name)
            case "Residual":
                return ops13.add(x, residual, name=name)
            case _:
                return (ops13.relu if step.kind == "Relu" else ops13.tanh)(x, name=name)

    shape = ov.PartialShape([-1, *input_shape(chain)])
    source = ops13.parameter(shape, np.float32, name="x")
    ov.save_model(ov.Model([build_chain(chain, ops, source, add)], [source]), path, False)


def write_tensorflow(chain: str, ops: int, path: Path) -> None:
    """Write a chain as a frozen graph; convolutions are in NHWC."""
    import tensorflow as tf

    graph = tf.compat.v1.GraphDef(versions={"producer": 1882})
    float32 = tf.compat.v1.AttrValue(type=tf.float32.as_datatype_enum)

    def node(name: str, kind: str, *inputs: str) -> Any:
        item = graph.node.add(name=name, op=kind, input=inputs)
        item.attr["dtype" if kind in ("Placeholder", "Const") else "T"].CopyFrom(float32)
        return item

    shape = input_shape(chain)
    channels_last = (*shape[1:], shape[0])
    source = node("x", "Placeholder")
    source.attr["shape"].shape.CopyFrom(tf.TensorShape([None, *channels_last]).as_proto())

    def add(step: Step, x: str, residual: str) -> str:
        name, second = f"n{step.index}", residual
        if step.kind in ("MatMul", "Bias", "Conv"):
            second, array = f"w{step.index}", weight(step)
            array = array.transpose(2, 3, 1, 0) if array.ndim == 4 else array
            node(second, "Const").attr["value"].tensor.CopyFrom(tf.make_tensor_proto(array))
        kinds = {"Bias": "BiasAdd", "Residual": "AddV2", "Conv": "Conv2D"}
        kind = kinds.get(step.kind, step.kind)
        inputs = [x] if kind in ("Relu", "Tanh") else [x, second]
        item = node(name, kind, *inputs)
        if kind == "Conv2D":
            item.attr["strides"].list.i.extend([1, 1, 1, 1])
            item.attr["padding"].s = b"VALID"
        return name

    build_chain(chain, ops, "x", add)
    path.write_bytes(graph.SerializeToString())


def load_onnx(path: Path) -> None:
    """Create a session without optimization."""
    import onnxruntime as ort

    options = ort.SessionOptions()
    options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_DISABLE_ALL
    ort.InferenceSession(path, options)


def load_openvino(path: Path) -> None:
    """Compile a model."""
    import openvino as ov

    ov.Core().compile_model(path, "CPU")


def load_tensorflow(path: Path) -> None:
    """Import a frozen graph as a function."""
    import tensorflow as tf

    graph = tf.compat.v1.GraphDef.FromString(path.read_bytes())
    whole = tf.compat.v1.wrap_function(lambda: tf.compat.v1.import_graph_def(graph, name=""), [])
    whole.prune("x:0", f"{graph.node[-1].name}:0")


#: Runtime → suffix, module to import, plain load, writer.
RUNTIMES: dict[str, tuple[str, str, Callable[[Path], None], Callable[[str, int, Path], None]]] = {
    "onnx": (".onnx", "onnxrt", load_onnx, write_onnx),
    "openvino": (".xml", "openvino", load_openvino, write_openvino),
    "tensorflow": (".pb", "tensorflow", load_tensorflow, write_tensorflow),
}


def inspect(path: Path) -> None:
    """Run the command, without its output."""
    from neural_mp.cli import entry_point

    sys.argv = ["neural-mp", "inspect", str(path)]
    with Path(os.devnull).open("w", encoding="utf-8") as nowhere:
        stdout, sys.stdout = sys.stdout, nowhere
        try:
            entry_point.main()
        except SystemExit as ending:
            if ending.code:
                raise
        finally:
            sys.stdout = stdout


def print_cost(runtime: str, way: str, path: Path) -> None:
    """Print the cost of one way in this process."""
    _, module, load, _ = RUNTIMES[runtime]
    import_module(f"neural_mp.adaptors.{module}.adaptor")
    started = time.process_time()
    (load if way == "plain" else inspect)(path)
    cost = {"cpu": time.process_time() - started, "megabytes": peak_memory() / 1e6}
    print(json.dumps(cost))


def main() -> None:
    """Print a table of all runtimes, chains and sizes."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--runtimes", default=",".join(RUNTIMES))
    parser.add_argument("--chains", default="relu,mixed,conv")
    parser.add_argument("--ops", default="1000,2000,4000,8000")
    parser.add_argument("--cost", nargs=3, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.cost:
        print_cost(options.cost[0], options.cost[1], Path(options.cost[2]))
        return
    table = Table("runtime", "chain", "ops", "way", "CPU seconds", "peak MB")
    for runtime in options.runtimes.split(","):
        suffix, _, _, write = RUNTIMES[runtime]
        for chain in options.chains.split(","):
            for ops in map(int, options.ops.split(",")):
                with tempfile.TemporaryDirectory() as folder:
                    path = Path(folder) / f"chain{suffix}"
                    write(chain, ops, path)
                    for way in WAYS:
                        table.add_row(runtime, chain, str(ops), way, *measure(runtime, way, path))
    Console(width=100).print(table)


def measure(runtime: str, way: str, path: Path) -> tuple[str, str]:
    """Return the cost of one way as text, in a process of its own."""
    variables = {"TF_CPP_MIN_LOG_LEVEL": "3", "OMP_NUM_THREADS": "1"}
    arguments = ("--cost", runtime, way, path)
    try:
        cost = run_child("graph_sizes", *arguments, variables=variables, max_seconds=MAX_SECONDS)
    except ChildError as error:
        return str(error).splitlines()[-1][:30], "–"
    return f"{cost['cpu']:.2f}", f"{cost['megabytes']:.0f}"


if __name__ == "__main__":
    main()
