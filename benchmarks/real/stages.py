"""The steps of the bench, each run in a process of its own, and the table of their rows."""

from __future__ import annotations

import json
import tempfile
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from rich.table import Table

from benchmarks.measurement.clock import peak_memory
from benchmarks.measurement.tables import markdown_table, sectioned_table, shown
from benchmarks.real import case_named
from benchmarks.real.case import Case, Metric, MissingPartError
from benchmarks.real.peers import PEERS, Run, graph_run, module_run, session_run
from neural_mp import AccuracyCriterion, MixedPrecision, load
from neural_mp.adaptors.transfer import transfer_model
from neural_mp.api.loading import load_source
from neural_mp.core.enums import SOURCE_RUNTIME
from neural_mp.profiling import time_interleaved_rounds

FP32, OURS = "FP32", "neural-mp"
#: Start of the names of a result with a chosen runtime, and of FP32 in another runtime.
CHOSEN, ELSEWHERE = "neural-mp, runtime=", "FP32 in "
HEADINGS = (
    "case",
    "",
    "accuracy",
    "trials",
    "INT8 ops",
    "× of FP32",
    "× of best FP32",
    "seconds",
    "peak memory, MB",
    "file, MB",
)
SAVED, REFERENCE, TARGET = "ours", "outputs.npz", "target.json"


@dataclass
class Row:
    """What is said of one model in one form; None where it is not known.

    Attributes:
        case: the model.
        way: `FP32`, ours, or the peer that made it.
        accuracy: on the test data.
        met: whether it meets the target.
        trials: plans tried.
        int8: integer kernels that run.
        speed, slowest, fastest: over FP32: of the medians, and of the quartiles.
        over_best: speed over the fastest FP32, in any runtime.
        seconds: of the whole conversion, evaluations included.
        megabytes: the most memory the process held.
        file: megabytes on disk.
        warnings: what the user was warned of.
        error: why there is no result.
    """

    case: str
    way: str
    accuracy: float | None = None
    met: bool | None = None
    trials: int | None = None
    int8: int | None = None
    speed: float | None = None
    slowest: float | None = None
    fastest: float | None = None
    over_best: float | None = None
    seconds: float | None = None
    megabytes: float | None = None
    file: float | None = None
    warnings: tuple[str, ...] = ()
    error: str | None = None

    def cells(self) -> list[str]:
        """As they are shown; of what failed, the reason in place of the accuracy."""
        accuracy = shown(self.accuracy, ".4f")
        if self.met is False:
            accuracy += ", below the target"
        speed = shown(self.speed, ".2f")
        if self.slowest is not None and self.fastest is not None:
            speed += f" ({self.slowest:.2f}…{self.fastest:.2f})"
        return [
            self.case,
            self.way,
            accuracy if self.error is None else self.error[:90],
            shown(self.trials, "d"),
            shown(self.int8, "d"),
            speed,
            shown(self.over_best, ".2f"),
            shown(self.seconds, ".0f"),
            shown(self.megabytes, ".0f"),
            shown(self.file, ".2f"),
        ]


def table_of(rows: Iterable[Row]) -> Table:
    """For a terminal."""
    lines = ((row.case, row.cells()) for row in rows)
    return sectioned_table("Pretrained models", HEADINGS, lines)


def markdown(rows: Iterable[Row]) -> str:
    """For a page."""
    return markdown_table(HEADINGS, (row.cells() for row in rows))


def integer_kernels(framework: str, model: Any) -> int:
    """Of a model as its adaptor holds it; of ONNX, of a file.

    In ONNX Runtime those of the graph that it makes when it loads the model; in the others those
    of the graph that runs, which their runtimes leave as it is.
    """
    if framework == "onnxrt":
        return sum(map(_is_integer, _nodes(optimized_graph(model))))
    if framework == "pytorch":
        graphs = [part.runnable.graph for part in model.parts.values()]
        return sum("onednn" in str(node.target) for graph in graphs for node in graph.nodes)
    return sum("Quantized" in node.op for node in model.graph.nodes.values())


def optimized_graph(file: str | Path) -> Any:
    """A `GraphProto` of its kernels, without the weights."""
    import onnx
    import onnxruntime

    with tempfile.TemporaryDirectory() as folder:
        options = onnxruntime.SessionOptions()
        options.log_severity_level = 4
        options.optimized_model_filepath = str(Path(folder) / "optimized.onnx")
        onnxruntime.InferenceSession(str(file), options, providers=["CPUExecutionProvider"])
        return onnx.load(options.optimized_model_filepath, load_external_data=False).graph


def _nodes(graph: Any) -> Any:
    for node in graph.node:
        yield node
        for attribute in node.attribute:
            if attribute.HasField("g"):
                yield from _nodes(attribute.g)


def _is_integer(node: Any) -> bool:
    kind = node.op_type
    if kind in ("QuantizeLinear", "DequantizeLinear", "DynamicQuantizeLinear"):
        return False
    return kind.startswith(("QLinear", "DynamicQuantize")) or "Integer" in kind


def begin(name: str, folder: Path) -> dict[str, Any]:
    """FP32 as its framework runs it, which sets the target; and which peers there are."""
    case = case_named(name)
    run, file = fp32(case, folder)
    accuracy = measured(case, run)
    target = accuracy * (1 - case.relative)
    (folder / TARGET).write_text(json.dumps(target))
    return {"row": {"accuracy": accuracy, "file": megabytes(file)}, "peers": case.peers}


def tune(name: str, folder: Path, runtime: str = SOURCE_RUNTIME) -> dict[str, Any]:
    """Ours, saved, with what it gives for the first batch."""
    started = time.perf_counter()
    case = case_named(name)
    converter = MixedPrecision()
    converter.model = case.source(folder)
    converter.metric = case.metric()
    converter.eval_dataloader = case.batches("test")
    converter.calib_dataloader = case.batches("calibration")
    converter.accuracy_criterion = AccuracyCriterion(case.relative)
    converter.workspace = folder / f"workspace-{runtime}"
    converter.runtime = runtime
    result = converter()
    seconds = time.perf_counter() - started
    saved = folder / f"{SAVED}-{runtime}"
    result.save(saved)
    # Before what follows, which no user does.
    megabytes_held, size = peak_memory() / 1e6, megabytes(saved)
    inputs, _ = case.batches("test").made[0]
    np.savez(saved / REFERENCE, *arrays(result(inputs)))
    in_source = result.framework == case.framework
    if in_source:
        check_plan(case, converter.model, result)
    return {
        "runtimes": [entry.framework for entry in result.report.runtimes if entry.latency],
        "framework": result.framework,
        "accuracy": result.report.accuracy,
        "met": meets(result.report.accuracy, folder),
        "trials": len(result.trials),
        "int8": integer_kernels(case.framework, _runnable(case, folder, result))
        if in_source
        else None,
        "seconds": seconds,
        "megabytes": megabytes_held,
        "file": size,
        "warnings": result.report.warnings,
    }


def _runnable(case: Case, folder: Path, result: Any) -> Any:
    """What is asked for its kernels: a file of ONNX, or the model as its adaptor holds it."""
    if case.framework != "onnxrt":
        return result.held
    result.save(folder / "ours.onnx")
    return folder / "ours.onnx"


def check_plan(case: Case, model: Any, result: Any) -> None:
    """What the plan says of an op is what the op is counted as."""
    planned: dict[str, dict[str, int]] = {}
    graph = result.adaptor.graph(result.adaptor.load(model, example=first_inputs(case)))
    for op, config in result.plan.items():
        by = planned.setdefault(graph[op].type, {})
        by[config.precision.value] = by.get(config.precision.value, 0) + 1
    for kind, by in planned.items():
        counted = result.report.op_counts[kind]
        for precision, count in by.items():
            if precision != "fp32" and counted.get(precision, 0) < count:
                raise SystemExit(f"the plan names {count} {kind} in {precision}, but {counted} run")


def load_again(name: str, folder: Path, runtime: str = SOURCE_RUNTIME) -> dict[str, Any]:
    """The saved model in this fresh process: the same numbers, bit by bit."""
    inputs, _ = case_named(name).batches("test").made[0]
    saved = folder / f"{SAVED}-{runtime}"
    outputs = arrays(load(saved)(inputs))
    expected = list(np.load(saved / REFERENCE).values())
    if [a.tobytes() for a in outputs] != [a.tobytes() for a in expected]:
        raise SystemExit("loaded in a fresh process, the model gives other numbers")
    return {}


def peer(name: str, folder: Path, tool: str) -> dict[str, Any]:
    """What another tool makes of the model."""
    started = time.perf_counter()
    case = case_named(name)
    run, file = PEERS[tool](case, folder)
    accuracy = measured(case, run)
    return {
        "accuracy": accuracy,
        "met": meets(accuracy, folder),
        "seconds": time.perf_counter() - started,
        "megabytes": peak_memory() / 1e6,
        "file": megabytes(file),
        "int8": integer_kernels(case.framework, file) if case.framework == "onnxrt" else None,
    }


def timed(name: str, folder: Path, *contenders: str) -> dict[str, Any]:
    """Way → its speed over FP32, and between which its quartiles lie."""
    case = case_named(name)
    runs = {FP32: fp32(case, folder)[0]}
    for contender in contenders:
        runs[contender] = _run_of(case, folder, contender)
    inputs = first_inputs(case)
    began = time.perf_counter()
    runs[FP32](inputs)
    rounds = int(np.clip(12 / (len(runs) * (time.perf_counter() - began)), 11, 201))
    timings = time_interleaved_rounds(
        [partial(run, inputs) for run in runs.values()], warmup=3, iterations=rounds
    )
    reference = np.asarray(timings[0])
    shares = {
        contender: np.quantile(reference / np.asarray(seconds), [0.5, 0.25, 0.75])
        for contender, seconds in zip(runs, timings, strict=True)
    }
    return {contender: list(map(float, quartiles)) for contender, quartiles in shares.items()}


def _run_of(case: Case, folder: Path, contender: str) -> Run:
    if contender == OURS:
        return ours(case, folder)
    if contender.startswith(CHOSEN):
        return load(folder / f"{SAVED}-{contender.removeprefix(CHOSEN)}")
    if contender.startswith(ELSEWHERE):
        source = load_source(case.source(folder), None, None, example=first_inputs(case))
        return transfer_model(source, contender.removeprefix(ELSEWHERE))
    run: Run = PEERS[contender](case, folder)[0]
    return run


def fp32(case: Case, folder: Path) -> tuple[Run, Path | int]:
    """The model as its own framework runs it; the file it lies in, or its size in bytes."""
    source = case.source(folder)
    if case.framework == "onnxrt":
        return session_run(source), Path(source)
    if case.framework == "pytorch":
        return module_run(source), sum(p.nbytes for p in source.parameters())
    if isinstance(source, str):
        return graph_run(source), Path(source)
    import tensorflow as tf

    function = tf.function(source, reduce_retracing=True)

    def run(inputs: Any) -> np.ndarray:
        arguments = list(inputs.values()) if isinstance(inputs, dict) else inputs
        return function(arguments, training=False).numpy()

    return run, sum(np.asarray(weight).nbytes for weight in source.weights)


def ours(case: Case, folder: Path) -> Run:
    """The saved result, run as its framework's own object where that is what users would do."""
    result = load(folder / f"{SAVED}-{SOURCE_RUNTIME}")
    if case.framework == "onnxrt":
        file = folder / "ours.onnx"
        result.save(file)
        return session_run(file)
    return module_run(result.model) if case.framework == "pytorch" else result


def measured(case: Case, run: Run) -> float:
    """The metric of the case, of what runs a batch."""
    metric: Metric = case.metric()
    metric.reset()
    for inputs, labels in case.batches("test"):
        metric.update(run(inputs), labels)
    return metric.result()


def meets(accuracy: float, folder: Path) -> bool:
    """Whether an accuracy is as good as the case asks for."""
    target: float = json.loads((folder / TARGET).read_text())
    return accuracy >= target


def first_inputs(case: Case) -> Any:
    """The inputs of the first test batch."""
    return case.batches("test").made[0][0]


def arrays(outputs: Any) -> Sequence[np.ndarray]:
    """The outputs as a list of arrays."""
    return [np.asarray(o) for o in (outputs if isinstance(outputs, list | tuple) else [outputs])]


def megabytes(file: Path | int) -> float:
    """Of a file, or of all in a folder."""
    if isinstance(file, int):
        return file / 1e6
    files = [file] if file.is_file() else [path for path in file.rglob("*") if path.is_file()]
    return sum(path.stat().st_size for path in files) / 1e6


def _reporting(stage: Callable[..., dict[str, Any]]) -> Callable[..., dict[str, Any]]:
    def run(*arguments: Any) -> dict[str, Any]:
        try:
            return stage(*arguments)
        except MissingPartError as error:
            return {"error": str(error)}

    return run


STAGES = {
    "begin": _reporting(begin),
    "tune": _reporting(tune),
    "load": _reporting(load_again),
    "peer": _reporting(peer),
    "time": _reporting(timed),
}
