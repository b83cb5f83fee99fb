"""Executor for processes on this machine, each with a copy of the model."""

from __future__ import annotations

import ctypes
import logging
import multiprocessing
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Collection, Iterable
from concurrent import futures
from contextlib import suppress
from typing import Any

import psutil

from neural_mp.core import hardware
from neural_mp.errors import ConfigurationError
from neural_mp.tuning.executors.contract import (
    LOCAL,
    Answer,
    Task,
    Worker,
    WorkerException,
    WorkerPayload,
    Workers,
    crashed_evaluation,
)
from neural_mp.tuning.executors.queued import PendingTask, QueuedExecutor
from neural_mp.util.system.environment import THREAD_VARIABLES
from neural_mp.util.system.memory import free_memory
from neural_mp.util.system.processes import make_worker_environment, restore_environment
from neural_mp.util.text import format_count

#: Interval of checks whether the owner is alive, in seconds.
_CHECK_INTERVAL_SECONDS = 1.0
#: `prctl` option: send a signal when the parent thread ends.
_PARENT_DEATH_SIGNAL = 1


def exit_with_parent(parent: int) -> None:
    """Exit this process and its forks when the process with the ID `parent` ends.

    Uses the kernel if supported, since code that never releases the interpreter would block a
    thread. A thread checks as well, for systems other than Linux.
    """
    ask = _parent_death_request()
    if ask is not None:
        ask()
        _ask_in_forks(ask)
    threading.Thread(target=_watch_parent, args=(parent,), daemon=True).start()


def _parent_death_request() -> Callable[[], object] | None:
    """Return a call that has the kernel kill this process with its parent, or None."""
    if not sys.platform.startswith("linux"):
        return None
    control = ctypes.CDLL(None).prctl
    return lambda: control(_PARENT_DEATH_SIGNAL, signal.SIGKILL, 0, 0, 0)


def _ask_in_forks(ask: Callable[[], object]) -> None:
    """Make forked processes, e.g. data loaders, exit with this process as well."""
    by_main_thread = False

    def note_thread() -> None:
        nonlocal by_main_thread
        by_main_thread = threading.current_thread() is threading.main_thread()

    def request_kill() -> None:
        # The kernel reacts to the end of the forking thread, which may precede that of the process.
        if by_main_thread:
            ask()

    os.register_at_fork(before=note_thread, after_in_child=request_kill)


def _watch_parent(parent: int) -> None:
    with suppress(psutil.NoSuchProcess):
        process = psutil.Process(parent)
        # On Windows, the ID of the parent stays, also when another process has it.
        while os.getppid() == parent and process.is_running():
            time.sleep(_CHECK_INTERVAL_SECONDS)
    os._exit(1)


logger = logging.getLogger(__name__)

#: The `Worker` of a worker process.
_worker: Worker | None = None


def _start_worker(kind: type, sent: bytes, threads: int, parent: int) -> None:
    global _worker
    restore_environment()
    exit_with_parent(parent)
    _worker = Worker(kind, sent, threads)


def _evaluate_task(task: Task, seconds: float) -> Answer:
    assert _worker is not None
    return _worker(task, seconds)


def count_possible_processes(workers: Workers, cores: int, free: int, each: int) -> tuple[int, str]:
    """Return the possible number of processes, and a warning if fewer than requested.

    Memory is in bytes: `free` in total, `each` per process.
    """
    by_cores = max(1, cores // (workers.threads or 1))
    by_memory = max(1, free // max(1, each))
    count = min(by_cores, by_memory, workers.count or by_cores)
    if workers.count is None or count == workers.count:
        return count, ""
    if by_memory < by_cores:
        why = f"{free >> 20} MiB of free memory, and a process needs about {each >> 20} MiB"
    elif workers.threads is not None:
        why = f"{format_count(cores, 'core')} for {format_count(workers.threads, 'thread')} each"
    else:
        why = format_count(cores, "core")
    processes = format_count(count, "process is", "processes are")
    return count, f"workers = {workers.count}: this machine has {why}; {processes} used"


class LocalExecutor(QueuedExecutor):
    """Processes on this machine, as many as cores and memory allow.

    Each process is a pool of its own, so that a crash is attributed to one plan and affects no
    other.
    """

    name = LOCAL

    @classmethod
    def check(cls, workers: Workers) -> None:
        """Check that this machine supports locks between processes.

        Raises:
            ConfigurationError: no shared memory is available.
        """
        super().check(workers)
        # A lock of the fork context is unlinked at once, without a resource tracker.
        context = multiprocessing.get_context("fork" if hasattr(os, "fork") else None)
        try:
            context.Lock()
        except OSError as error:
            raise ConfigurationError(
                f"{workers} requires shared memory, e.g. /dev/shm: {error}; set workers = 1"
            ) from error

    def __init__(self, work: WorkerPayload, workers: Workers, warn: Callable[[str], None]) -> None:
        super().__init__(work, workers, warn)
        cores = hardware.detect().cores
        # A worker needs as much memory as this process: framework, model and data.
        memory = psutil.Process().memory_info().rss
        count, warning = count_possible_processes(workers, cores, free_memory(), memory)
        if warning:
            warn(warning)
        self.threads = workers.threads or max(1, cores // count)
        self._pools: list[Any] = [None] * count

    def list_places(self) -> Iterable[int]:
        """Return the indices of the processes."""
        return range(len(self._pools))

    def start_task(self, slot: int, task: Task, seconds: float) -> futures.Future[Answer]:
        """Send a plan or shard to a process, starting it if necessary."""
        if self._pools[slot] is None:
            self._pools[slot] = self._start_pool()
        future: futures.Future[Answer] = self._pools[slot].submit(_evaluate_task, task, seconds)
        return future

    def _start_pool(self) -> Any:
        import loky

        return loky.ProcessPoolExecutor(
            1,
            initializer=_start_worker,
            initargs=(self.work.kind, self.work.sent, self.threads, os.getpid()),
            env=make_worker_environment(dict.fromkeys(THREAD_VARIABLES, str(self.threads))),
        )

    def wait_for_any(self, handles: Collection[Any], seconds: float | None) -> Iterable[Any]:
        """Wait for at least one process."""
        return futures.wait(handles, seconds, return_when=futures.FIRST_COMPLETED).done

    def stop_task(self, slot: int, handle: futures.Future[Answer]) -> None:
        """Kill a process and its children."""
        self._end_pool(slot, at_once=True)

    def collect_answer(
        self, slot: int, handle: futures.Future[Answer], ticket: PendingTask
    ) -> Answer:
        """Return the answer of a process, or that it crashed."""
        from loky.process_executor import BrokenProcessPool, TerminatedWorkerError

        try:
            return handle.result()
        except BrokenProcessPool as error:
            self._end_pool(slot, at_once=True)
            killed = isinstance(error, TerminatedWorkerError)
            return crashed_evaluation() if killed else WorkerException(error)
        except Exception as error:
            # Errors of unpickling the payload or loading the model.
            logger.debug("A worker process raised an exception", exc_info=True)
            return WorkerException(error)

    def close(self) -> None:
        """Stop the processes, even if busy."""
        for slot in self.list_places():
            if self._pools[slot] is not None:
                self._end_pool(slot, at_once=bool(self.busy_handles))

    def _end_pool(self, slot: int, at_once: bool) -> None:
        self._pools[slot].shutdown(wait=True, kill_workers=at_once)
        self._pools[slot] = None
