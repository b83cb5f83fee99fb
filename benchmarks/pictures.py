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
from dataclasses import replace
from functools import partial
from pathlib import Path

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

from benchmarks.measurement.charts import Axis, Point, bars, scatter
from benchmarks.measurement.search_run import Case
from neural_mp import ExitPolicy, convert_with_plan
from neural_mp.api.optimized_model import OptimizedModel
from neural_mp.core import hardware
from neural_mp.profiling import time_interleaved_medians

STRATEGIES = ("mincut", "basic", "random")
FRAMEWORKS = ("pytorch", "tensorflow", "onnx")
MAX_TRIALS = 12
#: Phases of a run, in order; `probe` is part of `search`.
PHASES = ("load", "baseline", "calibrate", "search", "measure")


def case_of(framework: str, net: str) -> Case:
    return Case(framework, net, "int8", MAX_TRIALS, Path())


def tuned(case: Case, strategy: str) -> OptimizedModel:
    # The picture shows the accuracy on all of the data.
    with tempfile.TemporaryDirectory() as workspace:
        case = replace(case, workspace=Path(workspace))
        return case.tuned(strategy, ExitPolicy(max_trials=MAX_TRIALS), early_stopping=False)


def trials_picture(net: str, note: str) -> str:
    """Accuracy against latency, of every plan that was tried."""
    case = case_of("pytorch", net)
    source = case.source
    results = {strategy: tuned(case, strategy) for strategy in STRATEGIES}
    any_result = results[STRATEGIES[0]]
    batch, _ = next(iter(case.loader("test")))
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
        seconds = tuned(case_of(framework, net), "mincut").report.seconds
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
