"""INT8 on processors with and without exact products of bytes: speed, fidelity, and size.

    python -m benchmarks.processors [--framework pytorch|tensorflow|onnxrt] [--batches 1,8]
                                    [--model resnet50|mobilenetv2] [--limit none|AVX512_CORE|AVX2]

Processors without VNNI saturate sums of two products of bytes, so that weights are stored within
±63 there. `ONEDNN_MAX_CPU_ISA` makes oneDNN, which PyTorch and TensorFlow compute INT8 with, behave
as on such a processor; it has to be set when a process starts, so each measurement has a process of
its own. ONNX Runtime does not mind the variable and is measured once, as the processor is.

ResNet-50 and MobileNetV2: all that can be in INT8 is, after calibration on 16 images. Said are the
speed-up over the framework's FP32 and the signal-to-noise ratio beside it on images that were not
seen; the same of weights stored in the full range, whatever the processor makes of them; and the
size and the speed of what is converted for `portable`, as a share of what is for this machine.

All runs are taken in turn, on one thread. Ratios are of first deciles, which other processes leave
alone; beside them stands the interval that holds them with a confidence of 95 %. Absolute times of
a shared machine mean little.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import sys
import warnings
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table

from benchmarks.measurement.children import run_child
from benchmarks.measurement.tables import make_table
from benchmarks.nets import vision_nets
from neural_mp.adaptors.loaded_model import AnyModel, LoadedModel
from neural_mp.adaptors.registry import adaptor_for
from neural_mp.core.hardware import PORTABLE, detect
from neural_mp.core.precision import Precision
from neural_mp.profiling import Ratio, estimate_latency_ratio, time_interleaved_rounds
from neural_mp.tuning.measurement.sqnr import output_sqnr_db

FRAMEWORKS = ("pytorch", "tensorflow", "onnxrt")
MODELS = ("resnet50", "mobilenetv2")
NO_LIMIT = "none"
LIMITS = (NO_LIMIT, "AVX512_CORE", "AVX2")
LIMIT_VARIABLE = "ONEDNN_MAX_CPU_ISA"
#: Rounds that are counted, at most.
ROUNDS = 31
CALIBRATION, UNSEEN, STEP = 16, 8, 4
#: What models are converted for, one beside the other; `vnni` leaves weights their full range.
NATIVE, FULL_RANGE = "this", "vnni"
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


def quiet() -> None:
    """Hide what frameworks say of packages that are not here, and of themselves."""
    for name in ("torch.onnx", "neural_mp.adaptors.tensorflow"):
        logging.getLogger(name).setLevel(logging.ERROR)
    warnings.filterwarnings("ignore", category=FutureWarning)


def words_of(speedup: Ratio) -> dict[str, float]:
    return {"value": speedup.value, "low": speedup.low, "high": speedup.high}


def timed(models: list[AnyModel], batch: np.ndarray, **options: Any) -> list[list[float]]:
    runs: list[Callable[[], Any]] = [partial(model, batch) for model in models]
    return time_interleaved_rounds(runs, **options)


def vision(framework: str, name: str, sizes: list[int]) -> dict[str, Any]:
    """A model in FP32, in INT8 for this machine, for all, and with weights of the full range."""
    source = vision_nets.BUILD[framework](name)
    inputs = partial(vision_nets.inputs_for, framework)
    calibration = np.split(inputs(CALIBRATION, seed=1), CALIBRATION // STEP)
    unseen = np.split(inputs(UNSEEN, seed=2), UNSEEN // STEP)
    adaptor = adaptor_for(source)
    with adaptor.threads(1):
        model = LoadedModel(adaptor, adaptor.load(source, example=calibration[0]))
        forms: dict[str, AnyModel] = {}
        for target in (NATIVE, PORTABLE, FULL_RANGE):
            space = adaptor.space(model.held, detect().for_target(target))
            space = space.restricted_to([Precision.INT8])
            if not forms:
                observed = adaptor.observe(model.held, calibration, space)
            tunable = model.in_space(space).with_observations(observed)
            forms[target] = tunable.convert_by_plan(space.resolve(space.fastest_plan()))
        decibels = {t: output_sqnr_db(model, form, unseen) for t, form in forms.items()}
        speeds = {}
        for size in sizes:
            batch = inputs(size, seed=3)
            compared = [model, forms[NATIVE], forms[PORTABLE]]
            timings = timed(compared, batch, warmup=2, iterations=ROUNDS, time_limit=25)
            float_, native, portable = timings
            speeds[size] = {
                "int8": words_of(estimate_latency_ratio(native, float_).inverse),
                "portable": words_of(estimate_latency_ratio(portable, native).inverse),
            }
    return {
        "products": {str(k): str(p) for k, p in adaptor.int8_accumulation(detect()).items()},
        "decibels": decibels,
        "sizes": {target: form.size for target, form in forms.items()},
        "float_size": model.size,
        "speeds": speeds,
    }


def measure(framework: str, model: str, batches: str) -> None:
    """One measurement, in this process; prints what came of it."""
    quiet()
    print(json.dumps(vision(framework, model, [int(size) for size in batches.split(",")])))


def spread(found: dict[str, float]) -> str:
    return f"{found['value']:.2f} ({found['low']:.2f} to {found['high']:.2f})"


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
    frameworks: list[str], models: list[str], requested: str | None, batches: str
) -> Table:
    """All rows of ResNet-50 and MobileNetV2."""
    figures = ("× of FP32", "SQNR, dB", "full range", "portable", "speed of portable / here")
    words = ("framework", "limit", "products", "model", "batch")
    headings = (*words, *figures, "MB FP32 / here / portable")
    result = make_table("INT8 beside FP32", *headings, words=len(headings))
    for framework in frameworks:
        for limit in limits_for(framework, requested):
            for model in models:
                results = child(limit, framework, model, batches)
                for row in vision_rows(framework, limit, model, results):
                    print(" | ".join(row), file=sys.stderr, flush=True)
                    result.add_row(*row)
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--framework", choices=FRAMEWORKS, help="all by default")
    parser.add_argument("--model", choices=MODELS, help="all by default")
    parser.add_argument("--batches", default="1,8", help="batch sizes, with commas between")
    parser.add_argument("--limit", choices=LIMITS, help="of oneDNN; all by default")
    parser.add_argument("--child", nargs=3, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child:
        measure(*options.child)
        return
    console = Console() if sys.stdout.isatty() else Console(width=160)
    frameworks = [options.framework] if options.framework else list(FRAMEWORKS)
    models = [options.model] if options.model else list(MODELS)
    console.print(compare_vision(frameworks, models, options.limit, options.batches))


if __name__ == "__main__":
    main()
