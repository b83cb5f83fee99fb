"""Opening of a storage, its runs by name and fingerprint, and differences of fingerprints.

Parsing names alone keeps ten thousand runs fast.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from neural_mp.core import hardware
from neural_mp.errors import HistoryError
from neural_mp.io.readers import parse_json
from neural_mp.runs.lease import RunLease, create_run_table, run_rows
from neural_mp.runs.sqlite_checks import (
    SQLITE_BUSY_SECONDS,
    check_sqlite_file,
    get_database_file,
)
from neural_mp.util.fingerprint import FINGERPRINT_VERSION, code_fingerprint
from neural_mp.util.optional_packages import install_command
from neural_mp.util.system.environment import list_numeric_variables, read_package_versions
from neural_mp.util.validators import mapping_of, string

if TYPE_CHECKING:
    from optuna.storages import RDBStorage

#: Suffix of keys with detailed fingerprints; runs of earlier versions have only the key without it.
_DETAIL = " in detail"
_NAME_RE = re.compile(r"(\w+)/tuning-(\d+)")
#: Characters of a model's fingerprint in a run name.
_DIGEST_CHARS = 12
#: Retries, and seconds between them, while another process creates the tables of a new storage.
_OPEN_RETRIES, _RETRY_SECONDS = 20, 0.1
#: Names tried for a new run, since other processes may take names.
_MAX_NAMES = 100
#: Models and runs listed in an error.
_MAX_LISTED = 5


def in_detail(**subjects: object) -> dict[str, str]:
    """Fingerprint the code of functions and objects, by display name, as a part of a fingerprint.

    Returns:
        Key → fingerprint as JSON, without subjects that cannot be fingerprinted.
    """
    # Bytecode differs between versions of Python.
    versions = f"{sys.version_info.major}.{sys.version_info.minor}, form {FINGERPRINT_VERSION}"
    fingerprints = {}
    for name, subject in subjects.items():
        code = code_fingerprint(subject)
        if code is not None:
            values = {"python": versions, "digest": code.digest, "options": dict(code.options)}
            fingerprints[name + _DETAIL] = json.dumps(values, sort_keys=True)
    return fingerprints


def list_differences(previous: Mapping[str, str], current: Mapping[str, str]) -> list[str]:
    """List as text the parts of a fingerprint that differ from those of another run."""
    plain = [k for k in current if not k.endswith(_DETAIL) and previous.get(k) != current[k]]
    more = []
    for key in current:
        name = key.removesuffix(_DETAIL)
        if (
            key.endswith(_DETAIL)
            and name not in plain
            and previous.get(key, current[key]) != current[key]
        ):
            more += _describe_changes(name, json.loads(previous[key]), json.loads(current[key]))
    return plain + more


def _describe_changes(
    name: str, previous: Mapping[str, Any], current: Mapping[str, Any]
) -> list[str]:
    """Describe how the code or options of a subject differ; empty if they are equal."""
    old, new = previous["options"], current["options"]
    changed = [option for option in {**old, **new} if old.get(option) != new.get(option)]
    if previous["python"] != current["python"]:
        changed = [option for option in changed if option in old and option in new]
    elif previous["digest"] == current["digest"]:
        return []
    if not changed:
        return [f"code of the {name}"] if previous["python"] == current["python"] else []
    parts = (f"{o} = {new.get(o, 'none')}, before {old.get(o, 'none')}" for o in changed)
    return [f"{name} ({'; '.join(parts)})"]


def describe_machine_key(packages: tuple[str, ...]) -> dict[str, str]:
    """Return what affects numerics and latency: machine, package versions, environment."""
    host = hardware.detect()
    return {
        "cpu": host.name,
        "flags": " ".join(sorted(host.flags)),
        "cores": str(host.cores),
        "forced": " ".join(sorted(host.forced)),
        **read_package_versions(("neural-mp", "numpy", *packages)),
        **list_numeric_variables(),
    }


@dataclass(frozen=True)
class RunName:
    """The name of a run.

    Attributes:
        model: prefix of the model's fingerprint.
        number: counted from 1 for every model.
    """

    model: str
    number: int

    def __str__(self) -> str:
        return f"{self.model}/tuning-{self.number:04d}"


def compute_model_digest(fingerprint: Mapping[str, str]) -> str:
    """Return the digest of a run's model, used in the names of its runs."""
    model = fingerprint.get("model", "")
    if not re.fullmatch(rf"[0-9a-f]{{{_DIGEST_CHARS},}}", model):
        model = hashlib.sha256(model.encode()).hexdigest()
    return model[:_DIGEST_CHARS]


def open_storage(url: str) -> RDBStorage:
    """Open the storage at a URL; database errors propagate.

    Raises:
        HistoryError: a SQLite file holds anything but plain tables, its journal names another
            file, or the driver of the database is not installed.
    """
    from optuna.storages import RDBStorage
    from sqlalchemy.exc import DBAPIError, IntegrityError

    _require_driver(url)
    new = _is_new_sqlite_file(url)
    check_sqlite_file(url)
    waits = {"connect_args": {"timeout": SQLITE_BUSY_SECONDS}} if url.startswith("sqlite") else {}
    for retries_left in reversed(range(_OPEN_RETRIES + 1)):
        try:
            storage = RDBStorage(url, engine_kwargs=waits, skip_compatibility_check=new)
            create_run_table(storage.engine)
            break
        except DBAPIError as error:
            # Another process may be creating the same tables in a new storage.
            raced = isinstance(error, IntegrityError) or "already exists" in str(error)
            if not retries_left or not raced:
                raise
        time.sleep(_RETRY_SECONDS)
    return storage


def require_file(url: str) -> None:
    """Check that the SQLite file of a URL exists, which SQLAlchemy would create.

    Raises:
        HistoryError: there is no such file.
    """
    if _is_new_sqlite_file(url):
        raise HistoryError(
            f"there is no run in {url!r}: the file does not exist; give the storage or the "
            f"workspace of a run"
        )


def _require_driver(url: str) -> None:
    """Check that the package with which SQLAlchemy reaches a PostgreSQL database is installed."""
    from sqlalchemy.engine import make_url

    if not url.startswith("postgresql"):
        return
    dialect = make_url(url).get_dialect()
    try:
        dialect.import_dbapi()
    except ImportError as error:
        raise HistoryError(
            f"a PostgreSQL storage requires the package {error.name}, which is not installed; "
            f"install it with: {install_command('postgresql')}"
        ) from error


def _is_new_sqlite_file(url: str) -> bool:
    file = get_database_file(url)
    return file is not None and not os.path.lexists(file)


def close_storage(storage: RDBStorage) -> None:
    """Close all connections, so that this process keeps no database file open."""
    storage.remove_session()
    storage.engine.dispose()


def run_names(storage: RDBStorage | str, model: str | None = None) -> list[RunName]:
    """Return the names of tuning runs, latest last, of all models or of a model's digest.

    Other studies in the storage are skipped.
    """
    opened = open_storage(storage) if isinstance(storage, str) else storage
    return [name for name, _ in _read_named_rows(opened, model)]


def _read_named_rows(storage: RDBStorage, model: str | None) -> Iterator[tuple[RunName, Any]]:
    for text, fingerprint in run_rows(storage.engine, f"{model}/" if model else ""):
        match = _NAME_RE.fullmatch(text)
        if match:
            yield RunName(match[1], int(match[2])), fingerprint


def _runs_with_fingerprints(
    storage: RDBStorage, model: str | None = None
) -> list[tuple[RunName, dict[str, str]]]:
    return [
        (name, parse_json(text, mapping_of(string), f"{name}: fingerprint", HistoryError))
        for name, text in _read_named_rows(storage, model)
    ]


def choose_stored_run(
    runs: Sequence[RunName], number: int | None, model: str | None, url: str
) -> RunName:
    """Return the run that a user selected of all runs, latest last.

    `model` is the prefix of a digest; without a number, the latest of the matching runs is chosen.

    Raises:
        HistoryError: no run matches, or several models have a run of this number.
    """
    if not runs:
        raise HistoryError(f"there is no run in {url!r}; tune a model with this workspace")
    models = list(dict.fromkeys(name.model for name in reversed(runs)))
    matching = [m for m in models if model is None or m.startswith(model)]
    if not matching:
        raise HistoryError(
            f"there is no run of a model {model!r} in {url!r}; {_list_latest_models(models)}"
        )
    if model and len(matching) > 1:
        raise HistoryError(
            f"{model!r} must be the prefix of a single model's digest in {url!r}; "
            f"{_list_latest_models(matching)}"
        )
    of_model = [name for name in runs if name.model in matching]
    selected = [name for name in of_model if number in (None, name.number)]
    if not selected:
        numbers = ", ".join(str(name.number) for name in of_model[-_MAX_LISTED:])
        raise HistoryError(f"there is no run {number} in {url!r}; the latest are {numbers}")
    if number is not None and len(selected) > 1:
        models = [name.model for name in reversed(selected)]
        raise HistoryError(
            f"there are runs {number} of several models in {url!r}; name the model, too; "
            f"{_list_latest_models(models)}"
        )
    return selected[-1]


def _list_latest_models(models: Sequence[str]) -> str:
    more = f" and {len(models) - _MAX_LISTED} more" if len(models) > _MAX_LISTED else ""
    return f"models, latest first: {', '.join(models[:_MAX_LISTED])}{more}"


def has_study(storage: RDBStorage, name: RunName) -> bool:
    """Whether Optuna still has the study of a run; users may delete studies in its dashboard."""
    try:
        storage.get_study_id_from_name(str(name))
    except KeyError:
        return False
    return True


def create_run(
    storage: RDBStorage, fingerprint: Mapping[str, str], higher_is_better: bool
) -> tuple[RunName, RunLease]:
    """Create a run and return its name and lease.

    The row is inserted last, so that no process ever sees a run without a fingerprint.

    Raises:
        HistoryError: the storage is damaged, so that it accepts no study.
    """
    import optuna

    directions = optuna.study.StudyDirection
    direction = directions.MAXIMIZE if higher_is_better else directions.MINIMIZE
    model = compute_model_digest(fingerprint)
    number = max((name.number for name in run_names(storage, model)), default=0)
    for _ in range(_MAX_NAMES):
        number += 1
        name = RunName(model, number)
        try:
            storage.create_new_study([direction], str(name))
        except optuna.exceptions.DuplicatedStudyError:
            continue  # another process took the number, and its row may not be there yet
        return name, RunLease(storage.engine, str(name), fingerprint)
    # Optuna reports any conflict of a new study as that of its name.
    raise HistoryError(
        f"a run cannot be created: {_MAX_NAMES} names up to {str(name)!r} conflict with studies in "
        f"the storage, whose tables are damaged; use another workspace"
    )


def lease_run(
    storage: RDBStorage, fingerprint: Mapping[str, str], url: str, name: str = ""
) -> tuple[RunName, RunLease]:
    """Return the run of `find_latest_run`, and its lease; messages contain the URL.

    Raises:
        HistoryError: no run matches; the message compares with the latest run.
        RunInUseError: another process writes to the run.
    """
    run = find_latest_run(storage, fingerprint, name)
    if run is None:
        raise _nothing_to_resume(storage, fingerprint, url, name)
    return run, RunLease(storage.engine, str(run))


def find_latest_run(
    storage: RDBStorage, fingerprint: Mapping[str, str], name: str = ""
) -> RunName | None:
    """Return the latest run with the same fingerprint, of this name if given; None without."""
    for run, previous in reversed(
        _runs_with_fingerprints(storage, compute_model_digest(fingerprint))
    ):
        is_meant = name in ("", str(run))
        if is_meant and not list_differences(previous, fingerprint) and has_study(storage, run):
            return run
    return None


def _nothing_to_resume(
    storage: RDBStorage, fingerprint: Mapping[str, str], url: str, name: str = ""
) -> HistoryError:
    """Return an error that compares with the named run, or the latest of the model, else of any."""
    runs = [run for run in _runs_with_fingerprints(storage) if name in ("", str(run[0]))]
    of_model = [run for run in runs if run[1].get("model") == fingerprint.get("model")]
    if not runs:
        return HistoryError(f"there is no run to resume in {url!r}; start a run without resume")
    run_name, previous = (of_model or runs)[-1]
    changed = list_differences(previous, fingerprint)
    if not changed:
        return HistoryError(
            f"cannot resume: the trials of {str(run_name)!r} were deleted; start a new run without "
            f"resume"
        )
    several = len(changed) > 1 or changed[0].endswith("s")  # "the four lists"
    return HistoryError(
        f"cannot resume: the {' and the '.join(changed)} of this run "
        f"{'differ from those' if several else 'differs from that'} of {str(run_name)!r}; restore "
        f"{'them' if several else 'it'}, or start a new run without resume"
    )
