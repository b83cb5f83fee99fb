"""The option `workers`, the interface of executors, and the payload of their processes."""

from __future__ import annotations

import importlib.util
import logging
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar

from neural_mp.adaptors.contract import Adaptor
from neural_mp.adaptors.loaded_model import AnyModel
from neural_mp.core.criterion import Deadline, DeadlineExceededError
from neural_mp.core.trial import Outcome
from neural_mp.errors import (
    ConfigurationError,
    MissingFrameworkError,
    NeuralMPError,
    TuningError,
    message_of,
)
from neural_mp.space import ResolvedPlan
from neural_mp.tuning.evaluation.plan_evaluator import PlanEvaluation, PlanEvaluator
from neural_mp.tuning.evaluation.sharding import Shard, ShardResult
from neural_mp.util.remote_exceptions import RemoteException, dump_exception
from neural_mp.util.user_calls import UserCodeError

logger = logging.getLogger(__name__)

#: Engine of processes on this machine.
LOCAL = "local"
#: Engine of nodes of a Ray cluster.
RAY = "ray"
#: Maximum number of restarts of work on lost machines.
RUNS_AGAIN = 3
#: Error of a trial whose process crashed.
DIED = (
    "a worker process crashed, because of insufficient memory or in native code; set workers = 1 "
    "for details"
)


@dataclass(frozen=True)
class Workers:
    """The value of the option `workers`.

    Attributes:
        engine: name of the executor.
        count: number of parallel plans; None for as many as fit.
        threads: threads per plan; None for the engine's default.
        options: further options of the engine.
    """

    engine: str = LOCAL
    count: int | None = 1
    threads: int | None = None
    options: Mapping[str, Any] = field(default_factory=dict)

    def __str__(self) -> str:
        if self.engine == LOCAL and self.count is not None:
            return f"workers = {self.count}"
        return f"the engine {self.engine!r} of workers"

    @property
    def uses_processes(self) -> bool:
        """Whether plans are evaluated outside this process."""
        return self.engine != LOCAL or self.count != 1


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
        return _rebuild_worker_exception, (dump_exception(self.error), self.by_user)


def _rebuild_worker_exception(error: RemoteException, by_user: bool) -> WorkerException:
    return WorkerException(error.rebuild_exception(), by_user)


#: Input and output of executors, which treat plans and shards alike.
Task = ResolvedPlan | Shard
TaskResult = PlanEvaluation | ShardResult
Answer = TaskResult | WorkerException


@dataclass(frozen=True)
class _Package:
    """Data for processes that evaluate plans; without `load`, `plan_evaluator` has the model."""

    load: Callable[[], AnyModel] | None
    plan_evaluator: PlanEvaluator

    def unpack_evaluator(self) -> PlanEvaluator:
        if self.load is None:
            return self.plan_evaluator
        loaded = self.load()
        model = replace(self.plan_evaluator.model, adaptor=loaded.adaptor, held=loaded.held)
        return replace(self.plan_evaluator, model=model)


@dataclass(frozen=True)
class WorkerPayload:
    """Payload of the processes: the class of the adaptor, and a pickled `_Package`."""

    kind: type[Adaptor[Any]]
    sent: bytes

    @classmethod
    def pack_run(
        cls, load: Callable[[], AnyModel], plan_evaluator: PlanEvaluator, workers: Workers
    ) -> WorkerPayload:
        """Return the payload of a run, with the model itself if it can be pickled, else `load`.

        Raises:
            ConfigurationError: the model, data or metric cannot be sent to another process.
        """
        import cloudpickle

        model = plan_evaluator.model
        copied = model.adaptor.to_picklable(model.held)
        adaptor: Any = None if copied is None else model.adaptor
        evaluator = replace(plan_evaluator.evaluator, on_batch=lambda: None, warn=logger.warning)
        sendable = replace(model, adaptor=adaptor, held=copied)
        bare = replace(plan_evaluator, model=sendable, evaluator=evaluator)
        try:
            sent = cloudpickle.dumps(_Package(load if copied is None else None, bare))
        except Exception as error:
            # User objects may raise anything while being pickled.
            raise ConfigurationError(
                f"{workers} requires a model, data and metric that can be pickled: "
                f"{type(error).__name__}: {message_of(error)}; set workers = 1"
            ) from error
        return cls(type(model.adaptor), sent)


class Worker:
    """Evaluates plans in the process that creates it.

    `sent` may be any object with the buffer protocol; `threads` None is the default of the
    framework.
    """

    def __init__(self, kind: type[Adaptor[Any]], sent: Any, threads: int | None = None) -> None:
        self._kind, self._sent, self._threads = kind, sent, threads
        self._assessor: PlanEvaluator | None = None

    def __call__(self, task: Task, seconds: float) -> Answer:
        """Evaluate a plan or shard within `seconds`, including model loading; 0 sets no limit."""
        deadline = Deadline(seconds, time.monotonic())
        try:
            plan_evaluator = self._load_evaluator()
            with plan_evaluator.model.adaptor.threads(self._threads):
                if isinstance(task, Shard):
                    return plan_evaluator.evaluate_shard(task, deadline)
                return plan_evaluator(task, deadline)[0]
        except UserCodeError as failure:
            return WorkerException(failure.error, by_user=True)
        except (DeadlineExceededError, NeuralMPError, KeyboardInterrupt) as error:
            return WorkerException(error)

    def _load_evaluator(self) -> PlanEvaluator:
        if self._assessor is None:
            import cloudpickle

            # TensorFlow accepts a thread count only before the first op.
            with self._kind().threads(self._threads):
                self._assessor = cloudpickle.loads(self._sent).unpack_evaluator()
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
    raise missing_result_error(error) from error


def missing_result_error(error: BaseException) -> TuningError:
    """Return the error for an unexpected failure of a worker."""
    reason = next(iter(message_of(error).splitlines()), "no reason given")
    return TuningError(
        f"a worker failed with {type(error).__name__}: {reason}; set workers = 1 for details"
    )


def crashed_evaluation(node: str = "") -> PlanEvaluation:
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
        self.arrived: Callable[[ResolvedPlan, PlanEvaluation], None] = lambda *_: None

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
                    f"workers of engine {workers.engine} require the package {package}, which is "
                    f"not installed; run: {line}"
                )

    @abstractmethod
    def submit(self, task: Task, seconds: float) -> Any:
        """Submit a plan or shard for evaluation within `seconds`; 0 sets no limit.

        The result is the argument of `assessment`.
        """

    @abstractmethod
    def assessment(self, ticket: Any) -> TaskResult:
        """Wait for the result of a plan or shard; raise the errors of `taken`.

        If its process crashes, the plan has failed: an evaluation with the error `DIED`.
        """

    @abstractmethod
    def close(self) -> None:
        """Stop the processes, even if busy."""
