"""Interface of executors, and the payload of their worker processes."""

from __future__ import annotations

import importlib.util
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar

from neural_mp.adaptors.contract import Adaptor
from neural_mp.adaptors.loaded_model import AnyModel
from neural_mp.core.trial import Outcome
from neural_mp.errors import (
    ConfigurationError,
    MissingFrameworkError,
    NeuralMPError,
    TuningError,
    message_of,
)
from neural_mp.space import ResolvedPlan
from neural_mp.tuning.evaluator import Deadline, DeadlineExceededError
from neural_mp.tuning.executors.options import Workers
from neural_mp.tuning.plan_evaluator import PlanEvaluation, PlanEvaluator
from neural_mp.tuning.sharding import Shard, ShardResult
from neural_mp.util.remote_exceptions import RemoteException, dump_exception
from neural_mp.util.user_calls import UserCodeError

#: Error of a trial whose process crashed.
DIED = (
    "a worker ended without a result: its process died, for want of memory or in native code; "
    "use workers = 1 to see more of it"
)


@dataclass(frozen=True)
class WorkerException:
    """An exception raised in a worker.

    Attributes:
        error: the exception; in another process, its text if it cannot be pickled.
        by_user: whether the user's code raised it.
    """

    error: BaseException
    by_user: bool = False

    def __reduce__(self) -> tuple[Callable[..., WorkerException], tuple[RemoteException, bool]]:
        return _raised, (dump_exception(self.error), self.by_user)


def _raised(error: RemoteException, by_user: bool) -> WorkerException:
    return WorkerException(error.load(), by_user)


#: Input and output of executors, which treat plans and shards alike.
Task = ResolvedPlan | Shard
TaskResult = PlanEvaluation | ShardResult
Answer = TaskResult | WorkerException


@dataclass(frozen=True)
class _Package:
    """Everything that a process needs to evaluate plans except the model, which it loads.

    Attributes:
        load: loads the model; None if `assessor` contains the model.
        assessor: evaluates plans, given the model.
    """

    load: Callable[[], AnyModel] | None
    assessor: PlanEvaluator

    def made(self) -> PlanEvaluator:
        if self.load is None:
            return self.assessor
        loaded = self.load()
        model = replace(self.assessor.model, adaptor=loaded.adaptor, held=loaded.held)
        return replace(self.assessor, model=model)


@dataclass(frozen=True)
class WorkerPayload:
    """Payload sent to the processes.

    Attributes:
        kind: the adaptor of the model.
        sent: pickled `_Package`, common to all plans.
    """

    kind: type[Adaptor[Any]]
    sent: bytes

    @classmethod
    def of(
        cls, load: Callable[[], AnyModel], assessor: PlanEvaluator, workers: Workers
    ) -> WorkerPayload:
        """Return the payload of a run.

        Args:
            load: loads the model; called once in every process.
            assessor: evaluates plans; its model is sent if it can be pickled.
            workers: the user's setting.

        Raises:
            ConfigurationError: the model, data or metric cannot be sent to another process.
        """
        import cloudpickle

        model = assessor.model
        copied = model.adaptor.to_picklable(model.held)
        adaptor: Any = None if copied is None else model.adaptor
        evaluator = replace(assessor.evaluator, on_batch=_do_nothing)
        sendable = replace(model, adaptor=adaptor, held=copied)
        bare = replace(assessor, model=sendable, evaluator=evaluator)
        try:
            sent = cloudpickle.dumps(_Package(load if copied is None else None, bare))
        except Exception as error:
            # User objects may raise anything while being pickled.
            raise ConfigurationError(
                f"{workers} needs a model, data and metric that can be copied to another process: "
                f"{type(error).__name__}: {message_of(error)}; use workers = 1"
            ) from error
        return cls(type(model.adaptor), sent)


class Worker:
    """Evaluates plans in the process that creates it.

    Args:
        kind: see `WorkerPayload`.
        sent: see `WorkerPayload`; any object with the buffer protocol.
        threads: threads of the framework; None for its default.
    """

    def __init__(self, kind: type[Adaptor[Any]], sent: Any, threads: int | None = None) -> None:
        self._kind, self._sent, self._threads = kind, sent, threads
        self._assessor: PlanEvaluator | None = None

    def __call__(self, task: Task, seconds: float) -> Answer:
        """Evaluate a plan or shard within `seconds`, including model loading; 0 sets no limit."""
        deadline = Deadline(seconds, time.monotonic())
        try:
            assessor = self._made()
            with assessor.model.adaptor.threads(self._threads):
                if isinstance(task, Shard):
                    return assessor.of_share(task, deadline)
                return assessor(task, deadline)[0]
        except UserCodeError as failure:
            return WorkerException(failure.error, by_user=True)
        except (DeadlineExceededError, NeuralMPError, KeyboardInterrupt) as error:
            return WorkerException(error)

    def _made(self) -> PlanEvaluator:
        if self._assessor is None:
            import cloudpickle

            # TensorFlow accepts a thread count only before the first op.
            with self._kind().threads(self._threads):
                self._assessor = cloudpickle.loads(self._sent).made()
            self._sent = b""
        return self._assessor


def taken(answer: Answer) -> TaskResult:
    """Return a worker's result: the evaluation of a plan, or the result of a shard.

    Raises:
        DeadlineExceededError: the time limit passed.
        UserCodeError: the user's code raised.
        NeuralMPError: the worker raised it deliberately.
        TuningError: the worker raised anything else.
    """
    if not isinstance(answer, WorkerException):
        return answer
    error = answer.error
    if answer.by_user:
        raise UserCodeError(error)
    if isinstance(error, DeadlineExceededError | NeuralMPError | KeyboardInterrupt):
        raise error
    raise no_result(error) from error


def no_result(error: BaseException) -> TuningError:
    """Return the error for an unexpected failure of a worker."""
    words = next(iter(message_of(error).splitlines()), "no reason given")
    return TuningError(
        f"a worker ended without a result: {type(error).__name__}: {words}; use workers = 1"
    )


def crashed(node: str) -> PlanEvaluation:
    """Return the evaluation of a plan whose process crashed."""
    return PlanEvaluation(Outcome.FAILED, None, DIED, node=node)


class Executor(ABC):
    """Evaluates plans in other processes, several in parallel.

    Plans of a round are submitted one after the other, and their evaluations requested in the same
    order, whichever is ready first. Shards of one plan are handled like plans. Only the owning
    process calls the executor, and measures latencies only while no evaluation is pending.

    Args:
        work: payload of the processes.
        workers: the user's setting.
        warn: receives warnings.

    Attributes:
        threads: threads per evaluation.
        arrived: callback with a plan and its evaluation, in any order. An executor with an
            evaluation ready before its request calls it at once, so that the evaluation is stored
            if the run is killed.

    Raises:
        NeuralMPError: the engine cannot be used with its settings.
    """

    #: Name of the engine in `workers: {engine: …}`.
    name: ClassVar[str] = ""
    #: Supported keys besides `engine`, `count` and `threads`.
    options: ClassVar[tuple[str, ...]] = ()
    #: Required package → the command that installs it.
    needs: ClassVar[Mapping[str, str]] = {}

    def __init__(self, work: WorkerPayload, workers: Workers, warn: Callable[[str], None]) -> None:
        self.work, self.workers, self.warn = work, workers, warn
        self.threads = workers.threads or 1
        self.arrived: Callable[[ResolvedPlan, PlanEvaluation], None] = _keep_nothing

    @property
    def capacity(self) -> int:
        """Number of parallel evaluations; 1 disables sharding."""
        return 1

    @classmethod
    def check(cls, workers: Workers) -> None:
        """Check the setting before a model is loaded.

        Raises:
            ConfigurationError: an option has an invalid value.
            MissingFrameworkError: a package that the engine needs is not installed.
        """
        for package, line in cls.needs.items():
            if importlib.util.find_spec(package) is None:
                raise MissingFrameworkError(
                    f"workers of engine {workers.engine} need the package {package}, which is not "
                    f"installed; install it with: {line}"
                )

    @abstractmethod
    def submit(self, task: Task, seconds: float) -> Any:
        """Submit a plan or shard for evaluation within `seconds`; 0 sets no limit.

        Returns:
            The argument of `assessment`.
        """

    @abstractmethod
    def assessment(self, ticket: Any) -> TaskResult:
        """Wait for the result of a plan or shard; see `taken`.

        If its process crashes, the plan has failed: an evaluation with the error `DIED`.

        Raises:
            DeadlineExceededError: the time limit passed.
            UserCodeError: the user's code raised.
            NeuralMPError: the worker raised it deliberately.
        """

    @abstractmethod
    def close(self) -> None:
        """Stop the processes, even if busy."""


def _do_nothing() -> None:
    """Ignore progress in workers."""


def _keep_nothing(_plan: ResolvedPlan, _assessment: PlanEvaluation) -> None:
    """Ignore evaluations without a history."""
