"""ONNX Runtime: speed, seconds and memory to quantize, conversions in the graph, fidelity.

    python -m benchmarks.convert_onnx [--models resnet50,bert] [--batches 1,32]
        [--calibration-batch 10]

ResNet-50 and a BERT-base-size encoder as torch exports them. Beside ours stands ONNX Runtime's own
tool, `quantize_static`, on the same data: as it is, and behind the preprocessing that it asks for.
Ratios of medians of runs taken in turn, all in plain ONNX Runtime sessions. Every conversion runs
in a process of its own, where its seconds and the most memory the process ever held are taken.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import numpy as np
import onnxruntime as ort
from rich.console import Console
from rich.table import Table

from benchmarks.measurement.children import run_child
from benchmarks.nets.optimized import optimized_graph

SAMPLES = 100
Feeds = dict[str, np.ndarray]


def images(count: int) -> Feeds:
    draw = np.random.default_rng(0)
    return {"image": draw.standard_normal((count, 3, 224, 224), dtype=np.float32)}


def sentences(count: int) -> Feeds:
    draw = np.random.default_rng(0)
    tokens = draw.integers(0, 30000, (count, 128))
    return {"input_ids": tokens, "attention_mask": np.ones_like(tokens)}


MODELS: dict[str, Callable[[int], Feeds]] = {"resnet50": images, "bert": sentences}


def cut(feeds: Feeds, size: int) -> Iterator[Feeds]:
    count = len(next(iter(feeds.values())))
    for start in range(0, count, size):
        yield {name: array[start : start + size] for name, array in feeds.items()}


def make(name: str, path: Path) -> None:
    """Write a model as torch's exporter does."""
    import torch

    from benchmarks.nets.bert import bert_base
    from benchmarks.nets.resnet50 import resnet50

    net = resnet50() if name == "resnet50" else bert_base()
    feeds = MODELS[name](2)
    batch = torch.export.Dim("batch")
    torch.onnx.export(
        net,
        tuple(map(torch.from_numpy, feeds.values())),
        str(path),
        input_names=list(feeds),
        output_names=["result"],
        dynamic_shapes=tuple({0: batch} for _ in feeds),
        dynamo=True,
        external_data=False,
        verbose=False,
    )


def ours(name: str, source: Path, target: Path, size: int, dynamic: bool) -> dict[str, float]:
    """Convert with neural_mp; seconds of its parts."""
    from neural_mp.adaptors.registry import adaptor_for
    from neural_mp.core.hardware import detect
    from neural_mp.core.plan import PrecisionPlan
    from neural_mp.core.precision import FP32, Precision

    batches = list(cut(MODELS[name](SAMPLES), size))
    clock = [time.perf_counter()]
    adaptor = adaptor_for(source)
    model = adaptor.load(source, example=next(cut(batches[0], 1)))
    space = adaptor.space(model, detect())
    clock.append(time.perf_counter())
    if dynamic:
        space = space.with_int8(["dynamic"])
    observed = adaptor.observe(model, batches, space)
    clock.append(time.perf_counter())
    plan = {op: space.capabilities[op].config(Precision.INT8) or FP32 for op in space.tunable_ops}
    converted = adaptor.convert(model, space.resolve(PrecisionPlan(plan)), observed, space)
    adaptor.single_file.save_file(converted, target, {})
    clock.append(time.perf_counter())
    parts = dict(zip(("load", "calibrate", "convert"), np.diff(clock), strict=True))
    return {**parts, "all": clock[-1] - clock[0]}


def theirs(name: str, source: Path, target: Path, size: int, prepared: bool) -> dict[str, float]:
    """Convert with ONNX Runtime's tool, weights per channel as ours are."""
    from onnxruntime.quantization.shape_inference import quant_pre_process

    from benchmarks.peers.static_quantization import write_static

    batches = cut(MODELS[name](SAMPLES), size)
    start = time.perf_counter()
    if prepared:
        between = target.with_suffix(".prepared.onnx")
        quant_pre_process(str(source), str(between))
        source = between
    write_static(source, target, batches)
    return {"all": time.perf_counter() - start}


WAYS = {
    "ours": "ours",
    "dynamic": "ours, dynamic",
    "tool": "quantize_static",
    "prepared": "quantize_static, with preprocessing",
}


def convert(variant: str, name: str, source: Path, target: Path, size: int) -> None:
    """One conversion, in this process; prints what it took."""
    from benchmarks.measurement.peak import peak_memory

    if variant in ("ours", "dynamic"):
        figures = ours(name, source, target, size, variant == "dynamic")
    else:
        figures = theirs(name, source, target, size, variant == "prepared")
    print(json.dumps({**figures, "megabytes": peak_memory() / 1e6}))


def conversions(path: Path) -> str:
    """What is left of casts and quantizations when ONNX Runtime has made its kernels."""
    kinds = Counter(node.op_type for node in optimized_graph(path).node)
    return " / ".join(str(kinds[op]) for op in ("Cast", "QuantizeLinear", "DequantizeLinear"))


def decibels(reference: np.ndarray, actual: np.ndarray) -> float:
    noise = np.linalg.norm(reference - actual)
    return float(20 * np.log10(np.linalg.norm(reference) / max(noise, 1e-12)))


def compare(name: str, batches: list[int], iterations: int, size: int) -> None:
    """One model: convert in all ways, then run all in turn."""
    from neural_mp.profiling import time_interleaved_medians

    console = Console(width=110)
    variants = [variant for variant in WAYS if name == "bert" or variant != "dynamic"]
    with tempfile.TemporaryDirectory() as scratch:
        files = {"FP32": Path(scratch) / "fp32.onnx"}
        run_child("convert_onnx", "--make", name, files["FP32"])
        table = Table(title=f"{name}: to INT8, {SAMPLES} samples in batches of {size}")
        for heading in ("", "seconds", "of which", "peak memory, MB"):
            table.add_column(heading)
        for variant in variants:
            files[WAYS[variant]] = Path(scratch) / f"{variant}.onnx"
            arguments = (variant, name, files["FP32"], files[WAYS[variant]], size)
            cost = run_child("convert_onnx", "--convert", *arguments)
            parts = {k: v for k, v in cost.items() if k not in ("all", "megabytes")}
            breakdown = ", ".join(f"{part} {seconds:.1f}" for part, seconds in parts.items())
            table.add_row(
                WAYS[variant], f"{cost['all']:.1f}", breakdown, f"{cost['megabytes']:.0f}"
            )
        console.print(table)
        sessions = {
            label: ort.InferenceSession(str(path), providers=["CPUExecutionProvider"])
            for label, path in files.items()
        }
        some = MODELS[name](8)
        results = {label: session.run(None, some)[0] for label, session in sessions.items()}
        for batch in batches:
            feeds = MODELS[name](batch)
            runs = [partial(session.run, None, feeds) for session in sessions.values()]
            rounds = iterations if batch < 8 else max(5, iterations // 4)
            medians = time_interleaved_medians(runs, warmup=3, iterations=rounds)
            table = Table(title=f"{name}, batch {batch}")
            for heading in ("", "ms", "× of FP32", "SQNR, dB", "Cast / Quantize / Dequantize"):
                table.add_column(heading, justify="right" if heading else "left")
            for (label, result), median in zip(results.items(), medians, strict=True):
                fidelity = "" if label == "FP32" else f"{decibels(results['FP32'], result):.1f}"
                counts = conversions(files[label])
                ratio = f"{medians[0] / median:.2f}"
                table.add_row(label, f"{median * 1e3:.1f}", ratio, fidelity, counts)
            console.print(table)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--models", default="resnet50,bert")
    parser.add_argument("--batches", default="1,32", help="batch sizes to time")
    parser.add_argument("--iterations", type=int, default=41)
    parser.add_argument("--calibration-batch", type=int, default=10)
    parser.add_argument("--make", nargs=2, help=argparse.SUPPRESS)
    parser.add_argument("--convert", nargs=5, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.make:
        make(options.make[0], Path(options.make[1]))
    elif options.convert:
        variant, name, source, target, size = options.convert
        convert(variant, name, Path(source), Path(target), int(size))
    else:
        batches = [int(size) for size in options.batches.split(",")]
        for name in options.models.split(","):
            compare(name, batches, options.iterations, options.calibration_batch)


if __name__ == "__main__":
    main()
