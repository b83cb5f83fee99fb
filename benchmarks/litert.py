"""Small `.tflite` nets tuned to 1 %, beside INT8 of `TFLiteConverter` and AI Edge Quantizer.

    OMP_NUM_THREADS=1 python -m benchmarks.litert [--only ViT …] [--folder FOLDER]

The Keras nets are trained from a seed, by default the date; their weights are kept in the folder.
Metrics, milliseconds and multiplications are those of LiteRT's interpreter on the written files;
milliseconds are CPU time of a call with one sample in one thread, the least of interleaved rounds.
`trial` is the CPU seconds of a conversion to INT8 with the load of the result, without evaluation,
also of an untrained EfficientNet-B0 for 224 × 224.
"""

from __future__ import annotations

import argparse
import datetime
import json
import logging
import math
import os
import statistics
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

import keras
import numpy as np
from ai_edge_litert.interpreter import Interpreter
from rich.console import Console
from rich.table import Table

from benchmarks.measurement.tables import sectioned_table, shown
from benchmarks.nets.litert_nets import RECIPES, train_net
from benchmarks.real.case import Batches, Metric
from neural_mp import MixedPrecision
from neural_mp.adaptors.loaded_model import LoadedModel
from neural_mp.adaptors.registry import adaptor_for
from neural_mp.core.hardware import detect
from neural_mp.core.precision import Precision

FLOAT, OURS = "float", "neural-mp"
#: Untrained, of which the seconds of a trial are taken alone.
LARGE = "EfficientNet-B0 at 224"
ROUNDS, CALLS, WARMUP = 60, 20, 5
TRIALS = 5


def _iterate_samples(batches: Batches) -> Iterator[np.ndarray]:
    for inputs, _ in batches:
        yield from (inputs[i : i + 1] for i in range(len(inputs)))


def convert_by_tensorflow(net: keras.Model, content: bytes, calibration: Batches) -> bytes:
    """Return full INT8 by `TFLiteConverter`, with inputs and outputs in float."""
    import tensorflow as tf

    converter = tf.lite.TFLiteConverter.from_keras_model(net)
    converter.optimizations = [tf.lite.Optimize.DEFAULT]
    converter.representative_dataset = lambda: ([x] for x in _iterate_samples(calibration))
    converter.target_spec.supported_ops = [tf.lite.OpsSet.TFLITE_BUILTINS_INT8]
    return bytes(converter.convert())


def convert_by_quantizer(net: keras.Model, content: bytes, calibration: Batches) -> bytes:
    """Return the default static recipe of AI Edge Quantizer, with its own calibration."""
    from ai_edge_quantizer import quantizer, recipe

    ((key, ports),) = Interpreter(model_content=content).get_signature_list().items()
    samples = [{ports["inputs"][0]: x} for x in _iterate_samples(calibration)]
    tool = quantizer.Quantizer(content)
    tool.load_quantization_recipe(recipe.static_wi8_ai8())
    ranges: Any = tool.calibrate({key: samples}, num_threads=1)
    return bytes(tool.quantize(ranges, enable_progress_report=False).quantized_model)


PEERS: Mapping[str, Callable[[keras.Model, bytes, Batches], bytes]] = {
    "TFLiteConverter": convert_by_tensorflow,
    "AI Edge Quantizer": convert_by_quantizer,
}


class Program:
    """A file in a plain interpreter, with inputs and outputs in float."""

    def __init__(self, content: bytes, batch: int = 1) -> None:
        self.interpreter = Interpreter(model_content=content, num_threads=1)
        (self.input,) = self.interpreter.get_input_details()
        (self.output,) = self.interpreter.get_output_details()
        shape = (batch, *self.input["shape"][1:])
        self.interpreter.resize_tensor_input(self.input["index"], shape)
        self.interpreter.allocate_tensors()

    def __call__(self, inputs: np.ndarray) -> np.ndarray:
        """Return the outputs for a batch."""
        self.set_input(inputs)
        self.interpreter.invoke()
        values = self.interpreter.get_tensor(self.output["index"])
        if self.output["dtype"] == np.float32:
            return np.asarray(values)
        scale, zero = self.output["quantization"]
        return (values.astype(np.float32) - zero) * np.float32(scale)

    def set_input(self, inputs: np.ndarray) -> None:
        """Set the input of the next run."""
        if self.input["dtype"] != np.float32:
            scale, zero = self.input["quantization"]
            limits = np.iinfo(self.input["dtype"])
            rounded = np.round(inputs / scale) + zero
            inputs = rounded.clip(limits.min, limits.max).astype(self.input["dtype"])
        self.interpreter.set_tensor(self.input["index"], inputs)

    def count_macs(self) -> tuple[float, float]:
        """Return the multiply-adds of a call, and those whose factors are both in INT8."""
        self.interpreter.invoke()  # sizes that the graph computes are unknown before
        details = {tensor["index"]: tensor for tensor in self.interpreter.get_tensor_details()}
        total = in_int8 = 0.0
        for op in self.interpreter._get_ops_details():
            if op["op_name"] not in _FACTORS:
                continue
            tensors = [details.get(int(index)) for index in (*op["inputs"], *op["outputs"])]
            first, second = (tensors[place] for place in _FACTORS[op["op_name"]])
            macs = _count_op_macs(op["op_name"], first, second, tensors[-1])
            total += macs
            in_int8 += macs * (first["dtype"] == second["dtype"] == np.int8)
        return total, in_int8


#: Op → places of both factors among the inputs.
_FACTORS = {
    "CONV_2D": (0, 1),
    "DEPTHWISE_CONV_2D": (0, 1),
    "FULLY_CONNECTED": (0, 1),
    "BATCH_MATMUL": (0, 1),
}


def _count_op_macs(kind: str, first: Any, second: Any, output: Any) -> float:
    elements = math.prod(output["shape"])
    if kind == "DEPTHWISE_CONV_2D":
        return elements * math.prod(second["shape"][1:3])
    if kind != "BATCH_MATMUL":
        return elements * math.prod(second["shape"][1:])
    factors = math.prod(first["shape"]) * math.prod(second["shape"])
    return elements * math.sqrt(factors / elements / math.prod(output["shape"][:-2]))


@dataclass(frozen=True)
class Row:
    """The figures of one file of a net; None where there is none.

    Attributes:
        net, way: the net, and the tool.
        metric, lost: in the interpreter, and the loss as a fraction of FP32's metric.
        milliseconds, share: CPU time of a call; multiply-adds in INT8 as a fraction of all.
        met, evaluations, trial: whether the target was met, plans tried, CPU seconds of a trial
            besides evaluation.
        error: why there is no result.
    """

    net: str
    way: str
    metric: float | None = None
    lost: float | None = None
    milliseconds: float | None = None
    share: float | None = None
    met: bool | None = None
    evaluations: int | None = None
    trial: float | None = None
    error: str = ""


def measure_metric(content: bytes, batches: Batches, metric: Metric) -> float:
    """Return the metric of a file in a plain interpreter."""
    metric.reset()
    run = Program(content, batches.batch_size)
    for inputs, labels in batches:
        metric.update(run(inputs), labels)
    return metric.result()


def time_calls(contents: Mapping[str, bytes], sample: np.ndarray) -> dict[str, float]:
    """Return way → CPU milliseconds of a call, the least of interleaved rounds."""
    programs = {way: Program(content) for way, content in contents.items()}
    best = dict.fromkeys(programs, math.inf)
    for program in programs.values():
        program.set_input(sample)
    for step in range(WARMUP + ROUNDS):
        for way, program in programs.items():
            started = time.process_time()
            for _ in range(CALLS):
                program.interpreter.invoke()
            spent = time.process_time() - started
            if step >= WARMUP:
                best[way] = min(best[way], 1e3 * spent / CALLS)
    return best


def time_trials(content: bytes, calibration: Sequence[np.ndarray]) -> float:
    """Return the CPU seconds of a conversion to INT8 with the load of the result."""
    adaptor = adaptor_for(content)
    seconds = []
    with adaptor.threads(1):
        model = LoadedModel(adaptor, adaptor.load(content, example=calibration[0]))
        space = adaptor.space(model.held, detect()).restricted_to([Precision.INT8])
        observed = adaptor.observe(model.held, calibration, space)
        tunable = model.in_space(space).with_observations(observed)
        plan = space.fastest_plan()
        for op in list(plan)[:TRIALS]:  # a plan of its own for each conversion
            started = time.process_time()
            converted = tunable.convert_by_plan(space.resolve(plan.without([op])))
            adaptor.prepare(converted.held)
            seconds.append(time.process_time() - started)
    return statistics.median(seconds)


def convert_float(net: keras.Model) -> bytes:
    """Return the file of a net, as users write it."""
    import tensorflow as tf

    return bytes(tf.lite.TFLiteConverter.from_keras_model(net).convert())


def tune(content: bytes, name: str, options: argparse.Namespace) -> tuple[bytes, Row]:
    """Return the file that is tuned for the target, and what is said of the run."""
    recipe = RECIPES[name]
    with tempfile.TemporaryDirectory() as folder:
        result = MixedPrecision(
            model=content,
            metric=recipe.metric(),
            calib_dataloader=recipe.make_batches("calibration", options.seed),
            eval_dataloader=recipe.make_batches("test", options.seed),
            accuracy_criterion={"relative": options.tolerance},
            cache=False,
            workspace=folder,
        )()
        file = Path(folder, "tuned.tflite")
        result.save(file)
        row = Row(name, OURS, met=result.met, evaluations=len(result.trials))
        return file.read_bytes(), row


def measure_net(name: str, options: argparse.Namespace) -> list[Row]:
    """Return the figures of a net in float, by all peers and by ours."""
    recipe, net = RECIPES[name], train_net(name, options.seed, options.folder)
    calibration, test = (
        recipe.make_batches(part, options.seed) for part in ("calibration", "test")
    )
    content = convert_float(net)
    contents, rows = {FLOAT: content}, {FLOAT: Row(name, FLOAT)}
    for way, convert in PEERS.items():
        try:
            contents[way], rows[way] = convert(net, content, calibration), Row(name, way)
        except Exception as error:  # noqa: BLE001 – tools raise whatever their parts raise
            rows[way] = Row(name, way, error=f"{type(error).__name__}: {str(error)[:60]}")
    contents[OURS], rows[OURS] = tune(content, name, options)
    rows[OURS] = replace(rows[OURS], trial=time_trials(content, [x for x, _ in calibration]))
    milliseconds = time_calls(contents, next(iter(test))[0][:1])
    fp32 = measure_metric(content, test, recipe.metric())
    for way, written in contents.items():
        metric = measure_metric(written, test, recipe.metric())
        lost, met = (fp32 - metric) / fp32, rows[way].met
        macs, in_int8 = Program(written).count_macs()
        rows[way] = replace(
            rows[way],
            metric=metric,
            lost=lost,
            milliseconds=milliseconds[way],
            share=in_int8 / macs,
            met=lost <= options.tolerance and met is not False,
        )
    return list(rows.values())


def measure_large_trial() -> Row:
    """Return the seconds of a trial of an untrained EfficientNet-B0."""
    keras.utils.set_random_seed(0)
    content = convert_float(keras.applications.EfficientNetB0(weights=None))
    images = np.random.default_rng(0).uniform(0, 255, (8, 1, 224, 224, 3)).astype(np.float32)
    return Row(LARGE, OURS, trial=time_trials(content, list(images)))


def make_table(rows: Sequence[Row], options: argparse.Namespace) -> Table:
    """Return the table of all nets."""
    lines = []
    for row in rows:
        cells = [row.net, row.way, row.error] if row.error else _make_cells(row, rows)
        lines.append((row.net, cells))
    headings = ("net", "way", "met", "metric", "lost", "ms", "× float", "MACs in INT8")
    title = f"LiteRT, tolerated loss {options.tolerance:.1%}, seed {options.seed}"
    return sectioned_table(title, (*headings, "evaluations", "trial, s"), lines)


def _make_cells(row: Row, rows: Sequence[Row]) -> list[str]:
    base = next((r.milliseconds for r in rows if (r.net, r.way) == (row.net, FLOAT)), None)
    speed = base / row.milliseconds if base and row.milliseconds else None
    return [
        row.net,
        row.way,
        {True: "met", False: "missed", None: ""}[row.met],
        shown(row.metric, ".4f"),
        shown(row.lost, ".2%"),
        shown(row.milliseconds, ".3f"),
        shown(speed, ".2f"),
        shown(row.share, ".0%"),
        shown(row.evaluations, "d"),
        shown(row.trial, ".2f"),
    ]


def main() -> None:
    """Tune all nets and print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    today = int(datetime.date.today().strftime("%Y%m%d"))
    names = (*RECIPES, LARGE)
    parser.add_argument("--only", nargs="+", choices=names, default=names)
    parser.add_argument("--tolerance", type=float, default=0.01, help="of FP32's metric")
    parser.add_argument("--seed", type=int, default=today, help="by default, the date")
    parser.add_argument("--folder", type=Path, default=Path("litert_nets"), help="for weights")
    parser.add_argument("--json", type=Path, help="file for the figures, line by line")
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    rows: list[Row] = []
    for name in options.only:
        rows += [measure_large_trial()] if name == LARGE else measure_net(name, options)
        Console(width=150).print(make_table(rows, options))
    if options.json is not None:
        options.json.write_text("".join(json.dumps(asdict(row)) + "\n" for row in rows))


if __name__ == "__main__":
    main()
