"""Evaluation of one plan: conversion, pass over the user's data, check of the accuracy."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np

from neural_mp.adaptors.loaded_model import AnyModel, AnyTunableModel
from neural_mp.core.criterion import AccuracyCriterion, Deadline, DeadlineExceededError
from neural_mp.core.trial import Outcome
from neural_mp.errors import DataError, MetricError, message_of
from neural_mp.space import ResolvedPlan
from neural_mp.tuning.evaluation.accuracy_bounds import TextLosses, metric_of_texts
from neural_mp.tuning.evaluation.early_stopping import RunningValues, will_miss_target
from neural_mp.tuning.evaluation.evaluator import (
    Evaluator,
    NotShardableError,
    TargetOutOfReachError,
)
from neural_mp.tuning.evaluation.sharding import Shard, ShardResult
from neural_mp.util.user_calls import UserCodeError

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class PlanEvaluation:
    """Result of evaluating a plan.

    Attributes:
        outcome: whether the plan met or missed the accuracy target, was stopped, or failed.
        accuracy: value of the user's metric, if a number.
        error: error of a failed plan; for NaN or Inf, the op of their origin.
        seconds: duration.
        metrics: name → value, if several metrics were evaluated.
        node: name of the machine of the evaluation, or of the machines of its shards; empty for
            this machine.
        bound: 99 % bound of the accuracy on other texts, for a metric of texts.
    """

    outcome: Outcome
    accuracy: float | None = None
    error: str | None = None
    seconds: float = 0.0
    metrics: Mapping[str, float] = field(default_factory=dict)
    node: str = ""
    bound: float | None = None


@dataclass(frozen=True)
class PlanEvaluator:
    """Evaluates plans against the FP32 baseline.

    Attributes:
        model: the FP32 model, calibrated.
        evaluator: measures accuracy.
        criterion: the accuracy criterion.
        baseline: FP32's accuracy.
        running: FP32's running accuracy; empty without early stopping.
        inputs: a batch for locating NaN and Inf.
        reserve: seconds that the learning of weights leaves for the evaluation.
    """

    model: AnyTunableModel
    evaluator: Evaluator
    criterion: AccuracyCriterion
    baseline: float
    running: RunningValues
    inputs: Any
    reserve: float = 0.0

    def convert_by_plan(self, plan: ResolvedPlan, deadline: Deadline) -> AnyModel:
        """Return the converted model; weights are learned until the end of the time limit."""
        with self.model.options.learning.limit.override_end(deadline.end_time - self.reserve):
            return self.model.convert_by_plan(plan)

    def __call__(
        self, plan: ResolvedPlan, deadline: Deadline
    ) -> tuple[PlanEvaluation, AnyModel | None]:
        """Evaluate a plan; return the evaluation and the model, if convertible.

        Raises:
            DeadlineExceededError: the time limit passed.
            UserCodeError: the user's code raised.
            MetricError: the metric's result is not a number.
            DataError: the data differ from those of the baseline, and do not fit the model.
        """
        started = time.perf_counter()
        model: AnyModel | None = None

        def build_evaluation(
            outcome: Outcome, accuracy: float | None, error: str | None
        ) -> PlanEvaluation:
            values = {} if outcome is Outcome.FAILED else self.evaluator.values
            seconds = time.perf_counter() - started
            bound = (
                self._compute_accuracy_bound() if outcome in (Outcome.MET, Outcome.MISSED) else None
            )
            return PlanEvaluation(outcome, accuracy, error, seconds, values, bound=bound)

        try:
            model = self.convert_by_plan(plan, deadline)
            self.model.check_fusions(model, self.inputs)
            accuracy, passes = self._evaluate_mean_accuracy(model, deadline)
        except TargetOutOfReachError as lost:
            return build_evaluation(
                Outcome.PRUNED, lost.accuracy, self._origin_of_nan(model)
            ), model
        except (DeadlineExceededError, UserCodeError, MetricError, DataError):
            raise
        except Exception as error:
            # Frameworks raise arbitrary errors, and a failed plan must not end the search.
            logger.debug("Evaluating a plan failed", exc_info=True)
            return build_evaluation(Outcome.FAILED, None, describe_error(error)), model
        judged = self._judge_accuracy(accuracy, lambda: self._origin_of_nan(model), passes)
        return build_evaluation(*judged), model

    def _evaluate_mean_accuracy(self, model: AnyModel, deadline: Deadline) -> tuple[float, int]:
        """Return the accuracy of a candidate, and the number of passes of which it is the mean."""
        evaluator = self.evaluator

        def evaluate_model() -> tuple[float, Mapping[str, float]]:
            accuracy = evaluator(model, deadline, self._make_stop_test(), self.model)
            return accuracy, dict(evaluator.values)

        result = evaluator.spread.repeat_evaluation(evaluate_model, self.criterion, self.baseline)
        evaluator.values = result.mean_values
        return result.mean_accuracy, len(result.passes)

    def evaluate_shard(self, shard: Shard, deadline: Deadline) -> PlanEvaluation | ShardResult:
        """Evaluate a shard; return its result, or a `PlanEvaluation` if the plan failed.

        Raises:
            NotShardableError: the evaluation cannot be sharded. Other errors as for a whole plan.
        """
        started = time.perf_counter()
        try:
            model = self.convert_by_plan(shard.plan, deadline)
            if shard.is_first:
                self.model.check_fusions(model, self.inputs)
            states = self.evaluator.metric_states(model, deadline, shard.batches, self.model)
            origin = self._origin_of_nan(model) if shard.is_first else None
        except (DeadlineExceededError, UserCodeError, NotShardableError, DataError):
            raise
        except Exception as error:
            # Frameworks raise arbitrary errors, as above.
            logger.debug("Evaluating a plan failed", exc_info=True)
            return PlanEvaluation(Outcome.FAILED, error=describe_error(error))
        return ShardResult(states, origin, time.perf_counter() - started)

    def merge_shards(self, results: Sequence[PlanEvaluation | ShardResult]) -> PlanEvaluation:
        """Return the evaluation of a plan from its shards in order; it fails if a shard failed."""
        shards = []
        for result in results:
            if isinstance(result, PlanEvaluation):
                return result
            shards.append(result)
        accuracy = self.evaluator.merge_shards([shard.states for shard in shards])
        nodes = ", ".join(dict.fromkeys(shard.node for shard in shards if shard.node))
        seconds = max(shard.seconds for shard in shards)
        judged = self._judge_accuracy(accuracy, lambda: shards[0].origin)
        return PlanEvaluation(
            *judged, seconds, self.evaluator.values, nodes, self._compute_accuracy_bound()
        )

    def _judge_accuracy(
        self, accuracy: float, origin_of_nan: Callable[[], str | None], passes: int = 1
    ) -> tuple[Outcome, float | None, str | None]:
        """Return outcome, comparable accuracy and error for an accuracy on all data."""
        if not math.isfinite(accuracy):
            origin = origin_of_nan()
            error = f"the accuracy is {accuracy}" + (f"; {origin}" if origin else "")
            return Outcome.MISSED, None, error
        spread = self.evaluator.spread
        on_others = self._compute_accuracy_bound()
        if self.criterion.met(self.baseline, accuracy) and on_others is not None:
            if self.criterion.met(self.baseline, on_others):
                return Outcome.MET, accuracy, None
            error = f"its 99 % bound on other texts, {on_others:.6g}, misses the target"
            return Outcome.MISSED, accuracy, error
        if spread.meets_target(self.criterion, self.baseline, accuracy, passes):
            return Outcome.MET, accuracy, None
        if self.criterion.met(self.baseline, accuracy):
            bound = spread.confidence_bound(self.criterion, accuracy, passes)
            error = f"the accuracy is random, and its 95 % confidence bound {bound:.6g} misses"
            return Outcome.MISSED, accuracy, error
        return Outcome.MISSED, accuracy, origin_of_nan()

    def _compute_accuracy_bound(self) -> float | None:
        """Return the confidence bound of the latest accuracy on other texts; None if unknown."""
        evaluator = self.evaluator
        texts = metric_of_texts(evaluator.metrics) if evaluator.eval_func is None else None
        if texts is None or evaluator.fp32_losses is None or evaluator.spread.deviation:
            return None
        loss = TextLosses.from_metric(texts).bound_mean_over(evaluator.fp32_losses)
        return None if loss is None else texts.at_loss(loss)

    def _make_stop_test(self) -> Callable[[RunningValues], bool] | None:
        if not self.running.values:
            return None
        best = self.evaluator.best_value
        return partial(will_miss_target, self.running, criterion=self.criterion, best=best)

    def _origin_of_nan(self, model: AnyModel | None) -> str | None:
        """Return the origin of NaN or Inf in a candidate's outputs, if FP32 has none, as a clause.

        NaN or Inf inside the model are no error: attention masks contain -Inf.
        """
        if model is None or _is_finite(model, self.inputs):
            return None
        if not _is_finite(self.model, self.inputs):
            return None
        op = model.first_non_finite(self.inputs)
        if op is None or self.model.first_non_finite(self.inputs) is not None:
            return "the outputs contain NaN or Inf"
        return f"NaN or Inf first occurs at op {op!r}"


def describe_error(error: Exception) -> str:
    """Return the error of a failed plan."""
    return f"{type(error).__name__}: {message_of(error)}"


def _is_finite(model: AnyModel, inputs: object) -> bool:
    return all(np.isfinite(array).all() for array in model.run_float_outputs(inputs))
