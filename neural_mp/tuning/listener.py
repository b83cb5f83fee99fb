"""Listener for the events of a run, and the log of a run."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from inspect import isfunction
from typing import ClassVar, TypeVar

from neural_mp.core.criterion import AccuracyCriterion, UnreturnedCallError
from neural_mp.core.plan import PrecisionPlan
from neural_mp.core.trial import Trial
from neural_mp.runs.report import Report, StageNoise
from neural_mp.tuning.call_limit import CallLimit
from neural_mp.util.user_calls import call_user

logger = logging.getLogger(__name__)

T = TypeVar("T")


class Listener:
    """Receives the events of a run; all methods are optional and do nothing by default."""

    #: Whether a run may spend seconds on finding a faster runtime.
    wants_hints: ClassVar[bool] = True

    def phase(self, name: str, total: int | None = None) -> None:
        """Handle the start of a phase, of `total` steps if known."""

    def step(self) -> None:
        """Handle a finished batch of the phase."""

    def source(self, name: str) -> None:
        """Handle the precision of the given model (`FP32`); called before its accuracy is."""

    def baseline(self, accuracy: float, target: float) -> None:
        """Handle the accuracy of the given model; `target` is the worst accuracy accepted."""

    def metric(self, name: str, criterion: AccuracyCriterion) -> None:
        """Handle the name of a single metric and its criterion; called before `baseline`."""

    def metrics(self, baseline: Mapping[str, float], targets: Mapping[str, float]) -> None:
        """Handle the given model's values of several metrics that must each meet a target.

        Called before `baseline`, which receives the aggregated score.
        """

    def limit(self, seconds: float, effort: str) -> None:
        """Handle the limit that the effort sets to the rest of the run; called after calibration.

        Not called if there is none, or if `exit_policy.timeout` ends earlier.
        """

    def trial(self, trial: Trial, speedup: float | None) -> None:
        """Handle a finished trial."""

    def close(self) -> None:
        """Handle the end of the run, with or without success."""

    def plan(self, plan: PrecisionPlan) -> None:
        """Handle the plan of the result; called between `close` and `result`."""

    def result(self, report: Report, met: bool | None) -> None:
        """Handle the result of the run; called after `close`."""

    def failure(self, error: BaseException) -> None:
        """Handle the error that ends a run without a result; called after `close`."""


class ListenerGroup(Listener):
    """Listener that passes each event to several others, in their order.

    Args:
        *listeners: the others.
    """

    def __init__(self, *listeners: Listener) -> None:
        self._listeners = listeners
        # Methods of the instance, one for each event of `Listener`.
        for event in _EVENTS:
            setattr(self, event, partial(self._notify, event))

    @property
    def wants_hints(self) -> bool:  # type: ignore[override]  # that of the members
        """Whether a member wants hints."""
        return any(listener.wants_hints for listener in self._listeners)

    def _notify(self, event: str, *values: object, **options: object) -> None:
        for listener in self._listeners:
            getattr(listener, event)(*values, **options)


#: Names of the events.
_EVENTS = tuple(name for name, value in vars(Listener).items() if isfunction(value))


def describe_accuracy_target(
    name: str, source: str, accuracy: float, target: float, tolerance: str
) -> str:
    """Return the baseline and the target in one line, in the unit of the metric.

    `source` is the precision of the given model; name and tolerance are empty if unknown.
    """
    values = f"{source} {accuracy:.5g}, target {target:.5g}"
    return f"{f'{name}: ' if name else ''}{values}{f' ({tolerance})' if tolerance else ''}"


def limit_words(seconds: float, effort: str) -> str:
    """Return the limit of the rest of a run in one line."""
    return f"effort {effort}: at most {seconds:g} s from here"


class RunLog:
    """Warnings, phase durations and listener of a run.

    Args:
        listener: receives the events of the run.
        warnings: warnings that the user has already received.
        seconds: finished phase → its duration.

    Attributes:
        cache_hits: measurements taken from an earlier run.
        stage_noise: noise of a plan before and after its weights recovered accuracy; or None.
        width_sqnr_db: op → widths → SQNR of the outputs; see `AcceleratorFigures.sqnr_db`.
        effort_seconds: limit that the effort sets to the run after calibration; None without one.
        calls: limit of single calls, which may never return.
    """

    def __init__(
        self,
        listener: Listener | None = None,
        warnings: Iterable[str] = (),
        seconds: Mapping[str, float] | None = None,
    ) -> None:
        self.listener = listener or Listener()
        self.warnings = list(warnings)
        self.seconds = dict(seconds or {})
        self.cache_hits: list[str] = []
        self.stage_noise: StageNoise | None = None
        self.width_sqnr_db: Mapping[str, Mapping[str, float]] = {}
        self.effort_seconds: float | None = None
        self.calls = CallLimit()

    def cache_hit(self, measurement: str) -> None:
        """Record a measurement as taken from an earlier run."""
        if measurement not in self.cache_hits:
            self.cache_hits.append(measurement)

    def report_step(self) -> None:
        """Report a finished batch to the listener.

        Raises:
            UserCodeError: the listener raised; not attributed to a plan or batch.
        """
        call_user(self.listener.step)

    def report_limit(self, seconds: float, effort: str) -> None:
        """Record the limit that the effort sets to the rest of the run, and announce it."""
        self.effort_seconds = seconds
        logger.info("%s", limit_words(seconds, effort))
        self.listener.limit(seconds, effort)

    def add_warning(self, message: str) -> None:
        """Store a warning for the report."""
        self.warnings.append(message)

    def warn_of_call(self, error: BaseException) -> None:
        """Store a warning if an error is that of a call that did not return."""
        if isinstance(error, UnreturnedCallError):
            self.add_warning(str(error))

    def run_optional_part(self, part: Callable[[], T], default: T) -> T:
        """Return the result of a part of the run, or a default if a call does not return."""
        try:
            return self.calls.run_part(part)
        except UnreturnedCallError as error:
            self.warn_of_call(error)
            return default

    def warn_once(self, message: str) -> None:
        """Store a warning unless it is stored already, also by an earlier part of the run."""
        if message not in self.warnings:
            self.add_warning(message)

    @contextmanager
    def loading_phase(self) -> Iterator[None]:
        """Context of the first phase; if it fails there is no run, and the listener is closed."""
        try:
            with self.time_phase("load", "Loading the model"):
                yield
        except BaseException:
            self.listener.close()
            raise

    @contextmanager
    def announce_failure(self) -> Iterator[None]:
        """Context of a whole run; the listener hears of the error that ends it."""
        try:
            yield
        except BaseException as error:
            self.listener.failure(error)
            raise

    @contextmanager
    def time_phase(self, name: str, title: str = "", total: int | None = None) -> Iterator[None]:
        """Time a phase, and announce it to the listener if it has a text."""
        if title:
            self.listener.phase(title, total)
        started = time.perf_counter()
        try:
            yield
        finally:
            self.seconds[name] = self.seconds.get(name, 0.0) + time.perf_counter() - started
