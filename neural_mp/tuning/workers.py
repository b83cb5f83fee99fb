"""Plans evaluated side by side, by processes that each hold a copy of the model."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, replace
from typing import Any

from neural_mp.adaptors.base import Adaptor, Model
from neural_mp.errors import ConfigurationError
from neural_mp.plan import PrecisionPlan
from neural_mp.tuning.assessment import Assessment, Assessor
from neural_mp.tuning.evaluator import Deadline, UserCodeError


@dataclass(frozen=True)
class _Task:
    """What a process needs to evaluate plans: all but the model, which it loads for itself.

    Attributes:
        load: makes the adaptor and the model.
        assessor: evaluates, once it has them.
    """

    load: Callable[[], tuple[Adaptor, Model]]
    assessor: Assessor

    def made(self) -> Assessor:
        adaptor, model = self.load()
        evaluator = replace(self.assessor.evaluator, adaptor=adaptor)
        return replace(self.assessor, adaptor=adaptor, model=model, evaluator=evaluator)


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


def _assess(plan: PrecisionPlan, seconds: float) -> Assessment | _Raised:
    global _assessor
    if _assessor is None:
        import cloudpickle

        _assessor = cloudpickle.loads(_task).made()
    try:
        assessment, _ = _assessor(plan, Deadline(seconds))
    except UserCodeError as failure:
        return _Raised(failure.__cause__ or failure)
    return assessment


class WorkerPool:
    """Processes that evaluate plans.

    Args:
        load: makes the adaptor and the model; runs once in every process.
        assessor: evaluates a plan; what it holds of the adaptor and the model stays here.
        workers: how many processes.

    Raises:
        ConfigurationError: the model, data or metric cannot be sent to another process.
    """

    def __init__(
        self, load: Callable[[], tuple[Adaptor, Model]], assessor: Assessor, workers: int
    ) -> None:
        import cloudpickle
        import loky

        evaluator = replace(assessor.evaluator, adaptor=None, on_batch=_do_nothing)  # type: ignore[arg-type]
        bare = replace(
            assessor,
            adaptor=None,  # type: ignore[arg-type]
            model=None,
            evaluator=evaluator,
        )
        try:
            sent = cloudpickle.dumps(_Task(load, bare))
        except Exception as error:
            # Whatever the user's own objects raise when they are to be copied.
            raise ConfigurationError(
                f"workers = {workers} needs a model, data and metric that can be copied to another "
                f"process: {type(error).__name__}: {error}; use workers = 1"
            ) from error
        self._pool = loky.ProcessPoolExecutor(workers, initializer=_begin, initargs=(sent,))

    def submit(self, plan: PrecisionPlan, seconds: float) -> Future[Any]:
        """Have a plan evaluated, within so many seconds; 0 sets no limit."""
        found: Future[Any] = self._pool.submit(_assess, plan, seconds)
        return found

    @staticmethod
    def result(future: Future[Any]) -> Assessment:
        """What came of it, once it is there.

        Raises:
            TimeUpError: the time was up.
            UserCodeError: the user's own code raised.
            MetricError: the metric's result is no number.
        """
        found = future.result()
        if isinstance(found, _Raised):
            raise UserCodeError(f"{type(found.error).__name__}: {found.error}") from found.error
        assert isinstance(found, Assessment)
        return found

    def close(self) -> None:
        """End the processes, whatever they are doing."""
        self._pool.shutdown(kill_workers=True)


def _do_nothing() -> None:
    """In a worker nobody looks at progress."""
