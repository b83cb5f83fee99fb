"""Plans evaluated side by side, by processes that each hold a copy of the model."""

from __future__ import annotations

import logging
import pickle
import time
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, replace
from typing import Any

from neural_mp.adaptors.loaded_model import AnyModel
from neural_mp.errors import ConfigurationError, NeuralMPError, TuningError
from neural_mp.space import ResolvedPlan
from neural_mp.tuning.assessment import Assessment, Assessor
from neural_mp.tuning.evaluator import Deadline, TimeUpError, UserCodeError

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class _Task:
    """What a process needs to evaluate plans: all but the model, which it loads for itself.

    Attributes:
        load: makes the model; None where it comes with the assessor.
        assessor: evaluates, once it has the model.
    """

    load: Callable[[], AnyModel] | None
    assessor: Assessor

    def made(self) -> Assessor:
        if self.load is None:
            return self.assessor
        loaded = self.load()
        model = replace(self.assessor.model, adaptor=loaded.adaptor, held=loaded.held)
        return replace(self.assessor, model=model)


@dataclass(frozen=True)
class _Raised:
    """What the user's own code raised in a worker."""

    error: BaseException


#: In a worker: the task it was given, and what it has made of it.
_task: bytes = b""
_assessor: Assessor | None = None


def _begin(task: bytes) -> None:
    global _task
    _task = task


def _assess(plan: ResolvedPlan, until: float) -> Assessment | _Raised:
    global _assessor
    if _assessor is None:
        import cloudpickle

        _assessor = cloudpickle.loads(_task).made()
    try:
        # What came before, waiting and loading the model, counts as well.
        left = max(until - time.time(), 1e-6) if until else 0.0
        assessment, _ = _assessor(plan, Deadline(left))
    except UserCodeError as failure:
        return _Raised(_sendable(failure.__cause__ or failure))
    return assessment


def _sendable(error: BaseException) -> BaseException:
    """An error as it is, or its words where it cannot be copied to another process."""
    try:
        pickle.loads(pickle.dumps(error))
    except Exception:
        # Whatever the user's own exception raises when it is to be copied.
        logger.debug("an exception cannot be copied to another process", exc_info=True)
        return RuntimeError(f"{type(error).__name__}: {error}")
    return error


class WorkerPool:
    """Processes that evaluate plans.

    Args:
        load: makes the model; runs once in every process.
        assessor: evaluates a plan; the model that it holds stays here, unless it can be copied.
        workers: how many processes.

    Raises:
        ConfigurationError: the model, data or metric cannot be sent to another process.
    """

    def __init__(self, load: Callable[[], AnyModel], assessor: Assessor, workers: int) -> None:
        import cloudpickle
        import loky

        model = assessor.model
        copied = model.adaptor.copied(model.held)
        adaptor: Any = None if copied is None else model.adaptor
        evaluator = replace(assessor.evaluator, on_batch=_do_nothing)
        sendable = replace(model, adaptor=adaptor, held=copied)
        bare = replace(assessor, model=sendable, evaluator=evaluator)
        try:
            sent = cloudpickle.dumps(_Task(load if copied is None else None, bare))
        except Exception as error:
            # Whatever the user's own objects raise when they are to be copied.
            raise ConfigurationError(
                f"workers = {workers} needs a model, data and metric that can be copied to another "
                f"process: {type(error).__name__}: {error}; use workers = 1"
            ) from error
        self._pool = loky.ProcessPoolExecutor(workers, initializer=_begin, initargs=(sent,))
        self._submitted: list[Future[Any]] = []

    def submit(self, plan: ResolvedPlan, seconds: float) -> Future[Any]:
        """Have a plan evaluated, within so many seconds from now; 0 sets no limit."""
        until = time.time() + seconds if seconds else 0.0
        found: Future[Any] = self._pool.submit(_assess, plan, until)
        self._submitted.append(found)
        return found

    @staticmethod
    def result(future: Future[Any]) -> Assessment:
        """What came of it, once it is there.

        Raises:
            TimeUpError: the time was up.
            UserCodeError: the user's own code raised.
            MetricError: the metric's result is no number.
            TuningError: the worker ended without a result.
        """
        try:
            found = future.result()
        except (TimeUpError, NeuralMPError):
            raise
        except Exception as error:
            # Whatever ends a process, or keeps it from reading what it was sent.
            words = next(iter(str(error).splitlines()), "no reason given")
            raise TuningError(
                f"a worker ended without a result: {type(error).__name__}: {words}; use workers = 1"
            ) from error
        if isinstance(found, _Raised):
            raise UserCodeError(f"{type(found.error).__name__}: {found.error}") from found.error
        assert isinstance(found, Assessment)
        return found

    def close(self) -> None:
        """End the processes, at once if they are still at work."""
        done = all(future.done() for future in self._submitted)
        self._pool.shutdown(wait=True, kill_workers=not done)


def _do_nothing() -> None:
    """In a worker nobody looks at progress."""
