"""Integer inputs and outputs of a result."""

from __future__ import annotations

from dataclasses import replace

from neural_mp.config import Options
from neural_mp.core.criterion import Deadline
from neural_mp.core.enums import INT8_IO
from neural_mp.errors import ConfigurationError
from neural_mp.tuning.job import TuningJob
from neural_mp.tuning.recording import TuningResult


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
