"""What is kept of runs with one thing changed: records, histories, facts, outcomes of jobs."""

from __future__ import annotations

import base64
import gzip
import json
import random
import shutil
import sqlite3
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from attacks.mutants import broken, mutants

from neural_mp.core.observations import Observations
from neural_mp.io.measurement_cache import FileCache
from neural_mp.profiling.kernel_log import read_kernel_log
from neural_mp.reporting.page import page_of
from neural_mp.runs.history import HISTORY_FILE, get_storage_url, read_record
from neural_mp.runs.record_schema import read_record_file
from neural_mp.tuning.job_outcome import OUTCOME_FILE, JobOutcome, JobStatus, read_outcome
from neural_mp.util.validators import anything

Attacks = Iterator[tuple[str, Callable[[], object]]]

_RECORD, _PROFILE = "run.json.gz", "profile.json"
_EVENT = {
    "cat": "Node",
    "name": "conv_kernel_time",
    "dur": 12,
    "args": {
        "op_name": "Conv",
        "provider": "CPUExecutionProvider",
        "input_type_shape": [{"float": [1, 3, 8, 8]}],
        "output_type_shape": [{"float": [1, 4, 8, 8]}],
    },
}


def prepare(folder: Path) -> None:
    """Tune a net that gains from INT8 on handwritten digits, and keep the run in all forms."""
    from attacks.attacked_nets import torch_net

    from neural_mp import MixedPrecision
    from neural_mp.core.criterion import AccuracyCriterion, ExitPolicy
    from neural_mp.testing import Accuracy, digits

    train, _ = digits()
    result = MixedPrecision(
        model=torch_net(),
        precisions="int8,bf16",
        eval_dataloader=train.loader(100),
        metric=Accuracy(),
        accuracy_criterion=AccuracyCriterion(0.5, relative=False, any_tolerance=True),
        exit_policy=ExitPolicy(max_trials=3),
        workspace=folder / "workspace",
    ).fit()
    result.save(folder / "saved")
    shutil.copy(folder / "saved" / _RECORD, folder / _RECORD)
    shutil.copy(folder / "workspace" / HISTORY_FILE, folder / HISTORY_FILE)
    (folder / _PROFILE).write_text(json.dumps([_EVENT, _EVENT]))


def prepare_job(_folder: Path) -> None:
    """Prepare nothing: the outcome of a job is a small document."""


def record_attacks(folder: Path, scratch: Path, seed: int, count: int) -> Attacks:
    """Name and call of each attack on files."""
    packed = (folder / _RECORD).read_bytes()
    drawn = random.Random(f"records {seed}")
    records = mutants(json.loads(gzip.decompress(packed)), f"records {seed}", count)
    job = JobOutcome("a", "a.yaml", "0", JobStatus.MET, accuracy=0.5, latency=0.1).to_dict()
    jobs = mutants(job, f"jobs {seed}", count)
    observations = Observations({"x": {"kl": (0.0, 1.0)}}, {"x": 0.1}, 5).to_dict()
    facts = mutants(
        {"scope": {"key": "a"}, "entries": [["data", observations]]}, f"facts {seed}", count
    )
    events = json.loads((folder / _PROFILE).read_text())
    profiles = mutants({"events": events}, f"profiles {seed}", count)
    for _ in range(count):
        kind = drawn.choices(("record", "bytes", "job", "fact", "profile"), (60, 10, 10, 10, 10))[0]
        if kind == "record":
            case, tree = next(records)
            yield case, _of_record(scratch, gzip.compress(json.dumps(tree).encode(), 1))
        elif kind == "bytes":
            case, data = broken(packed, drawn)
            yield case, _of_record(scratch, data)
        elif kind == "job":
            case, tree = next(jobs)
            yield f"job: {case}", _of_job(scratch, tree)
        elif kind == "fact":
            case, tree = next(facts)
            yield f"fact: {case}", _of_fact(scratch, tree)
        else:
            case, tree = next(profiles)
            yield f"profile: {case}", _of_profile(scratch, tree)


def job_attacks(folder: Path, scratch: Path, seed: int, count: int) -> Attacks:
    """Name and call of each attack on the folder of a job."""
    drawn = random.Random(f"job folders {seed}")
    job = JobOutcome("a", "a.yaml", "0", JobStatus.MET, accuracy=0.5, latency=0.1).to_dict()
    jobs = mutants(job, f"job folders {seed}", count)
    for number in range(count):
        if number % 3:
            case, tree = next(jobs)
            yield case, _of_job(scratch, tree)
        else:
            case, data = broken(json.dumps(job).encode(), drawn)
            yield f"bytes: {case}", _of_job_file(scratch, data)


def history_attacks(folder: Path, scratch: Path, seed: int, count: int) -> Attacks:
    """Name and call of each attack on the database of a workspace."""
    whole = (folder / HISTORY_FILE).read_bytes()
    drawn = random.Random(f"histories {seed}")
    rows = _rows(folder / HISTORY_FILE)
    trees = [mutants({"value": value}, f"{seed} {row}", count) for row, value in rows]
    sizes = [len(json.dumps(value)) ** 0.5 for _, value in rows]
    for _ in range(count):
        if drawn.random() < 0.35:
            case, data = broken(whole, drawn)
            yield case, _of_database(scratch, data)
        else:
            index = drawn.choices(range(len(rows)), sizes)[0]
            case, tree = next(trees[index])
            row = rows[index][0]
            # A row that is left out altogether is mutated, too.
            value = tree.get("value", tree)
            yield f"{row} {case}", _of_row(scratch, whole, row, value)


Row = tuple[str, int, str]


def _rows(database: Path) -> list[tuple[Row, Any]]:
    """All attributes of runs and trials, unpacked."""
    rows = []
    with sqlite3.connect(database) as connection:
        for kind in ("study", "trial"):
            query = f"select {kind}_user_attribute_id, key, value_json from {kind}_user_attributes"
            for identity, key, text in connection.execute(query):
                value = json.loads(text)
                rows.append(((kind, identity, key), _unpacked(value)))
    return rows


def _unpacked(value: Any) -> Any:
    if not isinstance(value, str):
        return value
    try:
        return json.loads(zlib.decompress(base64.b85decode(value)))
    except (ValueError, zlib.error):
        return json.loads(value) if value.startswith("{") else value


def _of_row(scratch: Path, whole: bytes, row: Row, value: Any) -> Callable[[], object]:
    kind, identity, key = row
    text = json.dumps(value)
    if key in ("setup", "observations", "ending"):
        text = json.dumps(base64.b85encode(zlib.compress(text.encode())).decode())
    elif key == "trial":
        text = json.dumps(text)

    def call() -> None:
        database = _written(scratch, whole)
        with sqlite3.connect(database) as connection:
            change = f"update {kind}_user_attributes set value_json=? where "
            connection.execute(f"{change}{kind}_user_attribute_id=?", (text, identity))
        connection.close()
        page_of(read_record(get_storage_url(database.parent)))

    return call


def _of_database(scratch: Path, data: bytes) -> Callable[[], object]:
    def call() -> None:
        page_of(read_record(get_storage_url(_written(scratch, data).parent)))

    return call


def _written(scratch: Path, data: bytes) -> Path:
    home = scratch / "workspace"
    shutil.rmtree(home, ignore_errors=True)
    home.mkdir()
    (home / HISTORY_FILE).write_bytes(data)
    return home / HISTORY_FILE


def _of_record(scratch: Path, data: bytes) -> Callable[[], object]:
    def call() -> None:
        file = scratch / _RECORD
        file.write_bytes(data)
        page_of(read_record_file(file))

    return call


def _of_job(scratch: Path, tree: Any) -> Callable[[], object]:
    def call() -> None:
        (scratch / OUTCOME_FILE).write_text(json.dumps(tree))
        outcome = read_outcome(scratch)
        assert outcome is not None
        assert outcome.to_dict()

    return call


def _of_job_file(scratch: Path, data: bytes) -> Callable[[], object]:
    def call() -> None:
        (scratch / OUTCOME_FILE).write_bytes(data)
        read_outcome(scratch)

    return call


def _of_fact(scratch: Path, tree: Any) -> Callable[[], object]:
    """Facts that cannot be read are no error: they are measured again."""

    def call() -> None:
        cache = FileCache(scratch / "cache", data="data")
        cache.put_entry("a", Observations().to_dict())
        (file,) = (scratch / "cache").iterdir()
        file.write_bytes(zlib.compress(json.dumps(tree).encode()))
        _, observations = cache.get_entry("a", Observations.from_dict)
        assert observations is None or isinstance(observations, Observations)
        cache.scope_to(data="other data").get_entry("a", anything)

    return call


def _of_profile(scratch: Path, tree: Any) -> Callable[[], object]:
    def call() -> None:
        file = scratch / _PROFILE
        file.write_text(json.dumps(tree.get("events", tree)))
        read_kernel_log(file)

    return call
