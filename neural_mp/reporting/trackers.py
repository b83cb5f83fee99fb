"""Experiment trackers: a run of MLflow, Weights & Biases or TensorBoard for each tuning.

A trial is a step with accuracy, loss, speedup and further figures; the plan and the report of the
result are artefacts. Nothing is sent unless the option `track` is set, and then where the tracker's
own settings say.
"""

from __future__ import annotations

import json
import logging
import math
import os
import tempfile
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from neural_mp.core.enums import Tracker
from neural_mp.core.plan import PrecisionPlan
from neural_mp.core.trial import Trial
from neural_mp.data.option_checks import import_package
from neural_mp.errors import NeuralMPError, TuningError, one_line
from neural_mp.runs.report import Report
from neural_mp.tuning.listener import Listener

logger = logging.getLogger(__name__)

#: Name of the experiment or project, unless the tracker's environment variable names another.
PROJECT = "neural-mp"
Parameters = Mapping[str, str | float | bool]


class TrackedRun(ABC):
    """A run in a tracker."""

    @abstractmethod
    def log_values(self, values: Mapping[str, float], step: int) -> None:
        """Store numbers by name."""

    @abstractmethod
    def log_files(self, folder: Path) -> None:
        """Store the files of a folder."""

    @abstractmethod
    def end(self, succeeded: bool) -> None:
        """End the run."""


class _MlflowRun(TrackedRun):
    def __init__(self, place: str, parameters: Parameters) -> None:
        mlflow = import_package("mlflow", "track='mlflow'", "mlflow")
        self._client = mlflow.MlflowClient(place or None)
        name = os.environ.get("MLFLOW_EXPERIMENT_NAME", PROJECT)
        experiment = self._client.get_experiment_by_name(name)
        key = experiment.experiment_id if experiment else self._client.create_experiment(name)
        self._run = self._client.create_run(key, run_name=_name_run()).info.run_id
        for parameter, value in parameters.items():
            self._client.log_param(self._run, parameter, value)

    def log_values(self, values: Mapping[str, float], step: int) -> None:
        for name, value in values.items():
            self._client.log_metric(self._run, name, value, step=step)

    def log_files(self, folder: Path) -> None:
        self._client.log_artifacts(self._run, str(folder))

    def end(self, succeeded: bool) -> None:
        self._client.set_terminated(self._run, "FINISHED" if succeeded else "FAILED")


class _WandbRun(TrackedRun):
    def __init__(self, place: str, parameters: Parameters) -> None:
        wandb = import_package("wandb", "track='wandb'", "wandb")
        self._wandb = wandb
        project = place or os.environ.get("WANDB_PROJECT", PROJECT)
        settings = {"project": project, "name": _name_run(), "config": dict(parameters)}
        self._run = wandb.init(**settings, reinit="create_new")

    def log_values(self, values: Mapping[str, float], step: int) -> None:
        self._run.log(dict(values), step=step)

    def log_files(self, folder: Path) -> None:
        artifact = self._wandb.Artifact("tuning", type="result")
        artifact.add_dir(str(folder))
        self._run.log_artifact(artifact)

    def end(self, succeeded: bool) -> None:
        self._run.finish(exit_code=0 if succeeded else 1)


class _TensorboardRun(TrackedRun):
    def __init__(self, place: str, parameters: Parameters) -> None:
        needed = "track='tensorboard'"
        summary = "tensorboard.plugins.{}.summary_v2"
        self._scalars = import_package(summary.format("scalar"), needed, "tensorboard")
        self._texts = import_package(summary.format("text"), needed, "tensorboard")
        self._events = import_package("tensorboard.compat.proto.event_pb2", needed, "tensorboard")
        writers = import_package(
            "tensorboard.summary.writer.event_file_writer", needed, "tensorboard"
        )
        self._folder = Path(place or "runs") / _name_run()
        self._writer = writers.EventFileWriter(str(self._folder))
        rows = "\n".join(f"- {name}: {value}" for name, value in parameters.items())
        self._write(self._texts.text_pb("parameters", rows), 0)

    def _write(self, summary: Any, step: int) -> None:
        event = self._events.Event(wall_time=time.time(), step=step, summary=summary)
        self._writer.add_event(event)

    def log_values(self, values: Mapping[str, float], step: int) -> None:
        for name, value in values.items():
            self._write(self._scalars.scalar_pb(name, value), step)

    def log_files(self, folder: Path) -> None:
        for file in sorted(folder.iterdir()):
            content = file.read_text(encoding="utf-8")
            (self._folder / file.name).write_text(content, encoding="utf-8")
            if file.suffix != ".html":
                shown = "".join(f"    {line}\n" for line in content.splitlines())  # as code
                self._write(self._texts.text_pb(file.stem, shown), 0)

    def end(self, succeeded: bool) -> None:
        self._writer.close()


_RUNS: Mapping[Tracker, Callable[[str, Parameters], TrackedRun]] = {
    Tracker.MLFLOW: _MlflowRun,
    Tracker.WANDB: _WandbRun,
    Tracker.TENSORBOARD: _TensorboardRun,
}


def _name_run() -> str:
    return time.strftime("tuning-%Y%m%d-%H%M%S")


def start_tracked_run(track: str, parameters: Parameters) -> TrackedRun:
    """Start a run in a tracker.

    Args:
        track: value of the option, `mlflow` or `mlflow:PLACE`.
        parameters: options of the tuning.

    Raises:
        MissingFrameworkError: the tracker is not installed.
        TuningError: the tracker refuses the run.
    """
    name, _, place = track.partition(":")
    tracker = Tracker(name)
    try:
        return _RUNS[tracker](place, parameters)
    except NeuralMPError:
        raise
    except Exception as error:  # types of the package
        raise TuningError(f"track: {name} cannot start a run: {one_line(error)}") from error


class TrackingListener(Listener):
    """Listener that stores a tuning in a tracker.

    A tracker that fails later, for example without network, ends the tracking with a logged error,
    but not the tuning.

    Args:
        run: the run in the tracker.
    """

    def __init__(self, run: TrackedRun) -> None:
        self._run: TrackedRun | None = run
        self._folder = tempfile.TemporaryDirectory(prefix="neural-mp-")

    def _track(self, use: Callable[[TrackedRun], None]) -> None:
        """Pass the run to a call of the tracker; the tracking ends if that fails."""
        if self._run is None:
            return
        try:
            use(self._run)
        except Exception:
            self._run = None
            logger.exception("the tracker failed; the tuning goes on without")

    def _log(self, values: Mapping[str, float | None], step: int) -> None:
        numbers = {
            name: float(value)
            for name, value in values.items()
            if value is not None and math.isfinite(value)
        }
        self._track(lambda run: run.log_values(numbers, step))

    def baseline(self, accuracy: float, target: float) -> None:
        """Store the accuracy of the given model and the target as step 0."""
        self._log({"baseline_accuracy": accuracy, "target": target}, 0)

    def trial(self, trial: Trial, speedup: float | None) -> None:
        """Store a trial as step `trial.number` + 1."""
        figures = {
            "accuracy": trial.accuracy,
            "loss": trial.loss,
            "speedup": speedup,
            "seconds": trial.seconds,
            "met": float(trial.met),
        }
        metrics = {f"metrics/{name}": value for name, value in trial.metrics.items()}
        self._log(figures | dict(trial.objectives) | metrics, trial.number + 1)

    def plan(self, plan: PrecisionPlan) -> None:
        """Write the plan of the result for `result`."""
        plan.save(Path(self._folder.name) / "plan.yaml")

    def result(self, report: Report, met: bool | None) -> None:
        """Store the figures, the plan and the report of the result, and end the run."""
        folder = Path(self._folder.name)
        figures = {
            "result/accuracy": report.accuracy,
            "result/speedup": report.speedup,
            "result/size": report.size,
            "result/met": None if met is None else float(met),
        }
        self._log(figures, 0)
        text = json.dumps(report.to_dict(), indent=1, default=str)
        (folder / "report.json").write_text(text, encoding="utf-8")
        if report.record is not None:
            report.save_html(folder / "report.html")
        self._track(lambda run: run.log_files(folder))
        self._end(succeeded=True)

    def failure(self, error: BaseException) -> None:
        """End the run as failed."""
        self._end(succeeded=False)

    def _end(self, succeeded: bool) -> None:
        self._track(lambda run: run.end(succeeded))
        self._run = None
        self._folder.cleanup()
