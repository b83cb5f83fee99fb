"""How a storage with many runs behaves: seconds to start a run, to list all, to read one.

    python -m benchmarks.history --runs 10000 --models 100
    python -m benchmarks.history --writers 16 [--storage postgresql://…]
    python -m benchmarks.history --jobs 10000

Runs are written into SQLite by Optuna's own tables in one transaction: through its interface that
would take an hour. `--jobs` times `tune-many` where so many jobs are finished already.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

import optuna
import sqlalchemy

from neural_mp import tune_many
from neural_mp.core.plan import PrecisionPlan
from neural_mp.core.precision import OpConfig, Precision
from neural_mp.core.trial import Outcome, Trial
from neural_mp.jobs.driver import compute_job_digest
from neural_mp.runs.history import History, get_storage_url
from neural_mp.runs.lease import RUN_TABLE
from neural_mp.runs.registry import run_names
from neural_mp.tuning.job_outcome import JobOutcome, JobStatus
from neural_mp.util.optional_packages import silence_optuna_log

#: The tuning file of a job, and the bytes of its model.
JOB, BYTES = "model: {name: %s}\ntuning: {random_seed: %d}\n", 10_000_000
#: Trials that every writer writes.
TRIALS = 20


def main() -> None:
    """Make the storage, and print a table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--runs", type=int, default=10_000)
    parser.add_argument("--models", type=int, default=100)
    parser.add_argument("--writers", type=int, default=0, help="processes that write trials")
    parser.add_argument("--jobs", type=int, help="finished jobs that are started again")
    parser.add_argument("--storage", help="Optuna storage URL; a new SQLite file by default")
    arguments = parser.parse_args()
    if arguments.jobs:
        restart_jobs(arguments.jobs)
        return
    if arguments.writers:
        write(arguments.writers, arguments.storage)
        return
    with tempfile.TemporaryDirectory() as folder:
        url = get_storage_url(folder)
        rows = [("a run in an empty storage", timed(lambda: started(url, 0)))]
        fill(url, arguments.runs, arguments.models)
        size = Path(folder, "history.db").stat().st_size
        print(f"{arguments.runs} runs of {arguments.models} models, {size / 1e6:.1f} MB")
        rows += [
            ("a new run", timed(lambda: started(url, 1))),
            ("a new run of a model not seen before", timed(lambda: started(url, arguments.models))),
            ("resume the latest run of a model", timed(lambda: started(url, 1, resume=True))),
            ("list all runs", timed(lambda: run_names(url))),
            ("list all with Optuna's summaries", timed(lambda: summaries(url))),
            ("list the runs of one model", timed(lambda: run_names(url, digest(1)[:12]))),
        ]
    for what, seconds in rows:
        print(f"{what:40} {seconds:6.2f} s")


def restart_jobs(count: int) -> None:
    """Make finished jobs of one model, and start them again."""
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        model, files = root / "model.onnx", root / "jobs"
        model.write_bytes(bytes(BYTES))
        files.mkdir()
        for number in range(count):
            file = files / f"job{number:05d}.yaml"
            file.write_text(JOB % (model, number))
            digest = compute_job_digest(file)
            name = f"{file.stem}-{digest[:12]}"
            job = JobOutcome(name, str(file), digest, JobStatus.MET, accuracy=0.97, seconds=60.0)
            job.write(root / "results" / name)
        started = time.perf_counter()
        results = tune_many(files, output=root / "results")
        seconds = time.perf_counter() - started
        assert all(job.known for job in results.outcomes)
        size = results.page.stat().st_size
        print(f"{count} finished jobs: {seconds:.1f} s, page of {size / 1e6:.1f} MB")


def write(writers: int, storage: str | None) -> None:
    """Let processes write trials into one storage, each into a run of its own."""
    with tempfile.TemporaryDirectory() as folder, ProcessPoolExecutor(writers) as pool:
        url = storage or get_storage_url(folder)
        started(url, 0)
        list(pool.map(tried, [url] * writers, range(writers), [1] * writers))  # all have imported
        begun = time.perf_counter()
        slowest = max(pool.map(tried, [url] * writers, range(writers), [TRIALS] * writers))
        seconds = time.perf_counter() - begun
    mean = 1000 * seconds / TRIALS
    print(
        f"{writers} writers: {writers * TRIALS / seconds:.0f} trials/s in all, {mean:.0f} ms each"
    )
    print(f"the slowest trial took {slowest:.2f} s")


def tried(url: str, model: int, count: int) -> float:
    """Write trials into a new run of a model; seconds that the slowest of them took."""
    history, slowest = started(url, model), 0.0
    plan = PrecisionPlan({"conv": OpConfig(Precision.BF16)})
    for _ in range(count):
        begun = time.perf_counter()
        history.finish_trial(Trial(plan, Outcome.MET, 0.97, number=history.begin_trial()))
        slowest = max(slowest, time.perf_counter() - begun)
    return slowest


def digest(model: int) -> str:
    """The fingerprint of a model that does not exist."""
    return hashlib.sha256(str(model).encode()).hexdigest()[:16]


def about(model: int) -> dict[str, str]:
    """What a run is about, as `History` keeps it."""
    return {"model": digest(model), "data": "100:0123456789abcdef", "criterion": "1 % relative"}


def started(url: str, model: int, resume: bool = False) -> History:
    """A run that is started, or gone on with."""
    return History(url, about(model), higher_is_better=True, resume=resume)


def summaries(url: str) -> None:
    """What a look at the storage costs without us."""
    optuna.get_all_study_summaries(url)


def timed(work: Callable[[], Any]) -> float:
    """Seconds that something takes."""
    begun = time.perf_counter()
    work()
    return time.perf_counter() - begun


def fill(url: str, runs: int, models: int) -> None:
    """Copy one small run with a trial so often, each under the name of a model's next run."""
    history = started(url, 0)
    history.baseline = {"accuracy": 0.97, "seconds": 1.0}
    history.cache.put_entry("values", {f"op_{number}": number / 7 for number in range(200)})
    plan = PrecisionPlan({"conv": OpConfig(Precision.BF16)})
    history.finish_trial(Trial(plan, Outcome.MET, 0.97, number=history.begin_trial()))
    engine = sqlalchemy.create_engine(url)
    tables = sqlalchemy.MetaData()
    tables.reflect(engine)
    with silence_optuna_log(), engine.begin() as connection:
        first = _rows(connection, tables.tables["studies"])[-1]
        for name in ("studies", "study_directions", "study_user_attributes", "trials"):
            table = tables.tables[name]
            ours = [r for r in _rows(connection, table) if r["study_id"] == first["study_id"]]
            key = next(iter(table.primary_key)).name
            copies = []
            for number in range(runs):
                for row in ours:
                    copy = {**row, "study_id": first["study_id"] + 1 + number}
                    if key != "study_id":
                        copy.pop(key)
                    if name == "studies":
                        run = number // models + 3
                        copy["study_name"] = f"{digest(number % models)[:12]}/tuning-{run:04d}"
                    copies.append(copy)
            connection.execute(table.insert(), copies)
            if name == "studies":
                rows = [
                    {
                        "name": copy["study_name"],
                        "fingerprint": json.dumps(about(number % models)),
                    }
                    for number, copy in enumerate(copies)
                ]
                connection.execute(tables.tables[RUN_TABLE].insert(), rows)


def _rows(connection: sqlalchemy.Connection, table: sqlalchemy.Table) -> list[dict[str, Any]]:
    return [dict(row) for row in connection.execute(table.select()).mappings()]


if __name__ == "__main__":
    main()
