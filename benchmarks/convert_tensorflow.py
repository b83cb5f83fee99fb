"""TensorFlow: speed, seconds and memory to convert, conversions in the graph, fidelity.

    python -m benchmarks.convert_tensorflow [--models ResNet50,MobileNetV2,bert] [--batches 1,32]
                                    [--peer ENV/bin/python]

Ratios of medians of runs taken in turn: the frozen FP32 graph as TensorFlow's own optimiser fuses
it, the SavedModel it was exported as, and our INT8 of both. With `--peer`, a Python that has
Intel Neural Compressor, its INT8 of the same frozen graph too. Every conversion runs in a process
of its own, where its seconds and the most memory the process ever held are taken.
"""

from __future__ import annotations

import argparse
import json
import os
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

import numpy as np
from rich.console import Console
from rich.table import Table

from benchmarks.measurement.children import ChildError, run_child

SAMPLES = 100
Run = Callable[[np.ndarray], np.ndarray]


def make(name: str, folder: Path) -> None:
    """Write a model as a SavedModel and a frozen graph, with data to calibrate and run it on."""
    import tensorflow as tf
    from tensorflow.python.framework.convert_to_constants import convert_variables_to_constants_v2

    from benchmarks.nets import keras_models

    net = keras_models.build(name)
    net.export(folder / "saved_model", verbose=False)
    (tensor,) = net.inputs
    spec = tf.TensorSpec(tensor.shape, tensor.dtype, name="x")
    function = tf.function(lambda x: net(x, training=False)).get_concrete_function(spec)
    graph = convert_variables_to_constants_v2(function).graph.as_graph_def()
    (folder / "fp32.pb").write_bytes(graph.SerializeToString())
    np.save(folder / "data.npy", keras_models.data(net, SAMPLES))


def convert(source: Path, samples: Path, target: Path) -> None:
    """Our INT8 of a model, as a SavedModel and as a frozen graph; prints what it took."""
    from benchmarks.measurement.peak import peak_memory
    from neural_mp.adaptors.registry import adaptor_for
    from neural_mp.core.hardware import detect
    from neural_mp.core.plan import PrecisionPlan
    from neural_mp.core.precision import FP32, Precision

    import_module("tensorflow")  # not to be counted; nor is it for the peer
    images = np.load(samples)
    adaptor = adaptor_for(source)
    clock = [time.perf_counter()]
    model = adaptor.load(source, example=images[:1])
    space = adaptor.space(model, detect())
    clock.append(time.perf_counter())
    batches = [images[start : start + 10] for start in range(0, len(images), 10)]
    observed = adaptor.observe(model, batches, space)
    clock.append(time.perf_counter())
    plan = {op: space.capabilities[op].config(Precision.INT8) or FP32 for op in space.tunable_ops}
    converted = adaptor.convert(model, space.resolve(PrecisionPlan(plan)), observed, space)
    clock.append(time.perf_counter())
    peak = peak_memory() / 1e6
    target.mkdir()
    adaptor.save(converted, target)
    adaptor.single_file.save_file(converted, target.with_suffix(".pb"), {})
    parts = dict(zip(("load", "calibrate", "convert"), np.diff(clock), strict=True))
    print(json.dumps({**parts, "all": clock[-1] - clock[0], "megabytes": peak}))


def graph_in(path: Path) -> Any:
    from tensorflow.core.framework.graph_pb2 import GraphDef

    graph = GraphDef()
    graph.ParseFromString(path.read_bytes())
    return graph


def frozen(path: Path) -> Run:
    """A frozen graph in a session, as TensorFlow optimises it by default."""
    import tensorflow as tf

    graph, within = graph_in(path), tf.Graph()
    (fed,) = (node.name for node in graph.node if node.op == "Placeholder")
    fetched = next(n.name for n in reversed(graph.node) if n.op == "Identity")
    with within.as_default():
        tf.graph_util.import_graph_def(graph, name="")
    session = tf.compat.v1.Session(graph=within)
    run = session.make_callable(f"{fetched}:0", [f"{fed}:0"])
    return lambda x: np.asarray(run(x))


def saved(path: Path) -> Run:
    """A SavedModel by its signature."""
    import tensorflow as tf

    model = tf.saved_model.load(str(path))
    run = model.signatures["serving_default"]
    (name,) = run.structured_input_signature[1]

    def call(x: np.ndarray) -> np.ndarray:
        (result,) = run(**{name: tf.constant(x)}).values()
        return np.asarray(result)

    call.keeps = model  # type: ignore[attr-defined]
    return call


def decibels(reference: np.ndarray, output: np.ndarray) -> float:
    noise = max(float(np.linalg.norm(reference - output)), 1e-12)
    return float(20 * np.log10(np.linalg.norm(reference) / noise))


def conversions(path: Path) -> str:
    """How often a graph casts, quantizes and dequantizes."""
    counts = Counter(node.op for node in graph_in(path).node)
    quantize = counts["QuantizeV2"] + counts["Quantize"]
    rest = sum(
        count for op, count in counts.items() if op in ("Requantize", "RequantizePerChannel")
    )
    return f"{counts['Cast']} / {quantize} / {counts['Dequantize']}" + (
        f" + {rest}" if rest else ""
    )


def compare(name: str, batches: list[int], iterations: int, peer: str | None) -> None:
    """One model: convert, then run all in turn."""
    from neural_mp.profiling import time_interleaved_medians

    console = Console(width=110)
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        run_child("convert_tensorflow", "--make", name, folder)
        data = folder / "data.npy"
        costs = {
            f"ours, from the {kind}": run_child(
                "convert_tensorflow", "--convert", folder / source, data, folder / target
            )
            for kind, source, target in (
                ("frozen graph", "fp32.pb", "from_pb"),
                ("SavedModel", "saved_model", "from_saved"),
            )
        }
        graphs = {
            "FP32 frozen graph": folder / "fp32.pb",
            "INT8 of the frozen graph": folder / "from_pb.pb",
            "INT8 of the SavedModel": folder / "from_saved.pb",
        }
        if peer:
            graph, result = folder / "fp32.pb", folder / "peer.pb"
            arguments = ("peers.inc_tensorflow", graph, "x", "Identity", data, result)
            try:
                costs["Intel Neural Compressor"] = run_child(*arguments, python=peer, folder=folder)
                graphs["INT8 of Intel Neural Compressor"] = result
            except ChildError as error:
                console.print(f"Intel Neural Compressor failed: {str(error).splitlines()[-1]}")
        table = Table(title=f"{name}: to convert to INT8, {SAMPLES} samples")
        for heading in ("", "seconds", "of which", "peak memory, MB"):
            table.add_column(heading)
        for label, cost in costs.items():
            parts = {k: v for k, v in cost.items() if k not in ("all", "megabytes")}
            details = ", ".join(f"{part} {seconds:.1f}" for part, seconds in parts.items())
            table.add_row(label, f"{cost['all']:.1f}", details, f"{cost['megabytes']:.0f}")
        console.print(table)
        runs: dict[str, Run] = {label: frozen(path) for label, path in graphs.items()}
        runs["FP32 SavedModel"] = saved(folder / "saved_model")
        runs["INT8 SavedModel"] = saved(folder / "from_saved")
        # One sample says little of an untrained net: roundings fall as they may.
        results = {label: run(np.load(data)[:32]) for label, run in runs.items()}
        for batch in batches:
            inputs = np.load(data)[:batch]
            calls = [partial(run, inputs) for run in runs.values()]
            rounds = iterations if batch < 8 else max(5, iterations // 4)
            medians = time_interleaved_medians(calls, warmup=3, iterations=rounds)
            table = Table(title=f"{name}, batch {batch}")
            headings = ("", "ms", "× of frozen FP32", "SQNR, dB", "Cast / Quantize / Dequantize")
            for heading in headings:
                table.add_column(heading, justify="right" if heading else "left")
            reference = results["FP32 frozen graph"]
            for (label, result), median in zip(results.items(), medians, strict=True):
                fidelity = "" if "FP32" in label else f"{decibels(reference, result):.1f}"
                counts = conversions(graphs[label]) if label in graphs else ""
                ratio = f"{medians[0] / median:.2f}"
                table.add_row(label, f"{median * 1e3:.1f}", ratio, fidelity, counts)
            console.print(table)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--models", default="ResNet50,MobileNetV2,bert")
    parser.add_argument("--batches", default="1,32", help="batch sizes to time")
    parser.add_argument("--iterations", type=int, default=41)
    parser.add_argument("--peer", help="a Python with neural-compressor")
    parser.add_argument("--make", nargs=2, help=argparse.SUPPRESS)
    parser.add_argument("--convert", nargs=3, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.make:
        make(options.make[0], Path(options.make[1]))
    elif options.convert:
        convert(*map(Path, options.convert))
    else:
        batches = [int(size) for size in options.batches.split(",")]
        for name in options.models.split(","):
            compare(name, batches, options.iterations, options.peer)


if __name__ == "__main__":
    main()
