"""Runs jobs side by side, each in a process of its own, and never one that is finished."""

from __future__ import annotations

import json
import os
import queue
import signal
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from neural_mp.api.many.claim import claimed
from neural_mp.api.many.digest import job_digest
from neural_mp.api.many.folder import LOG_FILE, RESULT, SUMMARY_FILE
from neural_mp.api.saved_folder import PAGE_FILE
from neural_mp.core.environment import users_environment
from neural_mp.errors import ConfigurationError, NeuralMPError
from neural_mp.reporting.jobs import JobsListener
from neural_mp.reporting.page.document import write_page
from neural_mp.reporting.page.jobs import jobs_page
from neural_mp.tuning.job_outcome import JobOutcome, JobStatus, read_outcome

DEFAULT_OUTPUT = "neural_mp_jobs"
#: Characters of a job's digest in the name of its folder.
_LETTERS = 12
#: Seconds between two looks at a job that another process does.
_LOOK = 0.2
#: What limits threads → in OpenMP, MKL, OpenBLAS, TensorFlow; ONNX Runtime's adaptor obeys the
#: first.
_THREADS = (
    *("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"),
    *("TF_NUM_INTRAOP_THREADS", "TF_NUM_INTEROP_THREADS"),
)


@dataclass(frozen=True)
class JobResults:
    """What came of many jobs.

    Attributes:
        outcomes: of every job, in the order in which they were given.
        page: the HTML page that shows them.
    """

    outcomes: tuple[JobOutcome, ...]
    page: Path

    @property
    def failed(self) -> tuple[JobOutcome, ...]:
        """Those that ended without a result."""
        return tuple(job for job in self.outcomes if not job.status.finished)

    @property
    def missed(self) -> tuple[JobOutcome, ...]:
        """Those whose target no plan met."""
        return tuple(job for job in self.outcomes if job.status is JobStatus.MISSED)


def tune_many(
    files: str | Path | Iterable[str | Path],
    *,
    workers: int = 1,
    output: str | Path = DEFAULT_OUTPUT,
    listener: JobsListener | None = None,
) -> JobResults:
    """Tune many models, each as a YAML file says, in a process of its own.

    A job that was finished before is not done again, whatever its file is called now; one whose
    settings, model or data changed is another job. A job that was killed goes on where it was. A
    job that fails stops no other.

    Args:
        files: tuning files; patterns such as `jobs/*.yaml` and folders of them, too.
        workers: how many run side by side; each may use its share of the cores.
        output: the folder for results, logs and the page; each job has a folder in it.
        listener: receives what happens.

    Returns:
        What came of every job.

    Raises:
        ConfigurationError: no file was given, one does not exist, or `workers` is no number.
        NeuralMPError: the folder cannot be written.
    """
    if not isinstance(workers, int) or isinstance(workers, bool) or workers < 1:
        raise ConfigurationError(f"workers must be at least 1, got {workers!r}")
    folder, told = Path(output), listener or JobsListener()
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise NeuralMPError(f"{output!r} cannot be written: {error}") from error
    earlier = {path.name[-_LETTERS:]: path.name for path in folder.iterdir() if path.is_dir()}
    jobs = [_job(file, folder, earlier) for file in _expanded(files)]
    try:
        _Team(jobs, folder, told, workers).work()
    finally:
        outcomes = tuple(_now(job, folder) for job in jobs)
        page = folder / SUMMARY_FILE
        write_page(page, jobs_page(outcomes, _pages(outcomes, folder)))
    return JobResults(outcomes, page)


def _expanded(files: str | Path | Iterable[str | Path]) -> list[Path]:
    given = [files] if isinstance(files, str | Path) else list(files)
    found: list[Path] = []
    for word in given:
        path = Path(word)
        if path.is_dir():
            found += sorted([*path.glob("*.yaml"), *path.glob("*.yml")])
        elif path.exists():
            found.append(path)
        else:
            found += _matching(path) or [path]
    missing = [str(path) for path in found if not path.is_file()]
    if missing or not found:
        words = f"there is no {missing[0]!r}" if missing else "no tuning file was found"
        raise ConfigurationError(f"{words}; give YAML files, a pattern or a folder of them")
    return list(dict.fromkeys(found))


def _matching(pattern: Path) -> list[Path]:
    """The files that a pattern stands for, where the shell has not seen to it."""
    return sorted(Path(pattern.anchor).glob(str(pattern.relative_to(pattern.anchor))))


def _job(file: Path, output: Path, earlier: Mapping[str, str]) -> JobOutcome:
    """A job as it was left, or one that was never begun; its folder is found by its digest."""
    digest = job_digest(file)
    short = digest[:_LETTERS]
    name = earlier.get(short, f"{file.stem}-{short}")
    fresh = JobOutcome(name, str(file), digest, JobStatus.BEGUN, "it was not begun")
    return _as_left(fresh, output)


def _as_left(job: JobOutcome, output: Path) -> JobOutcome:
    left = read_outcome(output / job.name)
    if left is None or not left.status.finished:
        return job
    return replace(left, name=job.name, file=job.file, known=True)


def _now(job: JobOutcome, output: Path) -> JobOutcome:
    found = read_outcome(output / job.name)
    return job if found is None else replace(found, file=job.file, known=job.known)


def _pages(outcomes: Iterable[JobOutcome], output: Path) -> dict[str, str]:
    """Job → its page or, where there is none, its log; as a link within the output folder."""
    found = {}
    for job in outcomes:
        for link in (f"{RESULT}/{PAGE_FILE}", LOG_FILE):
            if (output / job.name / link).is_file():
                found[job.name] = f"{job.name}/{link}"
                break
    return found


class _Team:
    """Threads that each have one job's process at a time.

    Args:
        jobs: all of them.
        output: the folder that their folders are in.
        listener: receives what happens, in this thread.
        workers: how many run side by side.
    """

    def __init__(
        self, jobs: list[JobOutcome], output: Path, listener: JobsListener, workers: int
    ) -> None:
        self._output, self._listener, self._workers = output, listener, workers
        self._jobs = jobs
        unique = {job.name: job for job in jobs if not job.known}
        self._left = deque(unique.values())
        self._before = {name: read_outcome(output / name) for name in unique}
        self._threads_each = max(1, (_cores() or 1) // workers)
        self._events: queue.Queue[Callable[[], None] | None] = queue.Queue()
        self._running: set[subprocess.Popen[str]] = set()
        self._stopped = threading.Event()

    def work(self) -> None:
        """Do all jobs that are left, and tell the listener."""
        listener = self._listener
        listener.began(len({job.name for job in self._jobs}))
        for job in {job.name: job for job in self._jobs if job.known}.values():
            listener.ended(job)
        count = min(self._workers, len(self._left))
        threads = [threading.Thread(target=self._serve) for _ in range(count)]
        for thread in threads:
            thread.start()
        try:
            ended = 0
            while ended < count:
                event = self._events.get()
                if event is None:
                    ended += 1
                else:
                    event()
        finally:
            self._stopped.set()
            for process in list(self._running):
                _end(process)
            for thread in threads:
                thread.join()
            listener.close()

    def _serve(self) -> None:
        try:
            while not self._stopped.is_set():
                try:
                    job = self._left.popleft()
                except IndexError:
                    return
                with claimed(self._output / job.name) as lock:
                    if lock is None:
                        self._left.append(job)
                        time.sleep(_LOOK)
                        continue
                    outcome = self._done(job, lock)
                if not self._stopped.is_set():
                    self._tell(self._listener.ended, outcome)
        finally:
            self._events.put(None)

    def _done(self, job: JobOutcome, lock: int) -> JobOutcome:
        """Have a process do a job, unless another one was just faster."""
        folder, started = self._output / job.name, time.monotonic()
        left = read_outcome(folder)
        if left is not None and left != self._before[job.name] and left.status.ended:
            return replace(left, file=job.file)
        resume, logged = left is not None, _size(folder / LOG_FILE)
        begun = replace(job, reason="it was cut off")
        begun.write(folder)
        self._tell(self._listener.told, job.name, "resumes" if resume else "starts")
        command = [sys.executable, "-m", "neural_mp.api.many.process", job.file, str(folder)]
        with (folder / LOG_FILE).open("a", encoding="utf-8") as log:
            process = subprocess.Popen(
                [*command, *(["--resume"] if resume else [])],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
                env={**users_environment(), **self._limits()},
                start_new_session=True,
                pass_fds=(lock,) if os.name == "posix" else (),
            )
        self._running.add(process)
        if self._stopped.is_set():
            _end(process)
        for words in _lines(process):
            self._tell(self._listener.told, job.name, words)
        code = process.wait()
        self._running.discard(process)
        found = read_outcome(folder) or begun
        if found.status is JobStatus.BEGUN and not self._stopped.is_set():
            seconds = time.monotonic() - started
            reason = _why(code, folder / LOG_FILE, logged)
            found = replace(
                found, status=JobStatus.FAILED, reason=reason, exit_code=code, seconds=seconds
            )
            found.write(folder)
        return found

    def _limits(self) -> dict[str, str]:
        """No limit for one process, which has all cores anyway."""
        if self._workers == 1:
            return {}
        return dict.fromkeys(_THREADS, str(self._threads_each))

    def _tell(self, method: Callable[..., None], *values: Any) -> None:
        self._events.put(lambda: method(*values))


def _lines(process: subprocess.Popen[str]) -> Iterator[str]:
    assert process.stdout is not None
    for line in process.stdout:
        try:
            yield str(json.loads(line))
        except ValueError:
            continue  # the last line of a process that was killed in its middle


def _end(process: subprocess.Popen[str]) -> None:
    """A job's process ends, with its workers, when nobody is there to talk to any more."""
    if process.stdin is not None:
        process.stdin.close()


def _size(file: Path) -> int:
    return file.stat().st_size if file.exists() else 0


def _why(code: int, log: Path, before: int) -> str:
    """Why a process ended without a result, with what it said last unless a signal ended it.

    Args:
        code: the exit code.
        log: what it said, behind what others had said.
        before: how many bytes those are.
    """
    if code < 0:
        known = {int(number): number.name for number in signal.Signals}
        return f"its process was ended by signal {known.get(-code, -code)}"
    said = log.read_bytes()[before:].decode("utf-8", errors="replace")
    lines = [line.strip() for line in said.splitlines()]
    last = next((line for line in reversed(lines) if line), "")
    return f"its process ended with exit code {code} and no result" + (f": {last}" if last else "")


def _cores() -> int | None:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
