"""Task queues that serve the first free worker, and the executors built on them."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from neural_mp.core.criterion import DeadlineExceededError
from neural_mp.errors import TuningError
from neural_mp.tuning.evaluation.plan_evaluator import PlanEvaluation
from neural_mp.tuning.evaluation.sharding import Shard
from neural_mp.tuning.executors.contract import (
    Answer,
    Executor,
    Task,
    TaskResult,
    WorkerException,
    WorkerPayload,
    Workers,
    taken,
)

TaskT = TypeVar("TaskT")
AnswerT = TypeVar("AnswerT")
#: Seconds for a worker to report its own timeout.
_GRACE = 2.0


@dataclass(eq=False)
class PendingTask(Generic[TaskT, AnswerT]):
    """A submitted task.

    Attributes:
        until: deadline by this process's monotonic clock; 0 sets no limit.
        answer: the result, once available.
        losses: number of machines lost while running the task.
    """

    task: TaskT
    until: float = 0.0
    answer: AnswerT | None = None
    losses: int = 0


class TaskQueue(ABC, Generic[TaskT, AnswerT]):
    """Assigns tasks to the first free worker, and again if the worker was lost.

    A place (worker slot) exists as long as the queue, and runs one task at a time; a handle is one
    running task.
    """

    def __init__(self) -> None:
        self._queue: deque[PendingTask[TaskT, AnswerT]] = deque()
        self._open: dict[Any, tuple[Any, PendingTask[TaskT, AnswerT]]] = {}

    @abstractmethod
    def list_places(self) -> Iterable[Any]:
        """Return all current places, in the order of assignment."""

    @abstractmethod
    def begin_task(self, slot: Any, ticket: PendingTask[TaskT, AnswerT]) -> Any:
        """Start a task at a free place; return its handle, or None if its deadline passed."""

    @abstractmethod
    def wait_for_any(self, handles: Collection[Any], seconds: float | None) -> Iterable[Any]:
        """Wait up to `seconds`, if any, for at least one handle; return the finished ones."""

    @abstractmethod
    def collect_answer(self, slot: Any, handle: Any, ticket: Any) -> AnswerT | None:
        """Return the result of a finished handle; None to run the task again."""

    @property
    def busy_handles(self) -> list[Any]:
        """Handles of running tasks."""
        return list(self._open)

    def _collect_finished(self, seconds: float | None) -> Iterator[PendingTask[TaskT, AnswerT]]:
        """Wait for at least one handle; yield the tasks with a result."""
        for handle in self.wait_for_any(self.busy_handles, seconds):
            slot, ticket = self._open.pop(handle)
            ticket.answer = self.collect_answer(slot, handle, ticket)
            if ticket.answer is None:
                self._run_again(ticket)
            else:
                yield ticket

    def _run_again(self, ticket: PendingTask[TaskT, AnswerT]) -> None:
        self._queue.appendleft(ticket)

    def _hand_out_tasks(self) -> None:
        taken_places = [slot for slot, _ in self._open.values()]
        free = deque(slot for slot in self.list_places() if slot not in taken_places)
        while self._queue and free:
            ticket = self._queue.popleft()
            handle = self.begin_task(free[0], ticket)
            if handle is not None:
                self._open[handle] = free.popleft(), ticket


class QueuedExecutor(TaskQueue[Task, Answer], Executor):
    """Base of executors with a queue of plans.

    Places receive remaining seconds, so clocks of other machines do not matter.
    """

    def __init__(self, work: WorkerPayload, workers: Workers, warn: Callable[[str], None]) -> None:
        TaskQueue.__init__(self)
        Executor.__init__(self, work, workers, warn)

    @abstractmethod
    def start_task(self, slot: Any, task: Task, seconds: float) -> Any:
        """Start evaluating a plan or shard at a free place; return its handle."""

    @abstractmethod
    def stop_task(self, slot: Any, handle: Any) -> None:
        """Kill the task at a place, which is free afterwards."""

    @property
    def capacity(self) -> int:
        """Number of places."""
        return len(list(self.list_places()))

    def begin_task(self, slot: Any, ticket: PendingTask[Task, Answer]) -> Any:
        """Start a plan with its remaining seconds."""
        remaining = ticket.until - time.monotonic() if ticket.until else 0.0
        if remaining < 0:
            ticket.answer = WorkerException(DeadlineExceededError())
            return None
        return self.start_task(slot, ticket.task, remaining)

    def submit(self, task: Task, seconds: float) -> PendingTask[Task, Answer]:
        """Add a plan or shard to the queue."""
        ticket: PendingTask[Task, Answer] = PendingTask(
            task, time.monotonic() + seconds if seconds else 0.0
        )
        self._queue.append(ticket)
        self._hand_out_tasks()
        return ticket

    def assessment(self, ticket: PendingTask[Task, Answer]) -> TaskResult:
        """Wait for the result of a task, while the others proceed."""
        while ticket.answer is None:
            if not self._open:
                raise TuningError("no worker is left to evaluate plans")
            limits = [running.until for _, running in self._open.values() if running.until]
            # Until the first running task is late.
            seconds = max(0.0, min(limits) + _GRACE - time.monotonic()) if limits else None
            for finished in self._collect_finished(seconds):
                if isinstance(finished.answer, PlanEvaluation) and not isinstance(
                    finished.task, Shard
                ):
                    self.arrived(finished.task, finished.answer)
            self._stop_the_late()
            self._hand_out_tasks()
        return taken(ticket.answer)

    def _stop_the_late(self) -> None:
        """Kill tasks that ignore their deadline, e.g. because user code hangs."""
        now = time.monotonic()
        for handle, (slot, ticket) in list(self._open.items()):
            if ticket.until and now >= ticket.until + _GRACE:
                del self._open[handle]
                ticket.answer = WorkerException(DeadlineExceededError())
                self.stop_task(slot, handle)
