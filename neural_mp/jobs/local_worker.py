"""Execution of jobs in processes on this machine."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

from neural_mp.tuning.job_outcome import LOG_FILE, JobOutcome, JobStatus, read_outcome
from neural_mp.util.environment import THREAD_VARIABLES, users_environment
from neural_mp.util.processes import python_command

try:
    import fcntl
except ImportError:  # Windows: commands must not share a folder
    fcntl = None  # type: ignore[assignment]

LOCK_FILE = "lock"


@contextmanager
def claimed(folder: Path) -> Iterator[int | None]:
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


#: Variables that limit threads; ONNX Runtime's adaptor reads the first.
_THREADS = (*THREAD_VARIABLES, "TF_NUM_INTRAOP_THREADS", "TF_NUM_INTEROP_THREADS")


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

    def run(
        self, job: JobOutcome, folder: Path, prior: JobOutcome | None, tell: Callable[[str], None]
    ) -> JobOutcome | None:
        """Run a job, or return the outcome if another process has just finished the job.

        Args:
            job: the job.
            folder: folder of the job.
            prior: stored outcome when this command started.
            tell: receives progress messages.

        Returns:
            The outcome; None if another process is running the job.
        """
        with claimed(folder) as lock:
            if lock is None:
                return None
            stored = read_outcome(folder)
            if stored is not None and stored != prior and stored.status.ended:
                return replace(stored, file=job.file)
            return self._run_process(job, folder, lock, resume=stored is not None, tell=tell)

    def _run_process(
        self,
        job: JobOutcome,
        folder: Path,
        lock: int,
        *,
        resume: bool,
        tell: Callable[[str], None],
    ) -> JobOutcome:
        started, log_file = time.monotonic(), folder / LOG_FILE
        logged = log_file.stat().st_size if log_file.exists() else 0
        begun = replace(job, reason="interrupted")
        begun.write(folder)
        tell("resumes" if resume else "starts")
        command = python_command("neural_mp.jobs.worker_main", job.file, str(folder))
        with log_file.open("a", encoding="utf-8") as log:
            self._process = process = subprocess.Popen(
                [*command, *(["--resume"] if resume else []), *self._trust],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
                env={**users_environment(), **self._limits},
                start_new_session=True,
                pass_fds=(lock,) if os.name == "posix" else (),
            )
        if self._stopped.is_set():
            self.stop()
        for message in _read_messages(process):
            tell(message)
        code = process.wait()
        outcome = read_outcome(folder) or begun
        if outcome.status is JobStatus.BEGUN and not self._stopped.is_set():
            outcome = replace(
                outcome,
                status=JobStatus.FAILED,
                reason=_failure_reason(code, log_file, logged),
                exit_code=code,
                seconds=time.monotonic() - started,
            )
            outcome.write(folder)
        return outcome

    def stop(self) -> None:
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


def _failure_reason(code: int, log: Path, offset: int) -> str:
    """Return why a process ended without a result: its signal, or exit code and last log line.

    Args:
        code: exit code.
        log: log file, with earlier contents.
        offset: size of the earlier contents in bytes.
    """
    if code < 0:
        signals = {int(number): number.name for number in signal.Signals}
        return f"the process was ended by signal {signals.get(-code, -code)}"
    output = log.read_bytes()[offset:].decode("utf-8", errors="replace")
    lines = [line.strip() for line in output.splitlines()]
    last = next((line for line in reversed(lines) if line), "")
    return f"the process ended with exit code {code} and no result" + (f": {last}" if last else "")
