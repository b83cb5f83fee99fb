"""CPU seconds and peak memory of conversions to INT8 in every runtime, beside other tools.

    OMP_NUM_THREADS=1 python -m benchmarks.conversion [--models resnet50,bert,…] [--rounds 3]
        [--ways pytorch,onnxrt,…] [--samples 32] [--dynamic] [--peer PYTHON] [--inc PYTHON]

`convert` loads a model, calibrates it on samples in batches of 8, and converts all that can run in
INT8; with `--dynamic`, ranges are those of each run. `call` is a whole call without a metric,
which also compares the outputs with FP32 and measures both latencies. Beside them stand ONNX
Runtime's `quantize_static`, after its preprocessing, NNCF for OpenVINO (`--peer`), and Intel Neural
Compressor for PyTorch (`--inc`), which do not compare and measure. One process per conversion, the
ways in turn; imports count in memory only.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
from itertools import cycle, islice
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console

from benchmarks.measurement.children import ChildError, run_child
from benchmarks.measurement.clock import Clock, import_before_calls, peak_memory
from benchmarks.measurement.tables import make_table

BATCH = 8
RUNTIMES = ("pytorch", "onnxrt", "openvino", "tensorflow")
KINDS = ("convert", "call")
STATIC, NNCF, INC = "quantize_static", "nncf", "neural_compressor"
WAYS = (*RUNTIMES, STATIC, NNCF, INC)
_VARIABLES = {
    "TF_CPP_MIN_LOG_LEVEL": "3",
    "TF_NUM_INTRAOP_THREADS": "1",
    "TF_NUM_INTEROP_THREADS": "1",
}


def make(name: str, folder: Path, with_keras: bool) -> None:
    """Write the sources of a model, and calibration samples."""
    from benchmarks.nets.runtime_nets import CALIBRATED, CALIBRATION, case_of, write_source

    write_source(name, folder)
    if with_keras:
        from benchmarks.peers.runtime_lite import as_keras_takes, keras_net

        keras_net(name).export(folder / "keras", verbose=False)
        samples = case_of(name).draw(CALIBRATION, CALIBRATED)
        np.save(folder / "keras.npy", as_keras_takes(samples))


def read_source(runtime: str, name: str, folder: Path) -> tuple[Any, list[Any]]:
    """Return a model as users of a runtime have it, and batches of calibration samples."""
    if runtime == "tensorflow":
        samples = np.load(folder / "keras.npy")
        return folder / "keras", [samples[i : i + BATCH] for i in range(0, len(samples), BATCH)]
    arrays = dict(np.load(folder / "calibration.npz"))
    count = len(next(iter(arrays.values())))
    batches = [
        {port: array[start : start + BATCH] for port, array in arrays.items()}
        for start in range(0, count, BATCH)
    ]
    if runtime != "pytorch":
        return folder / "fp32.onnx", batches
    import torch

    from benchmarks.nets.runtime_nets import case_of

    inputs = [tuple(map(torch.from_numpy, batch.values())) for batch in batches]
    return case_of(name).build(), [call[0] if len(call) == 1 else call for call in inputs]


def measure(
    kind: str, runtime: str, name: str, folder: Path, is_dynamic: bool, samples: int
) -> dict[str, Any]:
    """Convert a model in this process; return seconds of the parts, and the peak of memory."""
    from neural_mp import MixedPrecision
    from neural_mp.adaptors.registry import get_adaptor_named
    from neural_mp.core.hardware import detect
    from neural_mp.core.precision import Precision

    (source, batches), clock = read_source(runtime, name, folder), Clock()
    adaptor = get_adaptor_named(runtime)
    if kind == "call":
        import_before_calls()
        # A workspace of its own: a second run would reuse measurements of the first.
        with tempfile.TemporaryDirectory() as workspace, clock.part("call"):
            options = {"approach": "dynamic"} if is_dynamic else {}
            MixedPrecision(
                model=source,
                framework=adaptor.framework,
                calib_dataloader=batches,
                workspace=workspace,
                **options,
            )()
        return {"parts": clock.parts, "peak_bytes": peak_memory()}
    with clock.part("load"):
        model = adaptor.load(source, example=batches[0])
        space = adaptor.space(model, detect()).restricted_to([Precision.INT8])
        space = space.with_int8(["dynamic"]) if is_dynamic else space
    with clock.part("calibrate"):
        observed = adaptor.observe(model, islice(cycle(batches), samples // BATCH), space)
    with clock.part("convert"):
        adaptor.convert(model, space.resolve(space.fastest_plan()), observed, space)
    return {"parts": clock.parts, "peak_bytes": peak_memory()}


def cost_of(
    way: str, kind: str, name: str, folder: Path, options: argparse.Namespace
) -> dict[str, Any]:
    """Return what one conversion takes, in a process of its own."""
    python, files = sys.executable, (folder / "fp32.onnx", folder / "calibration.npz")
    if way in RUNTIMES:
        module, arguments = "conversion", ("--child", kind, way, name, folder)
        arguments += ("--samples", options.samples, *["--dynamic"] * options.dynamic)
    elif way == INC:  # writes files where it stands
        module, arguments, python = "peers.inc_pytorch", (name,), options.inc
    elif way == NNCF:
        module, arguments = "peers.runtime_peers", ("nncf", *files, folder / "nncf.xml")
        python = options.peer
    else:
        module, arguments = "peers.runtime_peers", ("static", *files, folder / "static.onnx")
    return dict(run_child(module, *arguments, python=python, folder=folder, variables=_VARIABLES))


def compare(name: str, options: argparse.Namespace, console: Console) -> None:
    """Print the medians of all ways to convert a model."""
    missing = {NNCF: options.peer is None, INC: options.inc is None}
    ways = [
        (way, kind)
        for way in options.ways.split(",")
        for kind in (KINDS if way in RUNTIMES else KINDS[:1])
        if not missing.get(way)
    ]
    costs: dict[tuple[str, str], list[dict[str, Any]]] = {way: [] for way in ways}
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        with_keras = "tensorflow" * ("tensorflow" in options.ways)
        run_child("conversion", "--child", "make", with_keras, name, folder, variables=_VARIABLES)
        for way, kind in ways * options.rounds:
            try:
                costs[way, kind].append(cost_of(way, kind, name, folder, options))
            except ChildError as error:
                console.print(f"{way} {kind} failed: {str(error).splitlines()[-1]}")
    headings = ("", "", "CPU seconds", "seconds", "CPU seconds of", "peak MB")
    table = make_table(f"{name} to INT8, {options.rounds} rounds", *headings, words=2)
    for (way, kind), runs in costs.items():
        if not runs:
            continue
        totals = [
            statistics.median(sum(part[clock] for part in run["parts"].values()) for run in runs)
            for clock in (0, 1)
        ]
        parts = {
            part: statistics.median(run["parts"][part][0] for run in runs)
            for part in runs[0]["parts"]
        }
        shares = ", ".join(f"{part} {cpu:.2f}" for part, cpu in parts.items())
        peak = statistics.median(run["peak_bytes"] for run in runs) / 1e6
        seconds = (f"{total:.2f}" for total in totals)
        table.add_row(way, kind, *seconds, shares if len(parts) > 1 else "", f"{peak:.0f}")
    console.print(table)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--models", default="resnet50,bert")
    parser.add_argument("--ways", default=",".join(WAYS), help=f"of {', '.join(WAYS)}")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--samples", type=int, default=32, help="of `convert`, in turn")
    parser.add_argument("--dynamic", action="store_true", help="ranges from the values of each run")
    parser.add_argument("--peer", help="a Python with nncf, onnx and openvino")
    parser.add_argument("--inc", help="a Python with neural-compressor 2.x")
    parser.add_argument("--child", nargs=4, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child:
        kind, runtime, name, folder = options.child
        if kind == "make":
            make(name, Path(folder), bool(runtime))
        else:
            settings = options.dynamic, options.samples
            print(json.dumps(measure(kind, runtime, name, Path(folder), *settings)))
        return
    for name in options.models.split(","):
        compare(name, options, Console(width=120))


if __name__ == "__main__":
    main()
