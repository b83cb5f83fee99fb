"""Queues whose tasks go to the first place that is free, and the executors built on them."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from neural_mp.errors import TuningError
from neural_mp.tuning.evaluator import DeadlineExceededError
from neural_mp.tuning.executors.contract import (
    Answer,
    Executor,
    Task,
    TaskResult,
    WorkerException,
    WorkerPayload,
    taken,
)
from neural_mp.tuning.executors.options import Workers
from neural_mp.tuning.plan_evaluator import PlanEvaluation
from neural_mp.tuning.sharding import Shard

TaskT = TypeVar("TaskT")
AnswerT = TypeVar("AnswerT")
#: Seconds that a worker has, once its time is up, to say so itself.
_GRACE = 2.0


@dataclass(eq=False)
class PendingTask(Generic[TaskT, AnswerT]):
    """A task that was submitted.

    Attributes:
        task: what is to be done.
        until: when its time is up, by this process's monotonic clock; 0 sets no limit.
        answer: what came of it, once it is there.
        losses: how often the machine that had it was lost.
    """

    task: TaskT
    until: float = 0.0
    answer: AnswerT | None = None
    losses: int = 0


class TaskQueue(ABC, Generic[TaskT, AnswerT]):
    """Gives a task to the first place that is free, and again where its place was lost.

    A place stays the same while the queue lives, and has one task at a time; a handle is one task
    that goes on there.
    """

    def __init__(self) -> None:
        self._queue: deque[PendingTask[TaskT, AnswerT]] = deque()
        self._open: dict[Any, tuple[Any, PendingTask[TaskT, AnswerT]]] = {}

    @abstractmethod
    def places(self) -> Iterable[Any]:
        """All places there are now, those first that are to be filled first."""

    @abstractmethod
    def begin(self, place: Any, ticket: PendingTask[TaskT, AnswerT]) -> Any:
        """Begin with a task at a place that is free; the handle, or None if it is too late."""

    @abstractmethod
    def wait(self, handles: Collection[Any], seconds: float | None) -> Iterable[Any]:
        """Wait for one of the handles at least; those that are done.

        Args:
            handles: what goes on.
            seconds: how long to wait at most; None sets no limit.
        """

    @abstractmethod
    def answer(self, place: Any, handle: Any, ticket: Any) -> AnswerT | None:
        """What came of a handle that is done; None where it is to be run again."""

    @property
    def busy(self) -> list[Any]:
        """The handles of what goes on."""
        return list(self._open)

    def _collected(self, seconds: float | None) -> Iterator[PendingTask[TaskT, AnswerT]]:
        """Wait for one of the handles at least; the tickets that have an answer now."""
        for handle in self.wait(self.busy, seconds):
            place, ticket = self._open.pop(handle)
            ticket.answer = self.answer(place, handle, ticket)
            if ticket.answer is None:
                self._run_again(ticket)
            else:
                yield ticket

    def _run_again(self, ticket: PendingTask[TaskT, AnswerT]) -> None:
        self._queue.appendleft(ticket)

    def _hand_out(self) -> None:
        taken_places = [place for place, _ in self._open.values()]
        free = deque(place for place in self.places() if place not in taken_places)
        while self._queue and free:
            ticket = self._queue.popleft()
            handle = self.begin(free[0], ticket)
            if handle is not None:
                self._open[handle] = free.popleft(), ticket


class QueuedExecutor(TaskQueue[Task, Answer], Executor):
    """What executors have in common that keep a queue of plans.

    Clocks of other machines do not matter: a place is told the seconds left when it gets a plan.
    """

    def __init__(self, work: WorkerPayload, workers: Workers, warn: Callable[[str], None]) -> None:
        TaskQueue.__init__(self)
        Executor.__init__(self, work, workers, warn)

    @abstractmethod
    def start(self, place: Any, task: Task, seconds: float) -> Any:
        """Begin to evaluate a plan, or a share, at a place that is free; the handle of that."""

    @abstractmethod
    def stop(self, place: Any, handle: Any) -> None:
        """End what goes on at a place, whatever it does; the place is free then."""

    @property
    def capacity(self) -> int:
        """How many places there are."""
        return len(list(self.places()))

    def begin(self, place: Any, ticket: PendingTask[Task, Answer]) -> Any:
        """Start a plan with the seconds that it has left."""
        left = ticket.until - time.monotonic() if ticket.until else 0.0
        if left < 0:
            ticket.answer = WorkerException(DeadlineExceededError())
            return None
        return self.start(place, ticket.task, left)

    def submit(self, task: Task, seconds: float) -> PendingTask[Task, Answer]:
        """Put a plan, or a share of one, into the queue."""
        ticket: PendingTask[Task, Answer] = PendingTask(
            task, time.monotonic() + seconds if seconds else 0.0
        )
        self._queue.append(ticket)
        self._hand_out()
        return ticket

    def assessment(self, ticket: PendingTask[Task, Answer]) -> TaskResult:
        """What came of a ticket; while it is awaited, the others go on as well."""
        while ticket.answer is None:
            if not self._open:
                raise TuningError("there is no worker left that could evaluate plans")
            for found in self._collected(self._patience()):
                if isinstance(found.answer, PlanEvaluation) and not isinstance(found.task, Shard):
                    self.arrived(found.task, found.answer)
            self._stop_the_late()
            self._hand_out()
        return taken(ticket.answer)

    def _patience(self) -> float | None:
        """Seconds until the first of those at work is late; None where nobody can be."""
        limits = [ticket.until for _, ticket in self._open.values() if ticket.until]
        return max(0.0, min(limits) + _GRACE - time.monotonic()) if limits else None

    def _stop_the_late(self) -> None:
        """End what should have seen for itself that its time is up: it hangs in the user's code."""
        now = time.monotonic()
        for handle, (place, ticket) in list(self._open.items()):
            if ticket.until and now >= ticket.until + _GRACE:
                del self._open[handle]
                ticket.answer = WorkerException(DeadlineExceededError())
                self.stop(place, handle)
