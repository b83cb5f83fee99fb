"""INT8 on processors with and without exact products of bytes: speed, fidelity, and the search.

    python -m benchmarks.processors [--framework pytorch|tensorflow|onnxrt] [--repeats N]
                                    [--model resnet50|mobilenetv2|gated] [--batches 1,8]
                                    [--limit none|AVX512_CORE|AVX2]

Processors without VNNI saturate sums of two products of bytes, so that weights are stored within
±63 there. `ONEDNN_MAX_CPU_ISA` makes oneDNN, which PyTorch and TensorFlow compute INT8 with, behave
as on such a processor; it has to be set when a process starts, so each measurement has a process of
its own. ONNX Runtime does not mind the variable and is measured once, as the processor is.

ResNet-50 and MobileNetV2: all that can be in INT8 is, after calibration on 16 images. Said are the
speed-up over the framework's FP32 and the signal-to-noise ratio beside it on images that were not
seen; the same of weights stored in the full range, whatever the processor makes of them; and the
size and the speed of what is converted for `portable`, as a share of what is for this machine.

The gated net is slower in INT8 than in FP32. A whole search with an accuracy target runs on it,
several times, and its result is measured beside FP32 once more: it must not be the slower one.

All runs are taken in turn, on one thread. Ratios are of first deciles, which other processes leave
alone; beside them stands the interval that holds them with a confidence of 95 %. Absolute times of
a shared machine mean little.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Iterator
from typing import Any

from rich.console import Console
from rich.table import Table

from benchmarks.measurement.children import run_child

FRAMEWORKS = ("pytorch", "tensorflow", "onnxrt")
VISION, GATED = ("resnet50", "mobilenetv2"), "gated"
NO_LIMIT = "none"
LIMITS = (NO_LIMIT, "AVX512_CORE", "AVX2")
LIMIT_VARIABLE = "ONEDNN_MAX_CPU_ISA"
#: Rounds that are counted, at most.
ROUNDS = {**dict.fromkeys(VISION, 31), GATED: 801}
BATCHES = {**dict.fromkeys(VISION, (1, 8)), GATED: (1, 16)}
#: Two copies of one model differ by so much, for where they lie in memory.
_SAME = 0.02
_THREADS = ("OMP_NUM_THREADS", "TF_NUM_INTRAOP_THREADS", "TF_NUM_INTEROP_THREADS")


def limits_for(framework: str, requested: str | None) -> tuple[str, ...]:
    if framework == "onnxrt":
        return (NO_LIMIT,)
    return (requested,) if requested else LIMITS


def child(limit: str, *arguments: object) -> Any:
    """Return what a measurement prints, in a process of its own under a limit of oneDNN's."""
    variables = {**dict.fromkeys(_THREADS, "1"), "TF_CPP_MIN_LOG_LEVEL": "3"}
    os.environ.pop(LIMIT_VARIABLE, None)
    if limit != NO_LIMIT:
        variables[LIMIT_VARIABLE] = limit
    return run_child("processors", "--child", *arguments, variables=variables)


def measure(framework: str, model: str, batches: str, repeats: str) -> None:
    """One measurement, in this process; prints what came of it."""
    from benchmarks.measurement import processor_runs

    processor_runs.quiet()
    sizes = [int(size) for size in batches.split(",")]
    if model == GATED:
        result: Any = {
            size: processor_runs.search(framework, size, int(repeats), ROUNDS[model])
            for size in sizes
        }
    else:
        result = processor_runs.vision(framework, model, sizes, ROUNDS[model])
    print(json.dumps(result))


def spread(found: dict[str, float]) -> str:
    return f"{found['value']:.2f} ({found['low']:.2f} to {found['high']:.2f})"


def table(title: str, *headings: str) -> Table:
    result = Table(title=title)
    for heading in headings:
        result.add_column(heading)
    return result


def vision_rows(framework: str, limit: str, model: str, results: Any) -> Iterator[tuple[str, ...]]:
    decibels, sizes = results["decibels"], results["sizes"]
    saturating = "saturating" in results["products"].values()
    for batch, speeds in results["speeds"].items():
        yield (
            framework,
            limit,
            "saturate" if saturating else "exact",
            model,
            batch,
            spread(speeds["int8"]),
            f"{decibels['this']:.1f}",
            f"{decibels['vnni']:.1f}",
            f"{decibels['portable']:.1f}",
            spread(speeds["portable"]),
            f"{results['float_size'] / 1e6:.1f} / {sizes['this'] / 1e6:.1f}"
            f" / {sizes['portable'] / 1e6:.1f}",
        )


def compare_vision(
    frameworks: list[str], models: list[str], requested: str | None, batches: str | None
) -> Table:
    """All rows of ResNet-50 and MobileNetV2."""
    result = table(
        "INT8 beside FP32",
        "framework",
        "limit",
        "products",
        "model",
        "batch",
        "× of FP32",
        "SQNR, dB",
        "full range",
        "portable",
        "speed of portable / here",
        "MB FP32 / here / portable",
    )
    for framework in frameworks:
        for limit in limits_for(framework, requested):
            for model in models:
                sizes = batches or ",".join(map(str, BATCHES[model]))
                results = child(limit, framework, model, sizes, 1)
                for row in vision_rows(framework, limit, model, results):
                    print(" | ".join(row), file=sys.stderr, flush=True)
                    result.add_row(*row)
    return result


def search_row(run: dict[str, Any]) -> tuple[str, ...]:
    """One search: what it came to, what it says of that, and what it is."""
    counts = " + ".join(f"{count} {name}" for name, count in sorted(run["counts"].items()))
    reported = "FP32"
    if run["said_low"] is not None:
        reported = f"{run['said']:.2f} ({run['said_low']:.2f} to {run['said_high']:.2f})"
    measured = spread(run["measured"])
    accuracy = f"{run['baseline']:.4f} → {run['accuracy']:.4f}"
    tried = ", ".join(
        f"{by.get('int8', 0)} {outcome}" + (f" {speed:.2f}" if speed else "")
        for by, outcome, speed in run["trials"]
    )
    return (
        counts,
        str(run["effective"]),
        tried,
        reported,
        measured,
        spread(run["lowest"]),
        str(run["met"]),
        accuracy,
    )


def verdict(runs: list[dict[str, Any]]) -> str:
    """How often the result was FP32, and how often it was slower than that for sure."""
    quantized = [run for run in runs if run["said_low"] is not None]
    slower = sum(run["measured"]["high"] < 1 - _SAME for run in quantized)
    faster = sum(run["measured"]["low"] > 1 + _SAME for run in quantized)
    hollow = sum(run["effective"] == 0 for run in quantized)
    untold = sum(not _holds(run) for run in quantized)
    return (
        f"{len(runs)} searches: FP32 {len(runs) - len(quantized)}; faster than FP32 by more than "
        f"{_SAME:.0%} for sure {faster}, slower {slower}; called met with no op in INT8 {hollow}; "
        f"said and measured intervals apart {untold}"
    )


def _holds(run: dict[str, Any]) -> bool:
    measured = run["measured"]
    return measured["low"] <= run["said_high"] and run["said_low"] <= measured["high"]


def compare_searches(
    frameworks: list[str], requested: str | None, batches: str | None, repeats: int
) -> Iterator[Table]:
    """A table of searches for every framework, limit and batch."""
    for framework in frameworks:
        for limit in limits_for(framework, requested):
            sizes = batches or ",".join(map(str, BATCHES[GATED]))
            for batch, runs in child(limit, framework, GATED, sizes, repeats).items():
                result = table(
                    f"Search on the gated net: {framework}, limit {limit}, batch {batch}",
                    "plan",
                    "run in INT8",
                    "trials: INT8 in the plan",
                    "said, × of FP32",
                    "measured",
                    "all INT8",
                    "met",
                    "accuracy",
                )
                for run in runs:
                    result.add_row(*search_row(run))
                result.caption = verdict(runs)
                yield result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--framework", choices=FRAMEWORKS, help="all by default")
    parser.add_argument("--model", choices=(*VISION, GATED), help="all by default")
    parser.add_argument("--repeats", type=int, default=3, help="searches on the gated net")
    parser.add_argument("--batches", help="batch sizes, with commas between")
    parser.add_argument("--limit", choices=LIMITS, help="of oneDNN; all by default")
    parser.add_argument("--child", nargs=4, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child:
        measure(*options.child)
        return
    console = Console() if sys.stdout.isatty() else Console(width=160)
    frameworks = [options.framework] if options.framework else list(FRAMEWORKS)
    models = [options.model] if options.model else [*VISION, GATED]
    chosen = [model for model in models if model in VISION]
    if chosen:
        console.print(compare_vision(frameworks, chosen, options.limit, options.batches))
    if GATED in models:
        tables = compare_searches(frameworks, options.limit, options.batches, options.repeats)
        for result in tables:
            console.print(result)


if __name__ == "__main__":
    main()
