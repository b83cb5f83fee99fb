"""The contract of executors, and what they send to the processes that evaluate plans."""

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

#: What a failed trial says of a process that died with its plan.
DIED = (
    "a worker ended without a result: its process died, for want of memory or in native code; "
    "use workers = 1 to see more of it"
)


@dataclass(frozen=True)
class WorkerException:
    """What was raised in a worker.

    Attributes:
        error: the exception itself; in another process, its words where it cannot be copied.
        by_user: whether the user's own code raised it.
    """

    error: BaseException
    by_user: bool = False

    def __reduce__(self) -> tuple[Callable[..., WorkerException], tuple[RemoteException, bool]]:
        return _raised, (dump_exception(self.error), self.by_user)


def _raised(error: RemoteException, by_user: bool) -> WorkerException:
    return WorkerException(error.load(), by_user)


#: What executors take, and what comes of it. They need not tell plans from shares of one.
Task = ResolvedPlan | Shard
TaskResult = PlanEvaluation | ShardResult
Answer = TaskResult | WorkerException


@dataclass(frozen=True)
class _Package:
    """What a process needs to evaluate plans: all but the model, which it loads for itself.

    Attributes:
        load: makes the model; None where it comes with the assessor.
        assessor: evaluates, once it has the model.
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
    """What is sent to the processes.

    Attributes:
        kind: the adaptor of the model.
        sent: what it takes to evaluate plans, the same for all of them, as bytes.
    """

    kind: type[Adaptor[Any]]
    sent: bytes

    @classmethod
    def of(
        cls, load: Callable[[], AnyModel], assessor: PlanEvaluator, workers: Workers
    ) -> WorkerPayload:
        """The work of a run.

        Args:
            load: makes the model; runs once in every process.
            assessor: evaluates a plan; the model that it holds is sent where it can be copied.
            workers: the user's setting.

        Raises:
            ConfigurationError: the model, data or metric cannot be sent to another process.
        """
        import cloudpickle

        model = assessor.model
        copied = model.adaptor.copied(model.held)
        adaptor: Any = None if copied is None else model.adaptor
        evaluator = replace(assessor.evaluator, on_batch=_do_nothing)
        sendable = replace(model, adaptor=adaptor, held=copied)
        bare = replace(assessor, model=sendable, evaluator=evaluator)
        try:
            sent = cloudpickle.dumps(_Package(load if copied is None else None, bare))
        except Exception as error:
            # Whatever the user's own objects raise when they are to be copied.
            raise ConfigurationError(
                f"{workers} needs a model, data and metric that can be copied to another process: "
                f"{type(error).__name__}: {message_of(error)}; use workers = 1"
            ) from error
        return cls(type(model.adaptor), sent)


class Worker:
    """Evaluates plans, in the process that it is made in.

    Args:
        kind: see `Work`.
        sent: see `Work`; anything with the buffer protocol.
        threads: threads that the framework may use; None leaves it to the framework.
    """

    def __init__(self, kind: type[Adaptor[Any]], sent: Any, threads: int | None = None) -> None:
        self._kind, self._sent, self._threads = kind, sent, threads
        self._assessor: PlanEvaluator | None = None

    def __call__(self, task: Task, seconds: float) -> Answer:
        """Evaluate a plan, or a share of one, within so many seconds; 0 sets no limit.

        Loading the model is included.
        """
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

            # TensorFlow takes a number of threads only before anything runs.
            with self._kind().threads(self._threads):
                self._assessor = cloudpickle.loads(self._sent).made()
            self._sent = b""
        return self._assessor


def taken(answer: Answer) -> TaskResult:
    """What a worker found: an assessment, or the tally of a share.

    Raises:
        TimeUpError: the time was up.
        UserCodeError: the user's own code raised.
        NeuralMPError: what the worker raised on purpose.
        TuningError: anything else that it raised.
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
    """The error of a worker that broke for reasons nobody foresaw."""
    words = next(iter(message_of(error).splitlines()), "no reason given")
    return TuningError(
        f"a worker ended without a result: {type(error).__name__}: {words}; use workers = 1"
    )


def crashed(node: str) -> PlanEvaluation:
    """The assessment of a plan whose process died."""
    return PlanEvaluation(Outcome.FAILED, None, DIED, node=node)


class Executor(ABC):
    """Evaluates plans somewhere else, several at the same time.

    Plans of a round are submitted one after the other, and their assessments are asked for in the
    same order, whichever of them is there first. So are the shares of one plan, where its
    evaluation takes long; to an executor they are like plans. Only the process that owns the
    executor calls it, and it measures times only while nothing is open.

    Args:
        work: what the processes need.
        workers: the user's setting.
        warn: takes what the user should know.

    Attributes:
        threads: threads that one evaluation may use.
        arrived: takes a plan and its assessment, out of turn. An executor that has one before it is
            asked for calls this at once, so that the assessment is kept if the run is killed.

    Raises:
        NeuralMPError: the engine cannot be used as it is set.
    """

    #: What the user calls it: `workers: {engine: …}`.
    name: ClassVar[str] = ""
    #: The keys that it takes beside `engine`, `count` and `threads`.
    options: ClassVar[tuple[str, ...]] = ()
    #: The packages that it is built on → the line that installs them.
    needs: ClassVar[Mapping[str, str]] = {}

    def __init__(self, work: WorkerPayload, workers: Workers, warn: Callable[[str], None]) -> None:
        self.work, self.workers, self.warn = work, workers, warn
        self.threads = workers.threads or 1
        self.arrived: Callable[[ResolvedPlan, PlanEvaluation], None] = _keep_nothing

    @property
    def capacity(self) -> int:
        """How many evaluations go on at the same time; with 1 none is shared."""
        return 1

    @classmethod
    def check(cls, workers: Workers) -> None:
        """Look at the setting before a model is loaded.

        Raises:
            ConfigurationError: an option has a value that it cannot have.
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
        """Have a plan, or a share of one, evaluated within so many seconds; 0 sets no limit.

        Returns:
            What `assessment` takes.
        """

    @abstractmethod
    def assessment(self, ticket: Any) -> TaskResult:
        """What came of a plan or a share, once it is there; see `taken`.

        A process that dies makes its plan a failed one: an assessment with the words `DIED`.

        Raises:
            TimeUpError: the time was up.
            UserCodeError: the user's own code raised.
            NeuralMPError: what the worker raised on purpose.
        """

    @abstractmethod
    def close(self) -> None:
        """End the processes, at once if they are still at work."""


def _do_nothing() -> None:
    """In a worker nobody looks at progress."""


def _keep_nothing(_plan: ResolvedPlan, _assessment: PlanEvaluation) -> None:
    """What arrives is kept only where there is a history."""
