"""ResNet-50 on PyTorch: speed over eager FP32, seconds and memory to convert, fidelity.

    python benchmarks/pytorch.py [--batches 1,16] [--size 224]

Ratios of medians of runs taken in turn; absolute times of a shared machine mean little.
"""

from __future__ import annotations

import argparse
import time

import numpy as np
import torch
from resnet50 import resnet50
from rich.console import Console
from rich.table import Table

from neural_mp.adaptors.registry import adaptor_for
from neural_mp.hardware import detect
from neural_mp.plan import PrecisionPlan
from neural_mp.precision import FP32, Precision
from neural_mp.profiling import interleaved_medians, peak_growth


def decibels(reference: np.ndarray, given: np.ndarray) -> float:
    noise = np.linalg.norm(reference - given)
    return float(20 * np.log10(np.linalg.norm(reference) / max(noise, 1e-12)))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--batches", default="1,16", help="batch sizes to time")
    parser.add_argument("--size", type=int, default=224, help="height and width of the images")
    parser.add_argument("--iterations", type=int, default=15)
    options = parser.parse_args()
    shape = (3, options.size, options.size)
    images = np.random.default_rng(0).normal(size=(32, *shape)).astype(np.float32)

    net = resnet50()
    adaptor = adaptor_for(net)
    held: dict[str, object] = {}
    seconds: dict[str, float] = {}

    def prepare() -> None:
        start = time.perf_counter()
        model = adaptor.load(net, example=images[:2])
        space = adaptor.space(model, detect())
        seconds["capture"] = time.perf_counter() - start
        start = time.perf_counter()
        observed = adaptor.observe(model, np.split(images, 8), space)
        seconds["calibrate, 32 images"] = time.perf_counter() - start
        held["fp32"] = model
        for precision in (Precision.INT8, Precision.BF16):
            if precision not in space.precisions():
                continue
            plan = {op: space.capabilities[op].config(precision) or FP32 for op in space.decided}
            start = time.perf_counter()
            held[precision.value] = adaptor.convert(model, PrecisionPlan(plan), observed, space)
            seconds[f"convert to {precision}"] = time.perf_counter() - start

    growth = peak_growth(prepare)
    console = Console()
    table = Table(
        title=f"ResNet-50, {options.size}×{options.size}, {torch.get_num_threads()} threads"
    )
    for heading in ("", "batch", "ms", "over eager FP32", "SQNR, dB", "weights, MB", "casts"):
        table.add_column(heading, justify="right")
    for batch in map(int, options.batches.split(",")):
        inputs = np.resize(images, (batch, *shape))
        tensors = torch.from_numpy(inputs)

        def eager(tensors: torch.Tensor = tensors) -> None:
            with torch.no_grad():
                net(tensors)

        runs = [
            (lambda model=model, tensors=tensors: adaptor.predict(model, tensors))
            for model in held.values()
        ]
        medians = interleaved_medians([eager, *runs], warmup=2, iterations=options.iterations)
        reference = adaptor.predict(held["fp32"], inputs)
        table.add_row("eager", str(batch), f"{medians[0] * 1e3:.1f}", "1.00×", "", "", "")
        for (name, model), median in zip(held.items(), medians[1:], strict=True):
            table.add_row(
                name,
                str(batch),
                f"{median * 1e3:.1f}",
                f"{medians[0] / median:.2f}×",
                f"{decibels(reference, adaptor.predict(model, inputs)):.1f}",
                f"{adaptor.size(model) / 1e6:.0f}",
                str(adaptor.conversion_counts(model).casts),
            )
    console.print(table)
    console.print(", ".join(f"{name} {taken:.1f} s" for name, taken in seconds.items()))
    console.print(f"memory grew by {growth / 1e6:.0f} MB from capture to conversion")


if __name__ == "__main__":
    main()
