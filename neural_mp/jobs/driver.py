"""Parallel tuning jobs, one process each; finished jobs are skipped."""

from __future__ import annotations

import hashlib
import json
import logging
import sys
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

from neural_mp.api.saved_model import PAGE_FILE, name_target
from neural_mp.config import trust_of
from neural_mp.config.source import read_text
from neural_mp.core.hardware import detect
from neural_mp.data.user_imports import list_user_folders
from neural_mp.errors import ConfigurationError
from neural_mp.io.files import read_bounded
from neural_mp.io.limits import MAX_FILE_BYTES
from neural_mp.io.staged_folder import digest_of_file
from neural_mp.jobs.worker_pool import JobRunner, WorkerPool, connect_ray_places
from neural_mp.reporting.jobs import JobsListener
from neural_mp.reporting.page.document import build_jobs_page, write_page
from neural_mp.tuning.executors import read_workers
from neural_mp.tuning.executors.contract import LOCAL, RAY, Workers
from neural_mp.tuning.job_outcome import (
    LOG_FILE,
    RESULT,
    SUMMARY_FILE,
    JobOutcome,
    JobStatus,
    read_outcome,
)
from neural_mp.util.validators import file_path, validate_option

logger = logging.getLogger(__name__)

DEFAULT_OUTPUT = "neural_mp_jobs"
#: Number of digest characters in the name of a job's folder.
_LETTERS = 12
#: Keys of `tuning` that do not affect the result.
_NO_MATTER = ("workspace", "storage", "workers", "cache")
#: Longer strings are not file names.
_LONGEST = 500


def compute_job_digest(file: Path) -> str:
    """Return a digest of the settings in a tuning file and of the files that they name.

    Comments, order, layout and storage location are ignored. A file contributes its content; a
    folder the names, sizes and times of its files; `module:attribute` the module's file.

    If the file is not valid YAML, its text is hashed.

    Raises:
        ConfigurationError: the file is missing.
    """
    try:
        text = read_bounded(file, MAX_FILE_BYTES).decode("utf-8-sig", errors="replace")
    except OSError as error:
        raise ConfigurationError(
            f"{file}: the tuning file cannot be read: {error.strerror or error}"
        ) from error
    try:
        settings: Any = read_text(text, str(file)).data
    except ConfigurationError:
        settings = text  # the job reports the error
    if isinstance(settings, dict) and isinstance(settings.get("tuning"), dict):
        tuning = {k: v for k, v in settings["tuning"].items() if k not in _NO_MATTER}
        settings = {**settings, "tuning": tuning}
    named = {
        name: digest
        for name in _iterate_short_strings(settings)
        if (digest := _digest_by_name(name, file.parent))
    }
    content = json.dumps([settings, named], sort_keys=True, default=str)
    return hashlib.sha256(content.encode()).hexdigest()


def _iterate_short_strings(value: object) -> Iterator[str]:
    if isinstance(value, Mapping):
        for key, item in value.items():
            yield from _iterate_short_strings(key)
            yield from _iterate_short_strings(item)
    elif isinstance(value, list | tuple):
        for item in value:
            yield from _iterate_short_strings(item)
    elif isinstance(value, str) and len(value) < _LONGEST and value.isprintable():
        yield value


def _digest_by_name(name: str, folder: Path) -> str | None:
    """Return the digest of the file, folder or module that a string names; else None."""
    try:
        path = Path(name)
        if path.is_file():
            stat = path.stat()
            return _digest_file(path.resolve(), stat.st_size, stat.st_mtime_ns)
        if name and path.is_dir():
            return _digest_folder(path)
        source = _find_module_file(name, folder)
    except OSError:  # e.g. a name that is too long
        return None
    return _digest_by_name(str(source), folder) if source else None


@cache
def _digest_file(path: Path, size: int, changed: int) -> str:
    """Return the digest of a file; size and modification time are cache keys only."""
    return digest_of_file(path)


def _digest_folder(folder: Path) -> str:
    digest = hashlib.sha256()
    for path in sorted(folder.rglob("*")):
        if path.is_file():
            stat = path.stat()
            name = path.relative_to(folder).as_posix()
            digest.update(f"{name} {stat.st_size} {stat.st_mtime_ns}\n".encode())
    return digest.hexdigest()


def _find_module_file(name: str, folder: Path) -> Path | None:
    """Return the file of the module in `module:attribute` without importing the module."""
    module, colon, attribute = name.partition(":")
    parts = module.split(".")
    if not colon or not all(part.isidentifier() for part in (*parts, *attribute.split("."))):
        return None
    for root in (*list_user_folders(folder), *map(Path, sys.path)):
        base = root.joinpath(*parts)
        for file in (base.with_suffix(".py"), base / "__init__.py"):
            if file.is_file():
                return file
    return None


@dataclass(frozen=True)
class JobResults:
    """Results of many jobs.

    Attributes:
        outcomes: outcome of each job, in the order of the files.
        page: HTML page of all jobs.
    """

    outcomes: tuple[JobOutcome, ...]
    page: Path

    @property
    def failed(self) -> tuple[JobOutcome, ...]:
        """Jobs that ended without a result."""
        return tuple(job for job in self.outcomes if not job.status.has_result)

    @property
    def missed(self) -> tuple[JobOutcome, ...]:
        """Jobs whose target was not met by any plan."""
        return tuple(job for job in self.outcomes if job.status is JobStatus.MISSED)


def tune_many(
    files: str | Path | Iterable[str | Path],
    *,
    workers: int | str | Mapping[str, Any] = 1,
    output: str | Path = DEFAULT_OUTPUT,
    listener: JobsListener | None = None,
    trust: Iterable[str] = (),
) -> JobResults:
    """Tune the model of each tuning file in its own process.

    A finished job is skipped, even if its file was renamed; changed settings, model or data make a
    new job. A killed job is resumed. A failed job does not stop the others.

    Args:
        files: tuning files, patterns like `jobs/*.yaml`, or folders of tuning files.
        workers: number of parallel jobs, which share the cores equally; or a value of
            `MixedPrecision.workers` to run jobs on the nodes of a Ray cluster with a shared file
            system.
        output: folder for results, logs and the page, with one subfolder per job.
        listener: receives the events.
        trust: see `MixedPrecision`.

    Returns:
        The outcome of each job.

    Raises:
        ConfigurationError: no file is given, a file is missing, or `workers` is invalid.
        NeuralMPError: the folder is not writable, or no worker is left.
    """
    setting, trusted = read_workers(workers), trust_of(trust)
    folder, observer = validate_option("output", file_path, output), listener or JobsListener()
    paths = _expand_files(files)
    with name_target(folder):
        folder.mkdir(parents=True, exist_ok=True)
    earlier = {path.name[-_LETTERS:]: path.name for path in folder.iterdir() if path.is_dir()}
    jobs = [_stored_or_new_job(file, folder, earlier) for file in paths]
    try:
        _run_workers(jobs, folder, observer, setting, trusted)
    finally:
        ended = [(job, read_outcome(folder / job.name)) for job in jobs]
        outcomes = tuple(
            job if stored is None else replace(stored, file=job.file, known=job.known)
            for job, stored in ended
        )
        page = folder / SUMMARY_FILE
        write_page(page, build_jobs_page(outcomes, _map_page_links(outcomes, folder)))
    return JobResults(outcomes, page)


def _run_workers(
    jobs: list[JobOutcome],
    folder: Path,
    listener: JobsListener,
    workers: Workers,
    trust: tuple[str, ...],
) -> None:
    if workers.engine == LOCAL:
        cores = detect().cores
        open_jobs = len({job.name for job in jobs if not job.known})
        requested = workers.count or max(1, cores // (workers.threads or 1))
        count = max(1, min(requested, open_jobs))  # more workers would be idle
        # a single process uses all cores
        share = max(1, cores // count) if count > 1 else None
        runners = [JobRunner(workers.threads or share, trust) for _ in range(count)]
        WorkerPool(jobs, folder, listener, runners).run_jobs()
        return
    if workers.engine != RAY:
        raise ConfigurationError(
            f"the engine of workers must be {LOCAL} or {RAY}, got {workers.engine!r}"
        )
    with connect_ray_places(workers, trust, logger.warning) as ray_workers:
        WorkerPool(jobs, folder, listener, ray_workers).run_jobs()


def _expand_files(files: str | Path | Iterable[str | Path]) -> list[Path]:
    items = [files] if isinstance(files, str | Path) else list(files)
    paths: list[Path] = []
    for item in items:
        path = validate_option("a tuning file", file_path, item)
        if path.is_dir():
            paths += sorted([*path.glob("*.yaml"), *path.glob("*.yml")])
        elif path.exists():
            paths.append(path)
        else:  # perhaps a pattern that the shell has not expanded
            matches = Path(path.anchor).glob(str(path.relative_to(path.anchor)))
            paths += sorted(matches) or [path]
    missing = [str(path) for path in paths if not path.is_file()]
    if missing or not paths:
        reason = f"there is no {missing[0]!r}" if missing else "no tuning file was found"
        raise ConfigurationError(f"{reason}; give YAML files, a pattern or a folder of YAML files")
    return list(dict.fromkeys(paths))


def _stored_or_new_job(file: Path, output: Path, earlier: Mapping[str, str]) -> JobOutcome:
    """Return the stored or a new job; the digest identifies its folder."""
    digest = compute_job_digest(file)
    short = digest[:_LETTERS]
    name = earlier.get(short, f"{file.stem}-{short}")
    stored = read_outcome(output / name)
    if stored is None or not stored.status.has_result:
        return JobOutcome(name, str(file), digest, JobStatus.BEGUN, "not started")
    return replace(stored, name=name, file=str(file), known=True)


def _map_page_links(outcomes: Iterable[JobOutcome], output: Path) -> dict[str, str]:
    """Map each job to its page, else its log, as a link within the output folder."""
    links = {}
    for job in outcomes:
        for link in (f"{RESULT}/{PAGE_FILE}", LOG_FILE):
            if (output / job.name / link).is_file():
                links[job.name] = f"{job.name}/{link}"
                break
    return links
