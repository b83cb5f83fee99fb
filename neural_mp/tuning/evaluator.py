"""A model's accuracy on the user's data, by the user's metric."""

from __future__ import annotations

import math
import pickle
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

from neural_mp.adaptors.loaded_model import AnyModel
from neural_mp.common import Metric
from neural_mp.errors import MetricError, NeuralMPError, message_of
from neural_mp.runs.report import MetricFigures
from neural_mp.tuning.batches import Batches
from neural_mp.tuning.early_stopping import RunningValues
from neural_mp.tuning.metric_values import MetricAggregation, MetricBatch, as_scalar
from neural_mp.util.digest import Witness
from neural_mp.util.fingerprint import object_fingerprint
from neural_mp.util.memory import MemoryGuard
from neural_mp.util.pytree import batch_size_of
from neural_mp.util.user_calls import UserCodeError, call_user

#: How often, in one pass, it is asked whether the evaluation is lost.
_EARLY_STOP_CHECKS = 32


class DeadlineExceededError(Exception):
    """The time limit passed; caught by the tuner, never seen by users."""


class NotSharedError(NeuralMPError):
    """An evaluation cannot be shared among workers after all; caught by whoever shares it."""


class TargetOutOfReachError(Exception):
    """What was seen of a candidate is enough to tell that it misses; caught by the assessor.

    Attributes:
        accuracy: on the data seen.
    """

    def __init__(self, accuracy: float) -> None:
        super().__init__()
        self.accuracy = accuracy


@dataclass
class Deadline:
    """A moment after which work stops at the next batch."""

    seconds: float = 0.0
    started: float = field(default_factory=time.monotonic)

    def check(self) -> None:
        """Raise `TimeUpError` if the time is up; zero seconds set no limit."""
        if self.seconds and time.monotonic() - self.started > self.seconds:
            raise DeadlineExceededError

    def left(self) -> float:
        """Seconds until then, as another `Deadline` takes them; 0 where there is no limit."""
        if not self.seconds:
            return 0.0
        return max(self.seconds - (time.monotonic() - self.started), 1e-6)


@dataclass
class Evaluator:
    """Evaluates models and counts how often it did.

    Attributes:
        batches: the evaluation data; None where `eval_func` brings its own.
        metrics: metrics with their weights; the accuracy is their weighted sum, unless `together`
            says that every one of them has to meet the target.
        eval_func: native model → float; used instead of data and metrics.
        postprocess: applied to `(predictions, labels)` before the metrics; if it has `reset`, that
            is called before each pass.
        label: what is measured, by name; empty where nothing is.
        on_batch: called after every batch, for progress.
        evaluations: full passes made so far.
        running: the accuracy on the way through the last pass; empty where the metrics do not
            allow for that.
        together: how the values of several metrics become one number.
        witness: watches the batches of a pass where it is to be known later what they held.
        values: name → value, of the last pass; empty where a single number was measured.
    """

    batches: Batches | None = None
    metrics: Sequence[tuple[Metric, float]] = ()
    eval_func: Callable[[Any], float] | None = None
    postprocess: Callable[[Any], Any] | None = None
    label: str = ""
    on_batch: Callable[[], None] = lambda: None
    evaluations: int = 0
    running: RunningValues = field(default_factory=RunningValues)
    together: MetricAggregation = field(default_factory=MetricAggregation)
    values: Mapping[str, float] = field(default_factory=dict)
    witness: Witness | None = None

    @property
    def available(self) -> bool:
        """Whether accuracy can be evaluated at all."""
        return self.eval_func is not None or (self.batches is not None and bool(self.metrics))

    @property
    def batch_count(self) -> int | None:
        """Batches in one pass; None where that is not known."""
        return None if self.batches is None else len(self.batches) or None

    @property
    def best_value(self) -> float | None:
        """The accuracy that no sample can better; None where that is not known."""
        total = 0.0
        for metric, weight in self.metrics:
            best: float | None = getattr(metric, "best_value", None)
            if best is None or weight < 0:
                return None
            total += weight * best
        return total

    def set_baseline(self, values: Mapping[str, float], every: bool) -> None:
        """Judge what comes by FP32's values, where there are several; by each if `every`."""
        self.together = self.together.with_baseline(values, every)

    @property
    def targets(self) -> Mapping[str, float]:
        """Name → the worst value accepted, where each of several metrics has to meet a target."""
        return self.together.targets() if self.together.require_all else {}

    def figures(self, values: Mapping[str, float] | None) -> dict[str, MetricFigures]:
        """Name → figures of several metrics; with no values, those of FP32 as the result."""
        together, targets = self.together, self.targets
        values = values or together.baseline
        return {
            name: MetricFigures(
                baseline,
                values[name],
                targets.get(name),
                together.criterion_of(name).prefers_higher,
            )
            for name, baseline in together.baseline.items()
            if name in values
        }

    @cached_property
    def identity(self) -> str | None:
        """A digest of what is done with predictions and labels; None where it cannot be told."""
        if self.eval_func is not None or self.batches is None:
            return None  # it reads data that nobody else sees
        together = self.together.names, self.together.require_all
        return object_fingerprint((list(self.metrics), self.postprocess, together))

    def content(self, deadline: Deadline) -> str | None:
        """A digest of all evaluation data, which are read for it; None where it cannot be told.

        Raises:
            TimeUpError: the deadline passed before the data ended.
            UserCodeError: the user's own code raised.
        """
        assert self.batches is not None
        witness = Witness()
        pairs = witness.watch(self.batches.pairs())
        while call_user(next, pairs, None) is not None:
            self.on_batch()
            deadline.check()
        return witness.digest

    def __call__(
        self,
        model: AnyModel,
        deadline: Deadline,
        is_lost: Callable[[RunningValues], bool] | None = None,
        reference: AnyModel | None = None,
    ) -> float:
        """The accuracy of a model; may be NaN.

        Args:
            model: what to evaluate.
            deadline: checked after every batch.
            is_lost: asked on the way whether to go on.
            reference: the FP32 model, with which metrics compare that take no labels; None where
                that is `model` itself.

        Raises:
            LostError: `is_lost` said so.
            TimeUpError: the deadline passed before the data ended.
            UserCodeError: the user's own code raised.
            MetricError: the metric's result is no number.
        """
        deadline.check()
        self.values = {}
        if self.eval_func is not None:
            form = "eval_func(model)"
            value = call_user(self.eval_func, model.native, form=form, kind=MetricError)
            result = self._scored({"eval_func": value}, [1.0])
        else:
            result = self._over_batches(
                model,
                deadline,
                is_lost or (lambda running: False),
                model if reference is None else reference,
            )
        self.evaluations += 1
        return result

    def _over_batches(
        self,
        model: AnyModel,
        deadline: Deadline,
        is_lost: Callable[[RunningValues], bool],
        reference: AnyModel,
    ) -> float:
        self.running, unseen = RunningValues(), 0
        looks = all(getattr(metric, "running", False) for metric, _ in self.metrics)
        looks = (
            looks and not self.together.require_all
        )  # a loss against a baseline is no running value
        batches = self._taken_in(model, deadline, reference)
        for number, inputs in enumerate(batches, start=1):
            unseen += batch_size_of(inputs)
            if looks and self._is_time_to_look(number):
                self.running = self.running.then(self._so_far(), unseen)
                unseen = 0
                if is_lost(self.running):
                    raise TargetOutOfReachError(self.running.values[-1])
        accuracy = self._accuracy()
        if looks and unseen:  # what is told apart later is the accuracy on all of the data
            self.running = self.running.then(accuracy, unseen)
        return accuracy

    def _taken_in(
        self, model: AnyModel, deadline: Deadline, reference: AnyModel, part: slice | None = None
    ) -> Iterator[Any]:
        """Have the metrics take in batch by batch, and give the inputs of each after that."""
        assert self.batches is not None
        self._reset()
        if callable(reset := getattr(self.postprocess, "reset", None)):
            call_user(reset, form="postprocess.reset()", kind=MetricError)
        pairs, memory = self.batches.pairs(part), MemoryGuard(self.batches.name)
        if self.witness is not None:
            pairs = self.witness.watch(pairs)
        names = self.names
        while (pair := call_user(next, pairs, None)) is not None:
            inputs, labels = pair
            number = self.batches.position
            given = MetricBatch(model(inputs), labels, f"batch {number} of {self.batches.name}")
            if model is reference:
                given.check(is_first=number == 1)
            judged = given
            if self.postprocess is not None:
                judged = given.postprocessed(self.postprocess)
            for name, (metric, _) in zip(names, self.metrics, strict=True):
                if getattr(metric, "compare_label", True) is False:
                    replace(given, labels=reference(inputs)).update(metric.update, name)
                else:
                    judged.update(metric.update, name)
            self.on_batch()
            deadline.check()
            memory.check(number)
            yield inputs

    def _reset(self) -> None:
        for name, (metric, _) in zip(self.names, self.metrics, strict=True):
            call_user(metric.reset, form=f"{name}.reset()", kind=MetricError)

    def states(
        self, model: AnyModel, deadline: Deadline, part: slice, reference: AnyModel
    ) -> bytes:
        """The metrics after some of the batches, as `merged` takes them.

        Args:
            model: what to evaluate.
            deadline: checked after every batch.
            part: which of the batches.
            reference: the FP32 model.

        Raises:
            NotSharedError: the batches have another order here, or a metric cannot be copied.
            TimeUpError: the deadline passed before the part ended.
            UserCodeError: the user's own code raised.
        """
        assert self.batches is not None
        deadline.check()
        if call_user(self.batches.begin_otherwise):
            raise NotSharedError("the evaluation data begin with another batch in another process")
        for _ in self._taken_in(model, deadline, reference, part):
            pass
        return _packed(self.metrics)

    def merge_shards(self, parts: Sequence[bytes]) -> float:
        """The accuracy over parts of the data that together are all of them; may be NaN.

        Args:
            parts: what `states` gave for each, in the order of the data.

        Raises:
            UserCodeError: the user's own code raised.
            MetricError: the metric's result is no number.
        """
        self.values, self.running = {}, RunningValues()
        self._reset()
        for part in parts:
            others = call_user(pickle.loads, part)
            for (metric, _), other in zip(self.metrics, others, strict=True):
                call_user(metric.merge, other)  # type: ignore[attr-defined]
        accuracy = self._accuracy()
        self.evaluations += 1
        return accuracy

    def _is_time_to_look(self, number: int) -> bool:
        """Whether to ask for the accuracy so far: results of some metrics take long."""
        assert self.batches is not None
        count = len(self.batches)
        if not count:
            return number.bit_count() == 1  # 1, 2, 4, 8, …: there may be any number of them
        return number % max(1, count // _EARLY_STOP_CHECKS) == 0

    def _accuracy(self) -> float:
        return self._scored(self._results(), [weight for _, weight in self.metrics])

    @property
    def names(self) -> list[str]:
        """What the metrics are called, each by a name of its own."""
        names = list(self.together.names or (type(metric).__name__ for metric, _ in self.metrics))
        if len(set(names)) < len(names):  # nobody named them
            names = [f"{name} {place}" for place, name in enumerate(names, start=1)]
        return names

    def _results(self) -> dict[str, Any]:
        """Name → what the metric gives now."""
        return {
            name: call_user(metric.result, form=f"{name}.result()", kind=MetricError)
            for name, (metric, _) in zip(self.names, self.metrics, strict=True)
        }

    def _scored(self, results: Mapping[str, Any], weights: Sequence[float]) -> float:
        """The one number that results come to, each a number or several by name."""
        values: dict[str, float] = {}
        for name, result in results.items():
            if isinstance(result, Mapping):
                if not result:
                    raise MetricError(f"{name} must return a number, got an empty dict")
                start = "" if len(results) == 1 else f"{name} "
                values |= {f"{start}{key}": as_scalar(part, name) for key, part in result.items()}
            else:
                values[name] = as_scalar(result, name)
        if any(isinstance(result, Mapping) for result in results.values()):
            self.together = replace(self.together, require_all=True)  # parts without weights
        self.values = values if len(values) > 1 or self.together.require_all else {}
        if self.together.require_all:
            return self.together.score(values)
        return sum(weight * value for weight, value in zip(weights, values.values(), strict=True))

    def _so_far(self) -> float:
        """The accuracy on the data seen; NaN where it is not defined yet."""
        try:
            results = self._results()
            if any(isinstance(result, Mapping) for result in results.values()):
                return math.nan  # what these come to is a loss against a baseline
            return self._scored(results, [weight for _, weight in self.metrics])
        except (UserCodeError, MetricError) as error:
            if isinstance(error, UserCodeError) and not isinstance(error.error, Exception):
                raise  # it is to end the process
            return math.nan  # of one class there is no AUC, of no sample no mean


def _packed(metrics: Sequence[tuple[Metric, float]]) -> bytes:
    """Metrics without their weights, as another process can read them.

    Raises:
        NotSharedError: what one of them has collected cannot be copied.
    """
    import cloudpickle

    try:
        found: bytes = cloudpickle.dumps([metric for metric, _ in metrics])
    except Exception as error:
        # Whatever the user's own metric raises when it is to be copied.
        raise NotSharedError(
            f"what a metric has collected cannot be copied to another process: "
            f"{type(error).__name__}: {message_of(error)}"
        ) from error
    return found
