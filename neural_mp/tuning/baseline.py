"""FP32 baseline and calibration, measured before the search."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from neural_mp.adaptors.loaded_model import AnyTunableModel
from neural_mp.core.criterion import Deadline, DeadlineExceededError
from neural_mp.core.observations import KeptOutputs, Observations
from neural_mp.core.precision import Precision
from neural_mp.errors import MetricError
from neural_mp.io.measurement_cache import MeasurementCache
from neural_mp.runs.history import History
from neural_mp.runs.record_schema import BASELINE_FIGURES
from neural_mp.space import limit_to_reached
from neural_mp.tuning.evaluation.accuracy_bounds import (
    AccuracySpread,
    TextLosses,
    is_random,
    metric_of_texts,
    repeat_baseline,
)
from neural_mp.tuning.evaluation.calibration_batches import Calibration, sample_words
from neural_mp.tuning.evaluation.early_stopping import RunningValues
from neural_mp.tuning.evaluation.pass_contents import PassContents
from neural_mp.tuning.job import TuningJob
from neural_mp.tuning.listener import RunLog, describe_accuracy_target
from neural_mp.util.fingerprint import DigestingIterator
from neural_mp.util.text import format_count
from neural_mp.util.validators import keep_original_value, record

logger = logging.getLogger(__name__)

#: Maximum number of ops without calibration data named in a warning.
_MAX_NAMED_OPS = 3
#: Keys in the measurement cache.
_BASELINE, _CALIBRATION = "baseline", "calibration"
#: Key of the baseline's running accuracy in the run's history.
_BASELINE_RUNNING = "baseline running"


_KEPT = record(
    {"baseline": BASELINE_FIGURES, "running": keep_original_value(RunningValues.from_dict)}
)
#: Evaluations in FP32 that last as long as one of a converted model, at most; seconds to convert.
_EVALUATIONS, _CONVERSION = 2, 1.0


@dataclass(frozen=True)
class Baseline:
    """The FP32 model on the user's data.

    Attributes:
        accuracy: the value of the user's metric.
        seconds: duration of one evaluation.
        cpu_seconds: CPU time of one evaluation, over all threads, independent of other load.
        running: the running accuracy during the pass over the data.
    """

    accuracy: float
    seconds: float
    cpu_seconds: float
    running: RunningValues

    @property
    def reserved_seconds(self) -> float:
        """Seconds before a time limit that learning leaves to convert and evaluate its result."""
        return _EVALUATIONS * self.seconds + _CONVERSION


def obtain_measured_baseline(
    job: TuningJob, history: History, log: RunLog, deadline: Deadline
) -> Baseline:
    """Return the baseline from the run's history, or measure and store it.

    Raises:
        MetricError: the accuracy is not a number, or near 0.
        ConfigurationError: an absolute tolerance is half the accuracy or more.
        DeadlineExceededError: the time limit passed.
        UserCodeError: the user's code raised.
        DataError: the model does not run on the data.
    """
    entry = history.baseline
    if entry is None:
        entry, on_the_way = log.calls.run_part(
            lambda: (
                _load_cached_baseline(job, log, deadline) or _measure_baseline(job, log, deadline)
            )
        )
        history.cache.put_entry(_BASELINE_RUNNING, on_the_way)
        entry["target"] = job.settings.criterion.target(entry["accuracy"])
        history.baseline = entry
    criterion = job.settings.criterion
    if entry["accuracy"] == 0 and criterion.relative:
        log.add_warning(
            f"the {job.source_name} accuracy is 0, so the relative tolerance is applied as an "
            f"absolute one; check that the labels match the data"
        )
    job.evaluator.set_baseline(entry.get("metrics", {}), entry.get("every", False))
    if "contents" in entry:
        job.evaluator.expected = PassContents(**entry["contents"])
    if "losses" in entry:
        job.evaluator.fp32_losses = TextLosses(**{k: tuple(v) for k, v in entry["losses"].items()})
    if entry.get("deviation"):
        job.evaluator.spread = AccuracySpread(entry["deviation"], entry["passes"])
        log.add_warning(
            f"the {job.source_name} model returns other outputs for the same inputs (random ops, "
            f"e.g. dropout left active, or state kept between calls), so its accuracy is random: "
            f"mean {entry['accuracy']:.6g}, standard deviation {entry['deviation']:.3g} over "
            f"{entry['passes']} passes. A plan meets the target only if the 95 % confidence bound "
            f"of its accuracy does; put the model into evaluation mode for an exact comparison"
        )
    _show_target(job, entry["accuracy"], entry.get("metrics", {}), log)
    _, running = history.cache.get_entry(_BASELINE_RUNNING, RunningValues.from_dict)
    seconds = entry.get("seconds", 0.0)
    cpu_seconds = entry.get("cpu_seconds", seconds)
    return Baseline(entry["accuracy"], seconds, cpu_seconds, running or RunningValues())


def _show_target(
    job: TuningJob, accuracy: float, metrics: Mapping[str, float], log: RunLog
) -> None:
    """Check the baseline, and give the target in the unit of the metric to the listener.

    Raises:
        MetricError: the accuracy is near 0.
        ConfigurationError: an absolute tolerance is half the accuracy or more.
    """
    criterion, targets = job.settings.criterion, job.evaluator.targets
    for name in targets:
        job.evaluator.aggregation.get_metric_criterion(name).check_baseline(metrics[name], name)
    label, source = job.evaluator.label or "accuracy", job.source_name
    log.listener.source(source)
    if targets:
        log.listener.metrics(metrics, targets)
    else:
        criterion.check_baseline(accuracy, label)
        log.listener.metric(label, criterion)
        target = criterion.target(accuracy)
        tolerance = criterion.words(source)
        logger.info("%s", describe_accuracy_target(label, source, accuracy, target, tolerance))
    log.listener.baseline(accuracy, criterion.target(accuracy))


def _load_cached_baseline(
    job: TuningJob, log: RunLog, deadline: Deadline
) -> tuple[dict[str, Any], dict[str, Any]] | None:
    """Return baseline and running accuracy from an earlier run on the same data, if any."""
    evaluator = job.evaluator

    def compute_data_digest() -> str | None:
        with log.time_phase("baseline", "Reading the evaluation data", evaluator.batch_count):
            return evaluator.content_digest(deadline)

    _, entry = (
        _cache_of_baseline(job).scope_to(data=compute_data_digest).get_entry(_BASELINE, _KEPT)
    )
    if entry is None:
        return None
    log.cache_hit("FP32 accuracy")
    return entry["baseline"], entry["running"]


def _cache_of_baseline(job: TuningJob) -> MeasurementCache:
    """Return the cache of measurements that depend on the evaluation."""
    return job.cache.scope_to(metric=job.evaluator.processing_fingerprint)


def _measure_baseline(
    job: TuningJob, log: RunLog, deadline: Deadline
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Measure and cache the baseline; return baseline and running accuracy."""
    cache, evaluator = _cache_of_baseline(job), job.evaluator
    evaluator.digesting = DigestingIterator() if cache.enabled else None
    with log.time_phase("baseline", f"Evaluating {job.source_name}", evaluator.batch_count):
        started = time.process_time()
        accuracy = _evaluate_model(job, deadline)
        cpu_seconds = time.process_time() - started
    digesting, evaluator.digesting = evaluator.digesting, None
    if not math.isfinite(accuracy):
        values = ", ".join(f"{name} {value}" for name, value in job.evaluator.values.items())
        raise MetricError(
            f"the accuracy of the {job.source_name} model is {accuracy}"
            f"{f' ({values})' if values else ''}; "
            f"check the metric, the labels and the model's outputs"
        )
    texts = metric_of_texts(evaluator.metrics) if evaluator.eval_func is None else None
    losses = None if texts is None else TextLosses.from_metric(texts)
    evaluator.check_resets(job.model)
    entry: dict[str, Any] = {
        "accuracy": accuracy,
        "seconds": log.seconds["baseline"],
        "cpu_seconds": cpu_seconds,
    }
    if evaluator.batches is not None and evaluator.eval_func is None:
        entry["contents"] = evaluator.contents.to_dict()
    if evaluator.values:
        entry |= {"metrics": dict(evaluator.values), "every": evaluator.aggregation.require_all}
    if losses is not None:
        entry["losses"] = {name: list(values) for name, values in vars(losses).items()}
    running = evaluator.running.to_dict()
    if is_random(job.model, job.measurement.inputs):
        entry |= _repeat_evaluation(job, log, deadline, accuracy)
    if digesting is not None:
        scoped = cache.scope_to(data=digesting.data_digest)
        scoped.put_entry(_BASELINE, {"baseline": entry, "running": running})
    return entry, running


def _repeat_evaluation(
    job: TuningJob, log: RunLog, deadline: Deadline, accuracy: float
) -> dict[str, Any]:
    """Return mean and standard deviation of the accuracy of a random model in several passes."""
    evaluator, first = job.evaluator, dict(job.evaluator.values)
    evaluator.expected = evaluator.contents
    require_all = evaluator.aggregation.require_all
    evaluator.set_baseline(first, require_all)
    title = f"Evaluating {job.source_name} again, because its outputs are random"
    with log.time_phase("baseline", title, evaluator.batch_count):
        repeated = repeat_baseline(
            (accuracy, first), lambda: (_evaluate_model(job, deadline), dict(evaluator.values))
        )
    accuracies, mean, values = repeated.accuracies, repeated.mean_accuracy, repeated.mean_values
    if require_all:  # scores are relative to the baseline
        aggregation = evaluator.aggregation.with_baseline(values, require_all)
        accuracies = [aggregation.aggregate_score(metrics) for _, metrics in repeated.passes]
        mean = aggregation.aggregate_score(values)
    if len(accuracies) == 1:
        return {}
    deviation = float(np.std(accuracies, ddof=1))
    figures = {"accuracy": mean, "deviation": deviation, "passes": len(accuracies)}
    return {**figures, "metrics": values} if values else figures


def _evaluate_model(job: TuningJob, deadline: Deadline) -> float:
    batches = job.evaluator.batches
    if batches is None:
        return job.evaluator(job.model, deadline)
    with batches.blame_batch(passed_on=(DeadlineExceededError,)):
        return job.evaluator(job.model, deadline)


def calibrate_model(
    job: TuningJob,
    log: RunLog,
    deadline: Deadline,
    history: History | None = None,
    kept: KeptOutputs | None = None,
) -> AnyTunableModel:
    """Return the model with observations, from the run's history or a new calibration.

    Nothing is calibrated if no op supports INT8, or without data. The returned model's space
    excludes static INT8 for ops that calibration did not reach, and for tensors that held NaN or
    Inf. The outputs of a new calibration are `kept` if the framework offers it.

    Raises:
        DeadlineExceededError: the time limit passed.
        DataError: the model does not run on the data.
    """
    data = job.calibration
    if Precision.INT8 not in job.space.usable_precisions or data is None:
        return job.model
    stored = history.observations if history is not None else None
    if stored is not None and all(
        tensor.name in stored.ranges or tensor.name in stored.non_finite
        for tensor in job.space.tensors
    ):
        return _exclude_unreached_ops(job, stored, log)

    cache = job.cache.scope_to(
        space=job.space.digest, samples=sample_words(data.samples, data.seed)
    )
    observations = log.calls.run_part(
        lambda: (
            _load_cached_observations(cache, data, log, deadline)
            or _calibrate_and_cache(job, cache, data, log, deadline, kept)
        )
    )
    if history is not None:
        history.observations = observations
    return _exclude_unreached_ops(job, observations, log)


def _exclude_unreached_ops(
    job: TuningJob, observations: Observations, log: RunLog
) -> AnyTunableModel:
    """Return the model with observations, without INT8 where it has no range; warn of such ops.

    Branches that no sample takes have no ranges, nor have tensors that hold NaN or Inf.
    """
    for note in observations.notes:
        log.add_warning(note)
    model = job.model.with_observations(observations)
    space = limit_to_reached(model.space, observations.ranges)
    ops = [
        op for op in job.space.tunable_ops if space.capabilities[op] != model.space.capabilities[op]
    ]
    if not ops:
        return model
    named = ", ".join(map(repr, ops[:_MAX_NAMED_OPS])) + (
        ", …" if len(ops) > _MAX_NAMED_OPS else ""
    )
    log.add_warning(
        f"calibration did not reach {format_count(len(ops), 'op')} ({named}), for which static "
        "INT8 is excluded; give calibration data that covers every branch"
    )
    return job.model.in_space(space).with_observations(observations)


def _load_cached_observations(
    cache: MeasurementCache, data: Calibration, log: RunLog, deadline: Deadline
) -> Observations | None:
    def compute_data_digest() -> str | None:
        digesting = DigestingIterator()
        for _ in digesting.wrap_batches(data.iterate_inputs(deadline.raise_if_passed)):
            pass
        return digesting.data_digest

    with log.time_phase("calibrate"):
        _, observations = cache.scope_to(data=compute_data_digest).get_entry(
            _CALIBRATION, Observations.from_dict
        )
    if observations is not None:
        log.cache_hit("calibration")
    return observations


def _calibrate_and_cache(
    job: TuningJob,
    cache: MeasurementCache,
    data: Calibration,
    log: RunLog,
    deadline: Deadline,
    fp32_outputs: KeptOutputs | None,
) -> Observations:
    def handle_next_batch() -> None:
        deadline.raise_if_passed()
        log.report_step()

    digesting = DigestingIterator()
    inputs = data.iterate_inputs(handle_next_batch)
    blamed = data.batches.blame_batch(passed_on=(DeadlineExceededError,))
    with log.time_phase("calibrate", "Calibrating", data.batch_count), blamed:
        observations = job.model.with_calibration(
            digesting.wrap_batches(inputs) if cache.enabled else inputs, fp32_outputs
        ).observations
    cache.scope_to(data=digesting.data_digest).put_entry(_CALIBRATION, observations.to_dict())
    return observations
