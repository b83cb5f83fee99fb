"""CPU seconds and peak memory of a whole call without a metric, on ResNet-50.

    OMP_NUM_THREADS=1 python -m benchmarks.whole_call [--frameworks pytorch,onnx,tensorflow]
                                                      [--rounds 3] [--peer ENV/bin/python]

A call captures the model, calibrates it on 32 images in batches of 8, converts it to INT8, compares
its outputs with FP32 and measures both latencies. Beside it stand ONNX Runtime's `quantize_static`
and, with `--peer`, a Python that has Intel Neural Compressor, `quantization.fit` on PyTorch, which
do not compare and measure. One process per call, the ways in turn; imports are not counted.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.measurement.children import run_child
from benchmarks.measurement.peak import peak_memory

COUNT, BATCH = 32, 8
#: Way → framework.
WAYS = {
    "pytorch": "pytorch",
    "Intel Neural Compressor": "pytorch",
    "onnx": "onnx",
    "quantize_static": "onnx",
    "tensorflow": "tensorflow",
}


def batches(channels_last: bool = False) -> list[np.ndarray]:
    """The calibration images, in batches."""
    size = (COUNT, 3, 224, 224)
    images = np.random.default_rng(0).standard_normal(size, dtype=np.float32)
    if channels_last:
        images = np.ascontiguousarray(images.transpose(0, 2, 3, 1))
    return [images[start : start + BATCH] for start in range(0, COUNT, BATCH)]


def source_of(framework: str, folder: Path) -> Any:
    """ResNet-50 as an object or file of a framework."""
    if framework == "tensorflow":
        return import_module("benchmarks.nets.keras_models").build("ResNet50")
    from benchmarks.nets.resnet50 import resnet50

    if framework == "pytorch":
        return resnet50()
    return folder / "net.onnx"


def write_onnx(path: Path) -> None:
    """Write ResNet-50 as torch's exporter does."""
    import torch

    from benchmarks.nets.resnet50 import resnet50

    torch.onnx.export(
        resnet50(),
        (torch.from_numpy(batches()[0]),),
        str(path),
        input_names=["image"],
        dynamic_shapes=({0: torch.export.Dim("batch")},),
        dynamo=True,
        external_data=False,
        verbose=False,
    )


def ours(framework: str, folder: Path) -> Callable[[], Any]:
    """A whole call of neural_mp, to be timed."""
    from neural_mp import MixedPrecision
    from neural_mp.adaptors.registry import adaptor_for

    tuner = MixedPrecision()
    tuner.model, tuner.workspace = source_of(framework, folder), str(folder / "workspace")
    data: list[Any] = batches(framework == "tensorflow")
    if framework == "pytorch":
        data = [import_module("torch").from_numpy(batch) for batch in data]
    tuner.calib_dataloader = data
    adaptor_for(tuner.model)
    for imported in ("neural_mp.strategies.mincut", "scipy.special"):
        import_module(imported)
    return tuner


def quantize_static(folder: Path) -> Callable[[], Any]:
    """A call of ONNX Runtime's tool, to be timed."""
    from benchmarks.peers.static_quantization import write_static

    def call() -> None:
        feeds = ({"image": batch} for batch in batches())
        write_static(folder / "net.onnx", folder / "quantized.onnx", feeds)

    return call


def print_cost(method: str, folder: Path) -> None:
    """Time one call in this process."""
    call = quantize_static(folder) if method == "quantize_static" else ours(method, folder)
    started = time.process_time()
    call()
    cost = {"cpu": time.process_time() - started, "megabytes": peak_memory() / 1e6}
    print(json.dumps(cost))


def cost_of(method: str, folder: Path, peer: str | None) -> dict[str, float]:
    """The cost of one call in a process of its own."""
    variables = {"TF_CPP_MIN_LOG_LEVEL": "3", "OMP_NUM_THREADS": "1"}
    variables |= {"TF_NUM_INTRAOP_THREADS": "1", "TF_NUM_INTEROP_THREADS": "1"}
    if method == "Intel Neural Compressor":
        cost = run_child("peers.inc_pytorch", "resnet50", python=peer, variables=variables)
    else:
        cost = run_child("whole_call", "--cost", method, folder, variables=variables)
    return {"cpu": cost["cpu"] if "cpu" in cost else cost["parts"]["all"][0], **cost}


def main() -> None:
    """Print the medians of every way."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--frameworks", default="pytorch,onnx,tensorflow")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--peer", help="a Python with neural-compressor and psutil")
    parser.add_argument("--cost", nargs=2, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.cost:
        print_cost(options.cost[0], Path(options.cost[1]))
        return
    methods = [
        method for method, framework in WAYS.items() if framework in options.frameworks.split(",")
    ]
    if options.peer is None:
        methods = [method for method in methods if method != "Intel Neural Compressor"]
    results: dict[str, list[dict[str, float]]] = {method: [] for method in methods}
    with tempfile.TemporaryDirectory() as scratch:
        if "onnx" in methods:
            write_onnx(Path(scratch) / "net.onnx")
        for method in methods * options.rounds:
            # A workspace of its own: a second run would reuse measurements of the first.
            with tempfile.TemporaryDirectory(dir=scratch) as folder:
                for file in Path(scratch).glob("net.onnx"):
                    (Path(folder) / file.name).hardlink_to(file)
                results[method].append(cost_of(method, Path(folder), options.peer))
    print(f"{'':26}{'CPU seconds':>12}{'peak MB':>10}")
    for method, costs in results.items():
        seconds, memory = (
            statistics.median(cost[key] for cost in costs) for key in ("cpu", "megabytes")
        )
        print(f"{method:26}{seconds:12.2f}{memory:10.0f}")


if __name__ == "__main__":
    main()
