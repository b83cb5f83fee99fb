"""Detectors beside other tools, at the metric of the task.

    OMP_NUM_THREADS=1 python -m benchmarks.detectors [--only NET …] [--peer PYTHON]

The detectors are trained on 200 synthetic images from a seed; their files are kept in the folder.
Speeds are ratios of CPU seconds of interleaved calls to those of FP32 in ONNX Runtime, one thread.
`--peer` is an interpreter with NNCF and openvino; NNCF's file runs in OpenVINO by its own hint.
"""

from __future__ import annotations

import argparse
import json
import logging
import math
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime as ort
import openvino
import torch
from rich.console import Console
from rich.table import Table

from benchmarks.measurement.children import ChildError, run_child
from benchmarks.measurement.runtime_stages import NNCF, STATIC, repeat_call, run_in_turn
from benchmarks.measurement.tables import sectioned_table, shown
from benchmarks.nets.case import write_onnx
from benchmarks.nets.detector_nets import RECIPES, draw_scenes, train_detector
from benchmarks.peers.static_quantization import write_static
from neural_mp import MixedPrecision
from neural_mp.api.optimized_model import OptimizedModel
from neural_mp.core.precision import Precision
from neural_mp.metrics import Decode, build_metric

FLOAT, OURS = "FP32", "neural-mp"
#: Images of a call.
BATCH = 8
DECODERS = {
    "YOLO11n-shaped": Decode("yolo"),
    "YOLO26n-shaped": Decode("end2end"),
    "RT-DETR-shaped": Decode("detr", activation="sigmoid"),
}
#: Names of the outputs of an exported detector, if it has several.
OUTPUTS = {"RT-DETR-shaped": ["logits", "pred_boxes"]}
ROUNDS = 15
#: Feeds of a file → its outputs.
Program = Callable[[Mapping[str, np.ndarray]], list[np.ndarray]]


@dataclass(frozen=True)
class Row:
    """The figures of one way of a net; None where there is none.

    Attributes:
        net, way: the net, and the tool.
        metric: mAP over overlaps from 0.5 to 0.95, in points.
        lost: the loss, as a fraction of FP32's.
        speed: CPU seconds of FP32 in ONNX Runtime over those of this way.
        share: multiply-adds of convolutions in INT8, as a fraction.
        runtime: that of our result.
        error: why there is no result.
    """

    net: str
    way: str
    metric: float | None = None
    lost: float | None = None
    speed: float | None = None
    share: float | None = None
    runtime: str = ""
    error: str = ""


def open_file(file: Path) -> Program:
    """Return the call of a file with one thread: of ONNX Runtime, or NNCF's of OpenVINO."""
    if file.suffix == ".xml":
        settings = {"INFERENCE_NUM_THREADS": 1, "PERFORMANCE_HINT": "LATENCY"}
        compiled = openvino.Core().compile_model(file, "CPU", settings)
        return lambda feeds: list(compiled(feeds).values())
    options = ort.SessionOptions()
    options.intra_op_num_threads = 1
    options.log_severity_level = 4
    session = ort.InferenceSession(file, options, providers=["CPUExecutionProvider"])
    return lambda feeds: session.run(None, feeds)


def measure_speeds(
    runs: Mapping[str, Callable[[np.ndarray], Any]], images: np.ndarray
) -> dict[str, float]:
    """Return way → FP32's CPU seconds over its own, the medians of interleaved rounds."""
    timed = {way: repeat_call(run, images, time.process_time) for way, run in runs.items()}
    seconds = {way: np.median(rounds) for way, rounds in run_in_turn(timed, ROUNDS).items()}
    return {way: float(seconds[FLOAT] / measured) for way, measured in seconds.items()}


def write_peers(
    net: str, source: Path, feeds: list[Mapping[str, np.ndarray]], options: argparse.Namespace
) -> tuple[dict[str, Path], list[Row]]:
    """Return way → file of the peers of a net, and a row for each that fails."""
    ways: dict[str, tuple[Path, Callable[[Path], Any]]] = {
        STATIC: (
            source.with_suffix(".static.onnx"),
            lambda file: write_static(source, file, map(dict, feeds)),
        )
    }
    if options.peer is not None:
        data = source.with_suffix(".npz")
        np.savez(data, x=np.concatenate([feed["x"] for feed in feeds]))
        ways[NNCF] = (
            source.with_suffix(".xml"),
            lambda file: run_child(
                "peers.runtime_peers", "nncf", source, data, file, python=options.peer
            ),
        )
    files, failed = dict[str, Path](), list[Row]()
    for way, (file, write) in ways.items():
        try:
            write(file)
            files[way] = file
        except (Exception, ChildError) as error:  # noqa: BLE001 – tools raise whatever they do
            failed.append(Row(net, way, error=f"{type(error).__name__}: {str(error)[-90:]}"))
    return files, failed


def share_in_int8(result: OptimizedModel) -> float | None:
    """Return the multiply-adds of convolutions in INT8, as a fraction of all of theirs."""
    record = result.report.record
    macs = {} if record is None else record.multiply_adds
    types = {op: effective.type.lower() for op, effective in result.planned.items()}
    chosen = {op: count for op, count in macs.items() if "conv" in types.get(op, "")}
    total = sum(chosen.values())
    lowered = {op for op, e in result.planned.items() if e.precision is Precision.INT8}
    return sum(count for op, count in chosen.items() if op in lowered) / total if total else None


def _make_rows(
    net: str,
    metrics: Mapping[str, float],
    speeds: Mapping[str, float],
    result: OptimizedModel,
    failed: Sequence[Row],
) -> list[Row]:
    """Return the rows of a net."""
    base, rows = metrics[FLOAT], []
    for way, metric in metrics.items():
        rows.append(
            Row(
                net,
                way,
                metric,
                (base - metric) / base,
                speeds[way],
                share_in_int8(result) if way == OURS else None,
                result.framework if way == OURS else "",
            )
        )
    return [*rows, *failed]


def measure_detector(name: str, options: argparse.Namespace) -> list[Row]:
    """Return the mAP of a detector, in points."""
    source = options.folder / f"{name}.onnx"
    if not source.exists():
        net = train_detector(name, options.seed)
        names = {"output_names": OUTPUTS[name]} if name in OUTPUTS else {}
        write_onnx(net, {"x": draw_scenes(BATCH, 0)[0]}, source, **names)
    decode, batches = DECODERS[name], list(_scene_batches(options.seed + 1, 200))
    feeds = [{"x": images} for images, _ in _scene_batches(options.seed + 2, 64)]
    files, failed = write_peers(name, source, feeds, options)
    result = MixedPrecision(
        model=str(source),
        metric="mAP",
        postprocess=decode,
        eval_dataloader=batches,
        calib_dataloader=[(feed["x"], None) for feed in feeds],
        accuracy_criterion={"relative": 0.01},
        runtime="auto",
        precisions="int8",
        workspace=options.folder / "detectors",
        cache=False,
    )()
    runs: dict[str, Callable[[np.ndarray], Any]] = {
        way: _open_detector(name, path) for way, path in {FLOAT: source, **files}.items()
    }
    runs[OURS] = result
    metrics = {way: 100 * _mean_precision(run, decode, batches) for way, run in runs.items()}
    return _make_rows(name, metrics, measure_speeds(runs, batches[0][0]), result, failed)


def _open_detector(name: str, file: Path) -> Callable[[np.ndarray], Any]:
    """Return the call of a file with images, its outputs by name if there are several."""
    run, names = open_file(file), OUTPUTS.get(name)

    def detect(images: np.ndarray) -> Any:
        outputs = run({"x": images})
        return outputs[0] if names is None else dict(zip(names, outputs, strict=True))

    return detect


def _scene_batches(seed: int, count: int) -> list[tuple[np.ndarray, list[dict[str, Any]]]]:
    images, labels = draw_scenes(count, seed)
    return [(images[i : i + BATCH], labels[i : i + BATCH]) for i in range(0, count, BATCH)]


def _mean_precision(run: Callable[[np.ndarray], Any], decode: Decode, batches: Any) -> float:
    metric = build_metric("mAP", {})
    for images, labels in batches:
        metric.update(*decode((run(images), labels)))
    return float(metric.result())


def make_table(rows: Sequence[Row]) -> Table:
    """Return the table of all nets."""
    lines = []
    for row in rows:
        lost = None if row.lost is None or math.isnan(row.lost) else row.lost
        cells = [row.net, row.way, row.runtime or row.error, shown(row.metric, ".2f")]
        lines.append(
            (
                row.net,
                [*cells, shown(lost, ".2%"), shown(row.speed, ".2f"), shown(row.share, ".0%")],
            )
        )
    headings = ("net", "way", "runtime", "points", "lost", "× FP32", "MACs in INT8")
    return sectioned_table("Detectors, CPU seconds of one thread", headings, lines)


def main() -> None:
    """Tune all nets and print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", nargs="+", choices=[*RECIPES], default=[*RECIPES])
    parser.add_argument("--peer", help="interpreter of an environment with NNCF")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--folder", type=Path, default=Path("detector_files"), help="for weights")
    parser.add_argument("--json", type=Path, help="file for the figures, line by line")
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    torch.set_num_threads(1)
    options.folder.mkdir(parents=True, exist_ok=True)
    rows: list[Row] = []
    for name in options.only:
        new = measure_detector(name, options)
        rows += new
        Console(width=130).print(make_table(rows))
        if options.json is not None:
            with options.json.open("a", encoding="utf-8") as file:
                file.writelines(json.dumps(asdict(row)) + "\n" for row in new)


if __name__ == "__main__":
    main()
