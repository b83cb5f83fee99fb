"""Execution of jobs: a pool of workers with a queue, here and on the nodes of a Ray cluster."""

from __future__ import annotations

import json
import logging
import os
import queue
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, Protocol

from neural_mp.adaptors.detect import FRAMEWORKS
from neural_mp.adaptors.registry import probe_installed_accumulation
from neural_mp.core import hardware
from neural_mp.errors import TuningError
from neural_mp.reporting.jobs import JobsListener
from neural_mp.tuning.executors import get_executor_named
from neural_mp.tuning.executors.contract import RUNS_AGAIN, Workers
from neural_mp.tuning.executors.queued import PendingTask, TaskQueue
from neural_mp.tuning.executors.ray_cluster import ClusterNodes, NumericalTraits, run_on_node
from neural_mp.tuning.job_outcome import LOG_FILE, JobOutcome, JobStatus, read_outcome
from neural_mp.util.system.environment import THREAD_VARIABLES, restore_users_environment
from neural_mp.util.system.processes import make_python_command
from neural_mp.util.text import format_count

logger = logging.getLogger(__name__)

#: Seconds between two polls of the progress.
_REMOTE_POLL_SECONDS = 0.5
#: Concurrent calls of a node's runner: a job, and progress queries.
_CALLS = 2


try:
    import fcntl
except ImportError:  # Windows: commands must not share a folder
    fcntl = None  # type: ignore[assignment]

#: Seconds between two checks of a job that another process runs.
_LOOK = 0.2
#: Variables that limit threads; ONNX Runtime's adaptor reads the first.
_THREADS = (*THREAD_VARIABLES, "TF_NUM_INTRAOP_THREADS", "TF_NUM_INTEROP_THREADS")
LOCK_FILE = "lock"


@contextmanager
def lock_job_folder(folder: Path) -> Iterator[int | None]:
    """Lock the folder of a job.

    Yields:
        The file descriptor of the lock, to be inherited by child processes; None if another process
        owns the lock.
    """
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / LOCK_FILE).open("a") as file:
        if fcntl is not None:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                yield None
                return
        yield file.fileno()


class JobRunner:
    """Runner of jobs on this machine, one process per job.

    Args:
        threads: threads per job; None for no limit.
        trust: see `MixedPrecision`.
    """

    def __init__(self, threads: int | None = None, trust: tuple[str, ...] = ()) -> None:
        self._trust = tuple(f"--trust={module}" for module in trust)
        self._limits = {} if threads is None else dict.fromkeys(_THREADS, str(threads))
        self._process: subprocess.Popen[str] | None = None
        self._stopped = threading.Event()

    def run_job(
        self, job: JobOutcome, folder: Path, prior: JobOutcome | None, tell: Callable[[str], None]
    ) -> JobOutcome | None:
        """Run a job, or return the outcome if another process has just finished the job.

        `prior` is the stored outcome when this command started; `tell` receives progress messages.

        Returns:
            The outcome; None if another process is running the job.
        """
        with lock_job_folder(folder) as lock:
            if lock is None:
                return None
            stored = read_outcome(folder)
            if stored is not None and stored != prior and stored.status.ended:
                return replace(stored, file=job.file)
            return self._run_process(job, folder, lock, resume=stored is not None, tell=tell)

    def _run_process(
        self, job: JobOutcome, folder: Path, lock: int, *, resume: bool, tell: Callable[[str], None]
    ) -> JobOutcome:
        started, log_file = time.monotonic(), folder / LOG_FILE
        logged = log_file.stat().st_size if log_file.exists() else 0
        begun = replace(job, reason="interrupted")
        begun.write(folder)
        tell("resumes" if resume else "starts")
        command = make_python_command("neural_mp.jobs.worker_main", job.file, str(folder))
        with log_file.open("a", encoding="utf-8") as log:
            self._process = process = subprocess.Popen(
                [*command, *(["--resume"] if resume else []), *self._trust],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
                env={**restore_users_environment(), **self._limits},
                start_new_session=True,
                pass_fds=(lock,) if os.name == "posix" else (),
            )
        if self._stopped.is_set():
            self.stop_job()
        for message in _read_messages(process):
            tell(message)
        code = process.wait()
        outcome = read_outcome(folder) or begun
        if outcome.status is JobStatus.BEGUN and not self._stopped.is_set():
            outcome = replace(
                outcome,
                status=JobStatus.FAILED,
                reason=_find_failure_reason(code, log_file, logged),
                exit_code=code,
                seconds=time.monotonic() - started,
            )
            outcome.write(folder)
        return outcome

    def stop_job(self) -> None:
        """End the running job and its workers by closing its standard input."""
        self._stopped.set()
        if self._process is not None and self._process.stdin is not None:
            self._process.stdin.close()


def _read_messages(process: subprocess.Popen[str]) -> Iterator[str]:
    assert process.stdout is not None
    for line in process.stdout:
        try:
            yield str(json.loads(line))
        except ValueError:
            continue  # incomplete last line of a killed process


def _find_failure_reason(code: int, log: Path, offset: int) -> str:
    """Return why a process ended without a result: its signal, or exit code and last log line.

    `offset` is the size of the earlier contents of the log in bytes.
    """
    if code < 0:
        signals = {int(number): number.name for number in signal.Signals}
        return f"the process was ended by signal {signals.get(-code, -code)}"
    output = log.read_bytes()[offset:].decode("utf-8", errors="replace")
    lines = [line.strip() for line in output.splitlines()]
    last = next((line for line in reversed(lines) if line), "")
    return f"the process ended with exit code {code} and no result" + (f": {last}" if last else "")


class WorkerLostError(Exception):
    """Loss of a worker's machine; caught by the pool."""


class JobWorker(Protocol):
    """Worker that runs one job at a time; see `JobRunner`."""

    def run_job(
        self, job: JobOutcome, folder: Path, prior: JobOutcome | None, tell: Callable[[str], None]
    ) -> JobOutcome | None:
        """Run a job and return its outcome; None if another process is running the job.

        Raises:
            WorkerLostError: the machine is lost.
        """

    def stop_job(self) -> None:
        """End the running job."""


_JobTicket = PendingTask[JobOutcome, JobOutcome]
_JobHandle = Future[JobOutcome | None]


class WorkerPool(TaskQueue[JobOutcome, JobOutcome]):
    """Pool that assigns jobs to free workers, with one thread per worker.

    Args:
        jobs: all jobs.
        output: parent of the job folders.
        listener: receives the events in the calling thread.
        workers: are stopped by the pool.
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

    def run_jobs(self) -> None:
        """Run all remaining jobs and report to the listener.

        Raises:
            TuningError: all workers were lost.
        """
        listener, workers = self._listener, list(self._places)
        listener.began(len({job.name for job in self._jobs}))
        for job in {job.name: job for job in self._jobs if job.known}.values():
            listener.ended(job)
        try:
            self._hand_out_tasks()
            while self._open:
                for ticket in self._collect_finished(None):
                    assert ticket.answer is not None
                    listener.ended(ticket.answer)
                self._hand_out_tasks()
        finally:
            for worker in workers:
                worker.stop_job()
            self._threads.shutdown()
            listener.close()
        if self._queue:
            raise TuningError(
                f"all workers were lost before {format_count(len(self._queue), 'job')} ended; "
                "finished jobs are kept; continue with the same command"
            )

    def list_places(self) -> Iterable[JobWorker]:
        """Return the workers that were not lost."""
        return self._places

    def begin_task(self, worker: JobWorker, ticket: _JobTicket) -> _JobHandle:
        """Start a job in a thread."""
        handle = self._threads.submit(self._run_job_at, worker, ticket.task)
        handle.add_done_callback(self._events.put)
        return handle

    def _run_job_at(self, worker: JobWorker, job: JobOutcome) -> JobOutcome | None:
        folder, prior = self._output / job.name, self._before[job.name]
        outcome = worker.run_job(
            job, folder, prior, lambda text: self._events.put((job.name, text))
        )
        if outcome is None:
            time.sleep(_LOOK)
        return outcome

    def wait_for_any(
        self, handles: Collection[_JobHandle], seconds: float | None
    ) -> Iterable[_JobHandle]:
        """Wait for a finished job; meanwhile forward progress messages."""
        while isinstance(event := self._events.get(timeout=seconds), tuple):
            self._listener.report(*event)
        return [event]

    def collect_answer(
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


class _NodesRunner:
    """Ray actor on a node that runs jobs and collects their progress messages.

    Args:
        folder: working directory of the command, for relative paths.
        threads: threads per job.
        trust: see `MixedPrecision`.
    """

    def __init__(self, folder: str, threads: int, trust: tuple[str, ...]) -> None:
        os.chdir(folder)
        self._runner = JobRunner(threads, trust)
        self._told: list[str] = []

    def run_job(self, job: JobOutcome, folder: Path, prior: JobOutcome | None) -> JobOutcome | None:
        return self._runner.run_job(job, folder, prior, self._told.append)

    def read_messages(self, start: int) -> list[str]:
        return self._told[start:]


class _RayPlace:
    """Slot of a node; see `JobWorker`."""

    def __init__(self, node: str, name: str, threads: int, trust: tuple[str, ...]) -> None:
        runner = run_on_node(_NodesRunner, node, threads, max_concurrency=_CALLS, max_restarts=0)
        self._runner: Any = runner.remote(str(Path.cwd()), threads, trust)
        self._name, self._heard = name, 0

    def run_job(
        self, job: JobOutcome, folder: Path, prior: JobOutcome | None, tell: Callable[[str], None]
    ) -> JobOutcome | None:
        import ray

        try:
            doing = self._runner.run_job.remote(job, folder, prior)
            while not (done := ray.wait([doing], timeout=_REMOTE_POLL_SECONDS)[0]):
                self._pass_on(tell)
            self._pass_on(tell)
            outcome: JobOutcome | None = ray.get(done[0])
        except ray.exceptions.RayActorError as error:
            logger.debug("a node was lost", exc_info=True)
            raise WorkerLostError(f"node {self._name} of the Ray cluster was lost") from error
        return outcome

    def _pass_on(self, tell: Callable[[str], None]) -> None:
        import ray

        for message in ray.get(self._runner.read_messages.remote(self._heard)):
            self._heard += 1
            tell(message)

    def stop_job(self) -> None:
        """Kill the runner; the process of its job ends with it."""
        import ray

        ray.kill(self._runner)


def _describe_machine_traits() -> NumericalTraits:
    by_framework = probe_installed_accumulation(hardware.detect())
    products = {f"{name} {kind}": by[kind] for name, by in by_framework.items() for kind in by}
    return NumericalTraits.from_accumulation(
        products, [entry.package for entry in FRAMEWORKS.values()]
    )


@contextmanager
def connect_ray_places(
    workers: Workers, trust: tuple[str, ...], warn: Callable[[str], None]
) -> Iterator[Sequence[_RayPlace]]:
    """Yield the slots of cluster nodes equivalent to this machine, while connected.

    Raises:
        MissingFrameworkError: Ray is not installed.
        ConfigurationError: the connection to the cluster fails.
        TuningError: no node can run jobs.
    """
    get_executor_named(workers.engine).check(workers)
    nodes = ClusterNodes(workers, _describe_machine_traits, warn)
    try:
        slots = nodes.list_slots()
        if not slots:
            raise nodes.no_slots_error("do jobs")
        yield [_RayPlace(node, nodes.node_name(node), nodes.threads, trust) for node, _ in slots]
    finally:
        nodes.leave_cluster()
