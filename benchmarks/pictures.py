"""The pictures of the documentation, drawn from runs that are made here.

    python -m benchmarks.pictures [--net residual3] [--out docs/pictures]

`trials.svg`: every plan that three strategies tried on a net that is hostile to INT8, by accuracy
and by latency. All plans are converted once more and timed in one loop. `phases.svg`: where the
seconds of a run go, in every framework. The machine and the date stand in the pictures.
"""

from __future__ import annotations

import argparse
import datetime
import os
import tempfile
from functools import partial
from pathlib import Path
from typing import Any

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

from benchmarks.measurement.charts import Axis, Point, bars, scatter
from benchmarks.measurement.search_data import BATCH, Accuracy, Digits
from neural_mp import ExitPolicy, MixedPrecision, common, convert_with_plan
from neural_mp.api.optimized_model import OptimizedModel
from neural_mp.core import hardware
from neural_mp.profiling import time_interleaved_medians

STRATEGIES = ("mincut", "basic", "random")
FRAMEWORKS = ("pytorch", "tensorflow", "onnx")
MAX_TRIALS = 12
#: Phases of a run, in order; `probe` is part of `search`.
PHASES = ("load", "baseline", "calibrate", "search", "measure")


def source_of(framework: str, net: str) -> Any:
    """The net as a user of a framework has it."""
    if framework == "tensorflow":
        from benchmarks.nets.search_keras import keras_net

        return keras_net(net)
    from benchmarks.nets.search_nets import onnx_file, search_net

    return str(onnx_file(net)) if framework == "onnx" else search_net(net)


def loader(split: str, framework: str) -> common.DataLoader:
    return common.DataLoader(Digits(split, framework == "tensorflow"), batch_size=BATCH)


def tuned(framework: str, source: Any, strategy: str) -> OptimizedModel:
    converter = MixedPrecision()
    converter.model = source
    converter.precisions = "int8"
    converter.strategy = strategy
    converter.exit_policy = ExitPolicy(max_trials=MAX_TRIALS)
    converter.early_stopping = False  # the picture shows the accuracy on all of the data
    converter.metric = Accuracy()
    converter.eval_dataloader = loader("test", framework)
    converter.calib_dataloader = loader("train", framework)
    with tempfile.TemporaryDirectory() as workspace:
        converter.workspace = workspace
        return converter()


def trials_picture(net: str, note: str) -> str:
    """Accuracy against latency, of every plan that was tried."""
    source = source_of("pytorch", net)
    results = {strategy: tuned("pytorch", source, strategy) for strategy in STRATEGIES}
    any_result = results[STRATEGIES[0]]
    batch, _ = next(iter(loader("test", "pytorch")))
    baseline = any_result.adaptor.load(source, example=batch)
    tried = [
        (strategy, trial, trial.plan == result.plan)
        for strategy, result in results.items()
        for trial in result.trials
        if trial.accuracy is not None
    ]
    models = {
        trial.plan: convert_with_plan(
            source, trial.plan, observations=any_result.observations, inputs=(batch,)
        )
        for _, trial, _ in tried
    }
    runs = [
        partial(any_result.adaptor.predict, baseline, batch),
        *(partial(model, batch) for model in models.values()),
    ]
    in_float, *seconds = time_interleaved_medians(runs, warmup=3, iterations=51)
    shares = {plan: latency / in_float for plan, latency in zip(models, seconds, strict=True)}
    report = any_result.report
    points = [Point(1.0, report.baseline_accuracy, "FP32", large=True)] + [
        Point(shares[trial.plan], trial.accuracy, strategy, large=chosen)
        for strategy, trial, chosen in tried
    ]
    slowest = max(1.0, *(point.x for point in points))
    return scatter(
        f"Plans tried on '{net}': up and to the left is better",
        note,
        Axis("latency as a share of FP32's", 0, slowest * 1.05, [0, 0.2, 0.4, 0.6, 0.8, 1.0]),
        Axis("accuracy", 0, 1.05, [0, 0.2, 0.4, 0.6, 0.8, 1.0], ".1f"),
        points,
        {f"target {report.target:.3f}": report.target},
    )


def phases_picture(net: str, note: str) -> str:
    """Where the seconds of a run go."""
    rows = {}
    for framework in FRAMEWORKS:
        seconds = tuned(framework, source_of(framework, net), "mincut").report.seconds
        rows[framework] = {phase: seconds.get(phase, 0.0) for phase in PHASES}
    return bars(f"A run of the default search on '{net}'", note, "seconds", rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--net", default="residual3")
    parser.add_argument("--out", type=Path, default=Path("docs/pictures"))
    chosen = parser.parse_args()
    machine = hardware.detect()
    exact = "with" if machine.int8_accumulation.value == "exact" else "without"
    today = datetime.date.today()
    threads = os.environ.get("OMP_NUM_THREADS", "all")
    note = f"{machine.name}, {exact} exact products of bytes, {threads} thread(s), {today}"
    chosen.out.mkdir(parents=True, exist_ok=True)
    (chosen.out / "trials.svg").write_text(trials_picture(chosen.net, note), encoding="utf-8")
    (chosen.out / "phases.svg").write_text(phases_picture(chosen.net, note), encoding="utf-8")


if __name__ == "__main__":
    main()
