"""Places that each do one job at a time, until none is left."""

from __future__ import annotations

import queue
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Protocol

from neural_mp.errors import TuningError
from neural_mp.reporting.jobs import JobsListener
from neural_mp.tuning.executors.options import RUNS_AGAIN
from neural_mp.tuning.job_outcome import JobOutcome, JobStatus, read_outcome
from neural_mp.util.text import counted

#: Seconds between two looks at a job that another process does.
_LOOK = 0.2


class PlaceLostError(Exception):
    """The machine is gone; caught by the team, never seen by users."""


class Place(Protocol):
    """Something that does one job at a time; see `JobRunner`."""

    def run(
        self, job: JobOutcome, folder: Path, before: JobOutcome | None, tell: Callable[[str], None]
    ) -> JobOutcome | None:
        """What came of a job; None where somebody else does it now.

        Raises:
            PlaceLostError: the machine is gone, and does no more jobs.
        """

    def stop(self) -> None:
        """End the job that goes on."""


class Team:
    """Threads, each of which hands one job after the other to a place.

    Args:
        jobs: all of them.
        output: the folder that their folders are in.
        listener: receives what happens, in this thread.
        places: where jobs are done; the team stops them.
    """

    def __init__(
        self,
        jobs: Sequence[JobOutcome],
        output: Path,
        listener: JobsListener,
        places: Sequence[Place],
    ) -> None:
        self._output, self._listener, self._places, self._jobs = output, listener, places, jobs
        unique = {job.name: job for job in jobs if not job.known}
        self._left = deque(unique.values())
        self._open = set(unique)
        self._before = {name: read_outcome(output / name) for name in unique}
        self._losses: Counter[str] = Counter()
        self._events: queue.Queue[Callable[[], None] | None] = queue.Queue()
        self._stopped = threading.Event()

    def work(self) -> None:
        """Do all jobs that are left, and tell the listener.

        Raises:
            TuningError: all places were lost.
        """
        listener = self._listener
        listener.began(len({job.name for job in self._jobs}))
        for job in {job.name: job for job in self._jobs if job.known}.values():
            listener.ended(job)
        places = self._places[: len(self._left)]
        threads = [threading.Thread(target=self._serve, args=(place,)) for place in places]
        for thread in threads:
            thread.start()
        try:
            ended = 0
            while ended < len(threads):
                event = self._events.get()
                if event is None:
                    ended += 1
                else:
                    event()
        finally:
            self._stopped.set()
            for place in places:
                place.stop()
            for thread in threads:
                thread.join()
            listener.close()
        if self._open:
            raise TuningError(
                f"no machine is left for {counted(len(self._open), 'job')}; what is done is kept, "
                f"and the same command goes on from there"
            )

    def _serve(self, place: Place) -> None:
        try:
            # A job that another place has may come back.
            while self._open and not self._stopped.is_set():
                try:
                    job = self._left.popleft()
                except IndexError:
                    time.sleep(_LOOK)
                    continue
                if not self._has_done(place, job):
                    return
        finally:
            self._events.put(None)

    def _has_done(self, place: Place, job: JobOutcome) -> bool:
        """Have a job done at a place; whether the place can do another one."""
        folder = self._output / job.name
        try:
            outcome = place.run(
                job,
                folder,
                self._before[job.name],
                lambda words: self._tell(self._listener.told, job.name, words),
            )
        except PlaceLostError as error:
            self._lost(job, folder, str(error))
            return False
        if outcome is None:
            self._left.append(job)
            time.sleep(_LOOK)
            return True
        self._ended(outcome)
        return True

    def _lost(self, job: JobOutcome, folder: Path, words: str) -> None:
        """Have another place go on with a job, unless that was tried too often."""
        self._losses[job.name] += 1
        self._tell(self._listener.told, job.name, words)
        if self._losses[job.name] <= RUNS_AGAIN:
            self._left.append(job)
            return
        failed = replace(job, status=JobStatus.FAILED, reason=words)
        failed.write(folder)
        self._ended(failed)

    def _ended(self, outcome: JobOutcome) -> None:
        self._open.discard(outcome.name)
        if not self._stopped.is_set():
            self._tell(self._listener.ended, outcome)

    def _tell(self, method: Callable[..., None], *values: Any) -> None:
        self._events.put(lambda: method(*values))
