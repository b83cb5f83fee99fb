"""Persistent history of tuning runs: every trial, in an Optuna storage."""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from neural_mp.core.observations import Observations
from neural_mp.core.plan import PrecisionPlan
from neural_mp.core.trial import Outcome, Trial
from neural_mp.errors import HistoryError
from neural_mp.io.measurement_cache import RunCache
from neural_mp.io.readers import compress_text
from neural_mp.runs.record import RunEnd, RunRecord, RunStart
from neural_mp.runs.record_schema import ending_to_dict, setup_to_dict
from neural_mp.runs.registry import (
    chosen_run,
    claimed_run,
    close_storage,
    has_study,
    new_run,
    open_storage,
    run_names,
    study_named,
)
from neural_mp.runs.store import (
    BASELINE,
    ENDING,
    MEASURED,
    OBSERVATIONS,
    SETUP,
    TRIAL,
    RunBook,
    baseline_of,
    kept,
    measurements_of,
    record_of,
    trial_of,
    trials_of,
)
from neural_mp.util.optuna_logging import quiet_optuna
from neural_mp.util.validators import file_path, validate_option, without_nul

if TYPE_CHECKING:
    import optuna

logger = logging.getLogger(__name__)

HISTORY_FILE = "history.db"


def storage_url(workspace: str | Path, storage: str | None = None) -> str:
    """Return the Optuna storage URL of a workspace: `storage`, or a SQLite file in its folder."""
    if storage is not None:
        if not isinstance(storage, str):
            raise HistoryError(f"storage must be an Optuna storage URL, got {storage!r}")
        return validate_option("storage", without_nul, storage)
    if not isinstance(workspace, str | Path):
        raise HistoryError(f"workspace must be the path of a folder, got {workspace!r}")
    folder = validate_option("workspace", file_path, workspace)
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise HistoryError(f"the workspace {str(folder)!r} cannot be created: {error}") from None
    return f"sqlite:///{os.path.realpath(folder / HISTORY_FILE)}"


class History:
    """One run: its subject, FP32 baseline, observations and trials.

    No other process can write to the run while the history is open.

    Args:
        url: an Optuna storage URL.
        fingerprint: subject of the run: `model`, `data`, `metric`… → a digest or word.
        higher_is_better: the direction of the metric.
        resume: continue the latest run with the same fingerprint instead of starting a new run.

    Attributes:
        cache: measurements of this run.

    Raises:
        HistoryError: the storage cannot be opened, or `resume` finds no run with this
            fingerprint.
        RunInUseError: another process writes to the run to be resumed.
    """

    def __init__(
        self, url: str, fingerprint: Mapping[str, str], higher_is_better: bool, resume: bool = False
    ) -> None:
        with quiet_optuna():
            try:
                storage = open_storage(url)
                if resume:
                    name, self._claim = claimed_run(storage, fingerprint, url)
                else:
                    name, self._claim = new_run(storage, fingerprint, higher_is_better)
                self._storage = storage
                study = study_named(storage, name)
                _bury_the_killed(study)
                self._book = book = RunBook(study)
            except HistoryError:
                raise
            except Exception as error:
                raise _unopened(url, error) from error
        self.cache = RunCache(
            measurements_of(book), lambda key, value: book.write(MEASURED + key, value), self.name
        )

    def __enter__(self) -> History:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Release the lease of the run and close the storage."""
        self._claim.release()
        close_storage(self._storage)

    @property
    def name(self) -> str:
        """The run's name in the storage."""
        return self._book.name

    @property
    def trouble(self) -> str:
        """Reason why the storage lacks a part of the run; empty if complete."""
        return self._book.trouble

    @property
    def baseline(self) -> dict[str, Any] | None:
        """The FP32 baseline; None before it was measured."""
        return baseline_of(self._book)

    @baseline.setter
    def baseline(self, values: Mapping[str, Any]) -> None:
        self._book.write(BASELINE, dict(values))

    @property
    def observations(self) -> Observations | None:
        """The observations of calibration; None before calibration."""
        return kept(self._book, OBSERVATIONS, Observations.from_dict)

    @observations.setter
    def observations(self, observations: Observations) -> None:
        self._book.write(OBSERVATIONS, _packed(observations.to_dict()))

    def begin(self, setup: RunStart) -> None:
        """Store the description of the run, and delete a previous ending."""
        self._book.write(SETUP, _packed(setup_to_dict(setup)))
        self._book.write(ENDING, None)

    def end(self, ending: RunEnd) -> None:
        """Store the ending of the run."""
        self._book.write(ENDING, _packed(ending_to_dict(ending)))

    def record(self) -> RunRecord:
        """Return all stored data of the run.

        Raises:
            HistoryError: the data is damaged, or an earlier version stored less.
        """
        return record_of(self._book)

    def trials(self) -> list[Trial]:
        """Return all finished trials, oldest first."""
        return trials_of(self._book)

    def start(self) -> int:
        """Open a trial and return its number.

        Raises:
            RunInUseError: another process has taken over the run.
        """
        self._claim.check()
        return self._book.start()

    def keep(self, trial: Trial) -> None:
        """Store an open trial, so that a resumed run has it among its trials."""
        self._book.note(trial.number, {TRIAL: json.dumps(trial.to_dict())})

    def finish(self, trial: Trial) -> None:
        """Store and close a trial; afterwards, no crash loses it."""
        self.keep(trial)
        self._book.note(trial.number, _shown(trial))
        failed = trial.outcome is Outcome.FAILED
        pruned = trial.outcome is Outcome.PRUNED
        self._book.close(trial.number, None if failed else trial.accuracy, pruned=pruned)

    def abandon(self, number: int, plan: PrecisionPlan, error: str) -> None:
        """Close a trial that was interrupted from outside.

        A resumed run tries the plan again, unless `keep` stored its result.
        """
        self._book.note(number, {"error": error, "plan": json.dumps(plan.to_dict())})
        self._book.close(number, _kept_accuracy(self._book.trials[number], number))


def _bury_the_killed(study: optuna.Study) -> None:
    """Close trials that are still marked as running because their process was killed."""
    from optuna.trial import TrialState

    for trial in study.get_trials(deepcopy=False):
        if trial.state is TrialState.RUNNING:
            found = _kept_accuracy(trial.user_attrs, trial.number)
            study.tell(trial.number, found, TrialState.FAIL if found is None else None)


def _kept_accuracy(attributes: Mapping[str, Any], number: int) -> float | None:
    """Return the accuracy of a trial if `keep` stored it before the trial was closed."""
    stored = attributes.get(TRIAL)
    return None if stored is None else trial_of(stored, f"trial {number}").accuracy


def _shown(trial: Trial) -> dict[str, Any]:
    """Return the trial attributes shown in a dashboard."""
    counts = {f"{precision} ops": count for precision, count in trial.plan.counts().items()}
    values = {
        "outcome": trial.outcome.value,
        "loss": trial.loss,
        "error": trial.error,
        "node": trial.node,
    }
    metrics = {f"metric {name}": value for name, value in trial.metrics.items()}
    return {**values, **metrics, **dict(trial.objectives), **counts}


def read_record(url: str, number: int | None = None, model: str | None = None) -> RunRecord:
    """Return all stored data of a run, finished or not, without changing the storage.

    Args:
        url: an Optuna storage URL.
        number: number of the run; default: the latest.
        model: prefix of the model's fingerprint; default: any model.

    Raises:
        HistoryError: no run matches, several runs match, or the storage cannot be opened or
            read.
    """
    with quiet_optuna():
        try:
            storage = open_storage(url)
            try:
                names = run_names(storage)
                while not has_study(storage, name := chosen_run(names, number, model, url)):
                    names.remove(name)
                return record_of(RunBook(study_named(storage, name)))
            finally:
                close_storage(storage)
        except HistoryError:
            raise
        except Exception as error:
            raise _unopened(url, error) from error


def _unopened(url: str, error: Exception) -> HistoryError:
    """Return a HistoryError for any exception of SQLAlchemy or a database driver."""
    logger.debug("opening %s failed", url, exc_info=True)
    words = str(error).splitlines() or ["no reason given"]
    return HistoryError(f"the history {url!r} cannot be opened: {type(error).__name__}: {words[0]}")


def _packed(value: Mapping[str, Any]) -> str:
    return compress_text(json.dumps(value).encode())
