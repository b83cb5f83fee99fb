"""The run that is begun or gone on with: chosen, and claimed for this process."""

from __future__ import annotations

import logging
import uuid
from collections.abc import Mapping
from typing import TYPE_CHECKING

from neural_mp.errors import HistoryError
from neural_mp.runs.fingerprint import differences
from neural_mp.runs.lease import RunClaim
from neural_mp.tuning.stored_runs import (
    FINGERPRINT,
    RunName,
    model_digest,
    run_names,
    runs_about,
)

if TYPE_CHECKING:
    import optuna
    from optuna.storages import RDBStorage

logger = logging.getLogger(__name__)


def study_named(storage: RDBStorage, name: RunName) -> optuna.Study:
    """The study of a run."""
    import optuna

    return optuna.load_study(
        study_name=str(name),
        storage=storage,
        sampler=optuna.samplers.RandomSampler(seed=0),
    )


def new_run(
    storage: RDBStorage, fingerprint: Mapping[str, str], higher_is_better: bool
) -> tuple[RunName, RunClaim]:
    """A new run, and the claim on it.

    It gets its name last, so that nobody ever sees one of which it is not known what it is about.

    Args:
        storage: is to hold it.
        fingerprint: what it is about.
        higher_is_better: the direction of the metric.
    """
    import optuna

    directions = optuna.study.StudyDirection
    direction = directions.MAXIMIZE if higher_is_better else directions.MINIMIZE
    study = storage.create_new_study([direction], f"unfinished/{uuid.uuid4().hex}")
    storage.set_study_user_attr(study, FINGERPRINT, dict(fingerprint))
    model = model_digest(fingerprint)
    claim = RunClaim(storage, study, f"of model {model}")
    try:
        return _named(storage, study, model), claim
    except BaseException:
        claim.release()
        raise


def _named(storage: RDBStorage, study: int, model: str) -> RunName:
    """Give a study the next name that is free for runs of a model."""
    import sqlalchemy as sql

    studies = sql.table("studies", sql.column("study_id"), sql.column("study_name"))
    while True:
        last = max((name.number for name in run_names(storage, model)), default=0)
        name = RunName(model, last + 1)
        named = studies.update().where(studies.c.study_id == study).values(study_name=str(name))
        try:
            with storage.engine.begin() as connection:
                connection.execute(named)
            return name
        except sql.exc.IntegrityError:
            continue  # another process took the number in between


def claimed_run(
    storage: RDBStorage, fingerprint: Mapping[str, str], url: str
) -> tuple[RunName, RunClaim]:
    """The latest run about the same, and the claim on it.

    Args:
        storage: holds it.
        fingerprint: what it has to be about.
        url: of the storage, for messages.

    Raises:
        HistoryError: there is none; if there are others, it is said where the nearest one differs.
        RunInUseError: somebody else writes into it.
    """
    runs = runs_about(storage, model_digest(fingerprint))
    same = [name for name, about in runs if not differences(about, fingerprint)]
    if not same:
        raise _nothing_to_resume(storage, fingerprint, url)
    name = same[-1]
    study = storage.get_study_id_from_name(str(name))
    return name, RunClaim(storage, study, str(name))


def _nothing_to_resume(
    storage: RDBStorage, fingerprint: Mapping[str, str], url: str
) -> HistoryError:
    """Why no run can be gone on with, by the latest of the model, else the latest of all."""
    runs = runs_about(storage)
    of_model = [run for run in runs if run[1].get("model") == fingerprint.get("model")]
    if not runs:
        return HistoryError(f"there is no run to resume in {url!r}; start one without resume")
    name, about = (of_model or runs)[-1]
    changed = differences(about, fingerprint)
    return HistoryError(
        f"cannot resume: the {' and the '.join(changed)} of this run differ from those of "
        f"{str(name)!r}; restore them, or start a new run without resume"
    )
