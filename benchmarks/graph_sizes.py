"""Graphs of growing size: CPU seconds and peak memory of `inspect`, beside the runtime's own load.

    OMP_NUM_THREADS=1 python -m benchmarks.graph_sizes [--runtimes onnx,openvino,tensorflow]
                                    [--chains relu,mixed,conv] [--ops 1000,2000,4000,8000]

Chains of `benchmarks.nets.chains`. Each way runs in a process of its own. Imports of the runtime
count in memory only. `plain` loads the file in the runtime, with the level of optimization that
`inspect` uses, and compiles for dynamic shapes.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import time
from collections.abc import Callable
from importlib import import_module
from pathlib import Path

from rich.console import Console
from rich.table import Table

from benchmarks.measurement.children import ChildError, run_child
from benchmarks.measurement.clock import peak_memory
from benchmarks.nets import chains

WAYS = ("plain", "inspect")
MAX_SECONDS = 600.0


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
    "onnx": (".onnx", "onnxrt", load_onnx, chains.write_onnx),
    "openvino": (".xml", "openvino", load_openvino, chains.write_openvino),
    "tensorflow": (".pb", "tensorflow", load_tensorflow, chains.write_tensorflow),
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
