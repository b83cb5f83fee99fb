"""Pool of workers that run the jobs of a queue, one at a time each."""

from __future__ import annotations

import queue
import time
from collections.abc import Callable, Collection, Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Protocol

from neural_mp.errors import TuningError
from neural_mp.reporting.jobs import JobsListener
from neural_mp.tuning.executors.options import RUNS_AGAIN
from neural_mp.tuning.executors.queued import PendingTask, TaskQueue
from neural_mp.tuning.job_outcome import JobOutcome, JobStatus, read_outcome
from neural_mp.util.text import counted

#: Seconds between two checks of a job that another process runs.
_LOOK = 0.2


class WorkerLostError(Exception):
    """Loss of a worker's machine; caught by the pool."""


class JobWorker(Protocol):
    """Worker that runs one job at a time; see `JobRunner`."""

    def run(
        self, job: JobOutcome, folder: Path, prior: JobOutcome | None, tell: Callable[[str], None]
    ) -> JobOutcome | None:
        """Run a job and return its outcome; None if another process is running the job.

        Raises:
            WorkerLostError: the machine is lost.
        """

    def stop(self) -> None:
        """End the running job."""


_JobTicket = PendingTask[JobOutcome, JobOutcome]
_JobHandle = Future[JobOutcome | None]


class WorkerPool(TaskQueue[JobOutcome, JobOutcome]):
    """Pool that assigns jobs to free workers, with one thread per worker.

    Args:
        jobs: all jobs.
        output: parent of the job folders.
        listener: receives the events in the calling thread.
        places: the workers, stopped by the pool.
    """

    def __init__(
        self,
        jobs: Sequence[JobOutcome],
        output: Path,
        listener: JobsListener,
        workers: Sequence[JobWorker],
    ) -> None:
        super().__init__()
        self._output, self._listener, self._jobs = output, listener, jobs
        unique = {job.name: job for job in jobs if not job.known}
        self._queue.extend(PendingTask(job) for job in unique.values())
        self._before = {name: read_outcome(output / name) for name in unique}
        self._places = list(workers[: len(unique)])
        # Progress messages (job, text), and handles of finished jobs.
        self._events: queue.Queue[tuple[str, str] | _JobHandle] = queue.Queue()
        self._threads = ThreadPoolExecutor(max(1, len(self._places)))

    def work(self) -> None:
        """Run all remaining jobs and report to the listener.

        Raises:
            TuningError: all workers were lost.
        """
        listener, workers = self._listener, list(self._places)
        listener.began(len({job.name for job in self._jobs}))
        for job in {job.name: job for job in self._jobs if job.known}.values():
            listener.ended(job)
        try:
            self._hand_out()
            while self._open:
                for ticket in self._collected(None):
                    assert ticket.answer is not None
                    listener.ended(ticket.answer)
                self._hand_out()
        finally:
            for worker in workers:
                worker.stop()
            self._threads.shutdown()
            listener.close()
        if self._queue:
            raise TuningError(
                f"all workers were lost before {counted(len(self._queue), 'job')} ended; finished "
                f"jobs are kept; continue with the same command"
            )

    def places(self) -> Iterable[JobWorker]:
        """Return the workers that were not lost."""
        return self._places

    def begin(self, worker: JobWorker, ticket: _JobTicket) -> _JobHandle:
        """Start a job in a thread."""
        handle = self._threads.submit(self._outcome_at, worker, ticket.task)
        handle.add_done_callback(self._events.put)
        return handle

    def _outcome_at(self, worker: JobWorker, job: JobOutcome) -> JobOutcome | None:
        folder, prior = self._output / job.name, self._before[job.name]
        outcome = worker.run(job, folder, prior, lambda text: self._events.put((job.name, text)))
        if outcome is None:
            time.sleep(_LOOK)
        return outcome

    def wait(self, handles: Collection[_JobHandle], seconds: float | None) -> Iterable[_JobHandle]:
        """Wait for a finished job; meanwhile forward progress messages."""
        while isinstance(event := self._events.get(timeout=seconds), tuple):
            self._listener.report(*event)
        return [event]

    def answer(
        self, worker: JobWorker, handle: _JobHandle, ticket: _JobTicket
    ) -> JobOutcome | None:
        """Return the outcome of a job; None to rerun the job after the loss of its worker."""
        try:
            return handle.result()
        except WorkerLostError as error:
            lost, job = str(error), ticket.task
        self._places.remove(worker)
        self._listener.report(job.name, lost)
        ticket.losses += 1
        if ticket.losses <= RUNS_AGAIN:
            return None
        failed = replace(job, status=JobStatus.FAILED, reason=lost)
        failed.write(self._output / job.name)
        return failed

    def _run_again(self, ticket: _JobTicket) -> None:
        # At the end of the queue, since another process may run the job for hours.
        self._queue.append(ticket)
