"""Evaluation of a model's accuracy with the user's data and metrics."""

from __future__ import annotations

import logging
import math
import pickle
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from typing import Any

from neural_mp.adaptors.loaded_model import AnyModel
from neural_mp.common import Metric
from neural_mp.core.criterion import Deadline
from neural_mp.errors import MetricError, NeuralMPError, message_of
from neural_mp.runs.report import MetricFigures
from neural_mp.tuning.evaluation.accuracy_bounds import AccuracySpread, TextLosses
from neural_mp.tuning.evaluation.batches import Batches
from neural_mp.tuning.evaluation.early_stopping import RunningValues, is_check_due
from neural_mp.tuning.evaluation.metric_values import (
    MetricAggregation,
    MetricBatch,
    ResetWatch,
    check_reset,
    convert_to_scalar,
)
from neural_mp.tuning.evaluation.pass_contents import PassContents
from neural_mp.util.fingerprint import DigestingIterator, object_fingerprint
from neural_mp.util.pytree import batch_size_of
from neural_mp.util.system.memory import MemoryGuard
from neural_mp.util.token_masks import find_token_masks
from neural_mp.util.user_calls import UserCodeError, call_user

logger = logging.getLogger(__name__)


class NotShardableError(NeuralMPError):
    """An evaluation cannot be sharded; caught by its caller."""


class TargetOutOfReachError(Exception):
    """A candidate with this accuracy so far will miss the target; caught by the `PlanEvaluator`."""

    def __init__(self, accuracy: float) -> None:
        super().__init__()
        self.accuracy = accuracy


@dataclass
class Evaluator:
    """Evaluates models, and counts evaluations.

    Attributes:
        batches: the evaluation data; None if `eval_func` uses its own.
        metrics: metrics with their weights; the accuracy is their weighted sum, unless
            `aggregation` requires every metric to meet the target.
        eval_func: native or transferred model → float; used instead of data and metrics.
        postprocess: applied to `(predictions, labels)` before the metrics; its `reset`, if any, is
            called before each pass.
        label: name of the measured quantity; empty without a measurement.
        on_batch: called after every batch, for progress.
        warn: receives warnings of the data.
        evaluations: number of full passes.
        running: running accuracy of the latest pass; empty if the metrics do not support it.
        aggregation: aggregation of several metrics into one number.
        digesting: hashes the batches of a pass, if their digest is needed later.
        values: name → value in the latest pass; empty for a single number.
        contents: the data of the latest pass.
        expected: the data of FP32's pass, to which those of later passes must be equal; None before
            that pass.
        spread: spread of FP32's accuracy, if the model is random.
        resets: whether `reset` clears the metrics.
        fp32_losses: FP32's losses of the texts, for a metric of texts.
    """

    batches: Batches | None = None
    metrics: Sequence[tuple[Metric, float]] = ()
    eval_func: Callable[[Any], float] | None = None
    postprocess: Callable[[Any], Any] | None = None
    label: str = ""
    on_batch: Callable[[], None] = lambda: None
    warn: Callable[[str], None] = logger.warning
    evaluations: int = 0
    running: RunningValues = field(default_factory=RunningValues)
    aggregation: MetricAggregation = field(default_factory=MetricAggregation)
    values: Mapping[str, float] = field(default_factory=dict)
    digesting: DigestingIterator | None = None
    contents: PassContents = field(default_factory=PassContents)
    expected: PassContents | None = None
    spread: AccuracySpread = field(default_factory=AccuracySpread)
    resets: ResetWatch = field(default_factory=ResetWatch)
    fp32_losses: TextLosses | None = None

    @property
    def is_available(self) -> bool:
        """Whether accuracy can be evaluated."""
        return self.eval_func is not None or (self.batches is not None and bool(self.metrics))

    @property
    def batch_count(self) -> int | None:
        """Number of batches in one pass; None if unknown."""
        return None if self.batches is None else len(self.batches) or None

    @property
    def best_value(self) -> float | None:
        """The best possible accuracy; None if unknown."""
        total = 0.0
        for metric, weight in self.metrics:
            best: float | None = getattr(metric, "best_value", None)
            if best is None or weight < 0:
                return None
            total += weight * best
        return total

    def set_baseline(self, values: Mapping[str, float], require_all: bool) -> None:
        """Set FP32's values as reference of several metrics; require each if `require_all`."""
        self.aggregation = self.aggregation.with_baseline(values, require_all)

    @property
    def targets(self) -> Mapping[str, float]:
        """Name → worst value accepted, if each of several metrics must meet a target."""
        return self.aggregation.metric_targets() if self.aggregation.require_all else {}

    def metric_figures(self, values: Mapping[str, float] | None) -> dict[str, MetricFigures]:
        """Return name → figures of several metrics; without values, FP32's are the result."""
        aggregation, targets = self.aggregation, self.targets
        values = values or aggregation.baseline
        return {
            name: MetricFigures(
                baseline,
                values[name],
                targets.get(name),
                aggregation.get_metric_criterion(name).prefers_higher,
            )
            for name, baseline in aggregation.baseline.items()
            if name in values
        }

    @cached_property
    def processing_fingerprint(self) -> str | None:
        """Fingerprint of the processing of predictions and labels; None if unavailable."""
        if self.eval_func is not None or self.batches is None:
            return None  # `eval_func` reads its own data
        aggregation = self.aggregation.names, self.aggregation.require_all
        return object_fingerprint((list(self.metrics), self.postprocess, aggregation))

    def content_digest(self, deadline: Deadline) -> str | None:
        """Return a digest of all evaluation data, after reading them; None if unsupported."""
        assert self.batches is not None
        digesting = DigestingIterator()
        pairs = digesting.wrap_batches(self.batches.iterate_pairs())
        while call_user(next, pairs, None) is not None:
            self.on_batch()
            deadline.raise_if_passed()
        return digesting.data_digest

    def __call__(
        self,
        model: AnyModel,
        deadline: Deadline,
        will_miss: Callable[[RunningValues], bool] | None = None,
        reference: AnyModel | None = None,
    ) -> float:
        """Return the accuracy of a model, possibly NaN.

        Args:
            model: the model to evaluate.
            deadline: checked after every batch.
            will_miss: decides from the running values whether to stop.
            reference: the FP32 model, for metrics without labels; None if `model` is the FP32
                model.

        Raises:
            TargetOutOfReachError: `will_miss` returned True.
            DeadlineExceededError: the deadline passed before the data ended.
            UserCodeError: the user's code raised.
            MetricError: the metric's result is not a number.
            DataError: the data differ from those of FP32's pass.
        """
        deadline.raise_if_passed()
        self.values = {}
        if self.eval_func is not None:
            form = "eval_func(model)"
            value = call_user(self.eval_func, model.callable_object, form=form, kind=MetricError)
            result = self._score_results({"eval_func": value})
        else:
            result = self._evaluate_over_batches(
                model,
                deadline,
                will_miss or (lambda running: False),
                model if reference is None else reference,
            )
        self.evaluations += 1
        return result

    def _evaluate_over_batches(
        self,
        model: AnyModel,
        deadline: Deadline,
        will_miss: Callable[[RunningValues], bool],
        reference: AnyModel,
    ) -> float:
        self.running, unseen = RunningValues(), 0
        # A loss against a baseline has no running value.
        has_running_values = not self.aggregation.require_all and all(
            getattr(metric, "running", False) for metric, _ in self.metrics
        )
        batches = self._update_metrics(model, deadline, reference)
        for number, inputs in enumerate(batches, start=1):
            if number == 1:
                self.resets.handle_update(self.metrics)
            unseen += batch_size_of(inputs)
            if has_running_values and is_check_due(number, self.batch_count):
                self.running = self.running.with_batch(self._compute_running_accuracy(), unseen)
                unseen = 0
                if will_miss(self.running):
                    raise TargetOutOfReachError(self.running.values[-1])
        self._check_contents()
        accuracy = self._compute_current_accuracy()
        if has_running_values and unseen:  # end with the accuracy on all data
            self.running = self.running.with_batch(accuracy, unseen)
        return accuracy

    def _update_metrics(
        self, model: AnyModel, deadline: Deadline, reference: AnyModel, part: slice | None = None
    ) -> Iterator[Any]:
        """Update the metrics batch by batch, yielding the inputs of each batch after that."""
        assert self.batches is not None
        self._reset_metrics()
        if callable(reset := getattr(self.postprocess, "reset", None)):
            call_user(reset, form="postprocess.reset()", kind=MetricError)
        pairs, memory = self.batches.iterate_pairs(part), MemoryGuard(self.batches.name)
        self.contents = PassContents()
        if self.digesting is not None:
            pairs = self.digesting.wrap_batches(pairs)
        while (pair := call_user(next, pairs, None)) is not None:
            inputs, labels = pair
            number = self.batches.position
            self.contents = self.contents.with_batch(inputs, labels)
            self.contents.check_count(self.batches.name, self.expected)
            batch = MetricBatch(model(inputs), labels, f"batch {number} of {self.batches.name}")
            if model is reference:
                batch.check_values(is_first=number == 1)
            for metric, name, judged in self._batch_per_metric(batch, inputs, reference):
                update: Callable[..., Any] = metric.update
                if getattr(metric, "takes_mask", False) is True:
                    update = partial(update, mask=find_token_masks(inputs))
                judged.update_metric(update, name)
            self.on_batch()
            deadline.raise_if_passed()
            memory.check_memory(number)
            yield inputs

    def _batch_per_metric(
        self, given: MetricBatch, inputs: object, reference: AnyModel
    ) -> Iterator[tuple[Metric, str, MetricBatch]]:
        judged = self._postprocess_batch(given)
        decodes = getattr(self.postprocess, "applies_to_reference", False) is True
        for name, (metric, _) in zip(self.metric_names, self.metrics, strict=True):
            if getattr(metric, "compare_label", True) is not False:
                yield metric, name, judged
                continue
            compared, expected = given, replace(given, predictions=reference(inputs))
            if decodes:
                compared, expected = judged, self._postprocess_batch(expected)
            yield metric, name, replace(compared, labels=expected.predictions)

    def _postprocess_batch(self, batch: MetricBatch) -> MetricBatch:
        return batch if self.postprocess is None else batch.apply_postprocess(self.postprocess)

    def _check_contents(self) -> None:
        """Raise `DataError` if the data of a complete pass are not those of FP32's pass."""
        if self.expected is not None and (batches := self.batches) is not None:
            warning = self.contents.check_equal(batches.name, self.expected, batches.drops_last)
            if warning:
                self.warn(warning)

    def check_resets(self, model: AnyModel) -> None:
        """Raise `MetricError` if `reset` does not clear every metric; called after a pass."""
        if self.eval_func is not None or self.batches is None:
            return
        self._reset_metrics()
        if self.resets.suspects:
            inputs, labels = self.batches.first_pair
            batch = MetricBatch(model(inputs), labels, f"batch 1 of {self.batches.name}")
            judged_batches = self._batch_per_metric(batch, inputs, model)
            for index, (metric, name, judged) in enumerate(judged_batches):
                if index in self.resets.suspects:
                    check_reset(metric, name, judged)

    def _reset_metrics(self) -> None:
        for name, (metric, _) in zip(self.metric_names, self.metrics, strict=True):
            call_user(metric.reset, form=f"{name}.reset()", kind=MetricError)
        self.resets.handle_reset(self.metrics)

    def metric_states(
        self, model: AnyModel, deadline: Deadline, part: slice, reference: AnyModel
    ) -> bytes:
        """Return the metrics after a slice of the batches, as input of `merge_shards`.

        Arguments and errors are those of an evaluation, and:

        Raises:
            NotShardableError: the order of batches differs here, or a metric cannot be pickled.
        """
        assert self.batches is not None
        deadline.raise_if_passed()
        if call_user(self.batches.first_batch_differs):
            raise NotShardableError(
                "the first batch of the evaluation data differs between processes"
            )
        for _ in self._update_metrics(model, deadline, reference, part):
            pass
        import cloudpickle

        try:
            packed: bytes = cloudpickle.dumps(([m for m, _ in self.metrics], self.contents))
        except Exception as error:
            # User metrics may raise anything while being pickled.
            raise NotShardableError(
                f"the state of a metric cannot be pickled: {type(error).__name__}: "
                f"{message_of(error)}"
            ) from error
        return packed

    def merge_shards(self, parts: Sequence[bytes]) -> float:
        """Return the accuracy, possibly NaN, from the `metric_states` of all shards in order."""
        self.values, self.running = {}, RunningValues()
        self._reset_metrics()
        self.contents = PassContents()
        for part in parts:
            shard_metrics, contents = call_user(pickle.loads, part)
            self.contents += contents
            for (metric, _), shard_metric in zip(self.metrics, shard_metrics, strict=True):
                call_user(metric.merge, shard_metric)  # type: ignore[attr-defined]
        self._check_contents()
        accuracy = self._compute_current_accuracy()
        self.evaluations += 1
        return accuracy

    def _compute_current_accuracy(self) -> float:
        return self._score_results(self._collect_metric_results())

    @property
    def metric_names(self) -> list[str]:
        """Unique names of the metrics."""
        classes = [type(metric).__name__ for metric, _ in self.metrics]
        names = list(self.aggregation.names or classes)
        if len(set(names)) < len(names):  # not named by the user
            names = [f"{name} {index}" for index, name in enumerate(names, start=1)]
        return names

    def _collect_metric_results(self) -> dict[str, Any]:
        return {
            name: call_user(metric.result, form=f"{name}.result()", kind=MetricError)
            for name, (metric, _) in zip(self.metric_names, self.metrics, strict=True)
        }

    def _score_results(self, results: Mapping[str, Any]) -> float:
        """Return the single number of results, each a number or several by name."""
        results = self._unwrap_single_value(results)
        values: dict[str, float] = {}
        for name, result in results.items():
            if isinstance(result, Mapping):
                if not result:
                    raise MetricError(f"{name} must return a number, got an empty dict")
                start = "" if len(results) == 1 else f"{name} "
                values |= {
                    f"{start}{key}": convert_to_scalar(part, name) for key, part in result.items()
                }
            else:
                values[name] = convert_to_scalar(result, name)
        if any(isinstance(result, Mapping) for result in results.values()):
            # Named parts have no weights.
            self.aggregation = replace(self.aggregation, require_all=True)
        self.values = values if len(values) > 1 or self.aggregation.require_all else {}
        if self.aggregation.require_all:
            return self.aggregation.aggregate_score(values)
        weights = [1.0] if self.eval_func else [weight for _, weight in self.metrics]
        return sum(weight * value for weight, value in zip(weights, values.values(), strict=True))

    def _unwrap_single_value(self, results: Mapping[str, Any]) -> Mapping[str, Any]:
        """Return the only result as a number if the result is a dict of one number.

        A name in the other direction (`{"mse": …}` of a function of unknown direction) stays, and
        is scored in the direction of the name.
        """
        ((name, result),) = results.items() if len(results) == 1 else (("", None),)
        if not isinstance(result, Mapping) or len(result) != 1:
            return results
        ((key, value),) = result.items()
        higher = self.aggregation.direction(key)
        return {name: value} if higher is self.aggregation.criterion.prefers_higher else results

    def _compute_running_accuracy(self) -> float:
        """Return the running accuracy; NaN if not yet defined."""
        try:
            results = self._collect_metric_results()
            if any(isinstance(result, Mapping) for result in results.values()):
                return math.nan  # the score is a loss against a baseline
            return self._score_results(results)
        except (UserCodeError, MetricError) as error:
            if isinstance(error, UserCodeError) and not isinstance(error.error, Exception):
                raise  # must end the process
            return math.nan  # e.g. AUC of a single class
