"""`MixedPrecision`, the entry point for tuning."""

from __future__ import annotations

import logging
import sys
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from neural_mp.api.explain import write_log
from neural_mp.api.job_builder import JobBuilder
from neural_mp.api.optimized_model import OptimizedModel
from neural_mp.api.quantization_aware import with_training
from neural_mp.config import Options, Settings, load_settings, settings_from, trust_of
from neural_mp.config.options import OPTIONS
from neural_mp.core.criterion import Deadline
from neural_mp.core.enums import INT8_IO
from neural_mp.errors import ConfigurationError
from neural_mp.reporting import LiveListener, NotebookListener, is_notebook
from neural_mp.reporting.trackers import TrackingListener, start_tracked_run
from neural_mp.space import list_effective_ops
from neural_mp.tuning.job import TuningJob
from neural_mp.tuning.listener import Listener, ListenerGroup, RunLog
from neural_mp.tuning.measurement.sensitivity import (
    SensitivityReport,
    measure_decision_sensitivities,
)
from neural_mp.tuning.recording import TuningResult
from neural_mp.tuning.tuner import tune
from neural_mp.util.user_calls import ReraiseUserErrors
from neural_mp.util.verbosity import shows_progress


def check_io(options: Options, job: TuningJob) -> None:
    """Check that the result of a job can have the inputs and outputs of the options.

    Raises:
        ConfigurationError: the runtime has only float ones, or there is no calibration data.
    """
    if options.io != INT8_IO:
        return
    adaptor = job.model.adaptor
    if not adaptor.offers("with_integer_io"):
        raise ConfigurationError(
            f"io='int8' is for LiteRT, got a model in {adaptor.framework}; set framework or "
            f"runtime to 'litert', or remove io"
        )
    if job.calibration is None:
        raise ConfigurationError(
            "io='int8' requires data, which give the ranges of inputs and outputs; set "
            "calib_dataloader"
        )


def with_io(options: Options, job: TuningJob, result: TuningResult) -> TuningResult:
    """Return a result with the inputs and outputs of the options, evaluated again if these differ.

    The search has float ones, as callers from Python have: the accuracy of the returned result is
    that with integers.
    """
    if options.io != INT8_IO:
        return result
    assert job.calibration is not None
    held = result.model.adaptor.with_integer_io(result.model.held, job.calibration.iterate_inputs())
    model = replace(result.model, held=held)
    report = replace(result.report, conversions=model.conversions)
    if not job.evaluates_accuracy or report.baseline_accuracy is None:
        return replace(result, model=model, report=report)
    accuracy = job.evaluator(model, Deadline(), reference=result.fp32)
    met = result.met and job.settings.criterion.met(report.baseline_accuracy, accuracy)
    if result.met and not met:
        note = (
            f"with int8 inputs and outputs, the accuracy is {accuracy:.6g} instead of "
            f"{report.accuracy:.6g}, which misses the target; remove io for float ones"
        )
        report = replace(report, warnings=(*report.warnings, note))
    report = replace(report, accuracy=accuracy, evaluations=job.evaluator.evaluations)
    return replace(result, model=model, report=report, met=met)


logger = logging.getLogger(__name__)


class MixedPrecision(Options):
    """Search for the fastest version of a model that meets an accuracy target.

    Set the attributes, then call the object (or `fit()`). Most options can also come from a YAML
    file; attributes set in Python override the file.

    Args:
        conf: a YAML file, a dict with the same content, or loaded `Settings`.
        **options: values of the attributes of these names.

    Raises:
        ConfigurationError: an option is unknown or its value is invalid.
    """

    __eq__ = object.__eq__
    __hash__ = object.__hash__

    _settings: Settings

    def __init__(
        self, conf: str | Path | Mapping[str, Any] | Settings | None = None, **options: object
    ) -> None:
        self.configure(_settings_from_conf(conf))
        for name, value in options.items():
            setattr(self, name, value)

    def configure(self, settings: Settings) -> None:
        """Set all options to those of validated settings."""
        options = {  # users extend the mappings
            name: dict(value) if isinstance(value, dict) else value
            for name, value in vars(settings.options).items()
        }
        vars(self).clear()
        vars(self).update(options, trust=settings.trust)
        self._settings = settings

    def set_default(self, name: str, value: object) -> None:
        """Set an option, unless Python or the tuning file has set it."""
        if not self.is_set(name):
            setattr(self, name, value)

    @ReraiseUserErrors()
    def sensitivity(self, most: int | None = None) -> SensitivityReport:
        """Measure the sensitivity and the gain of each decision, without evaluations.

        Args:
            most: number of decisions to measure at the outputs, noisiest first, at the cost of one
                conversion each; default: all.

        Returns:
            The decisions under the plan of lowest precisions, highest degradation first.

        Raises:
            NeuralMPError: as for `fit`.
        """
        log = RunLog(self._check_listener_option())
        with log.loading_phase():
            job, _ = self._job_builder(log).build_job()
        return measure_decision_sensitivities(job, log, most)

    def _start_listener(self) -> Listener:
        """Return the listener of a run, with that of the tracker, if any."""
        shown = self._check_listener_option()
        track: str | None = OPTIONS["track"].check_value(self.track)
        if track is None:
            return shown
        return ListenerGroup(shown, TrackingListener(start_tracked_run(track, self._parameters())))

    def _parameters(self) -> dict[str, str | float | bool]:
        """Return the options that are set to plain values, without those that hold secrets."""
        set_options = {name: getattr(self, name) for name in OPTIONS if self.is_set(name)}
        return {
            name: value
            for name, value in set_options.items()
            if isinstance(value, str | int | float) and name not in ("storage", "workers", "track")
        }

    def _check_listener_option(self) -> Listener:
        # Used before the other options are checked.
        listener: Listener | None = OPTIONS["listener"].check_value(self.listener)
        if listener:
            return listener
        if not shows_progress():
            return Listener()
        if is_notebook():
            return NotebookListener()
        return LiveListener() if sys.stderr.isatty() else Listener()

    def _job_builder(self, log: RunLog) -> JobBuilder:
        settings = replace(self._settings, trust=trust_of(self.trust))
        return JobBuilder(self, settings, log)

    def __call__(self) -> OptimizedModel:
        """Tune and return the result; the same as `fit()`."""
        return self.fit()

    @ReraiseUserErrors()
    def fit(self) -> OptimizedModel:
        """Run the search.

        Returns:
            Always a usable model: the best that met the target, or the FP32 model, marked so.

        Raises:
            NeuralMPError: an option is invalid or does not fit the model. Exceptions of the user's
                metric or evaluation function are raised unchanged.
        """
        log = RunLog(self._start_listener())
        with log.announce_failure():
            return self._run(log)

    def _run(self, log: RunLog) -> OptimizedModel:
        with log.loading_phase():
            builder = self._job_builder(log)
            job, log_folder = builder.build_job()
            check_io(self, job)
            job = with_training(job, self, builder.settings)
        result = with_io(self, job, tune(job, log))
        plan = result.plan.plan
        report = replace(result.report, record=result.record)
        for line in report.converted:
            logger.info(line)
        if report.hint is not None:
            logger.info("%s", report.hint)
        if log_folder is not None:
            missing = write_log(log_folder, result.fp32, result.model, plan)
            report = replace(report, warnings=(*report.warnings, *missing))
        log.listener.plan(plan)
        log.listener.result(report, result.met)
        planned = list_effective_ops(result.fp32.space, result.plan)
        searched = (result.met, result.trials, result.observations)
        return OptimizedModel(result.model, plan, report, *searched, planned, self.label_key)


def _settings_from_conf(conf: object) -> Settings:
    if conf is None:
        return Settings()
    if isinstance(conf, Settings):
        return conf
    if isinstance(conf, Mapping):
        return settings_from(conf)
    if isinstance(conf, str | Path):
        return load_settings(conf)
    raise ConfigurationError(
        f"conf must be the path of a YAML file, or a dict with the same content, got "
        f"{type(conf).__name__}; give a model by its keyword: MixedPrecision(model=…)"
    )
