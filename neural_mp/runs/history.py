"""Persistent history of tuning runs: every trial, in an Optuna storage."""

from __future__ import annotations

import json
import logging
import os
import weakref
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from neural_mp.core.plan import PrecisionPlan
from neural_mp.core.trial import Outcome, Trial
from neural_mp.errors import HistoryError, one_line, without_passwords
from neural_mp.io.measurement_cache import RunCache
from neural_mp.runs.record_schema import setup_to_dict
from neural_mp.runs.registry import (
    chosen_run,
    close_storage,
    has_study,
    latest_run,
    lease_run,
    new_run,
    open_storage,
    require_file,
    run_names,
)
from neural_mp.runs.report import RunEnd, RunRecord, RunStart, RuntimeFigures
from neural_mp.runs.store import ENDING, MEASURED, SETUP, TRIAL, RunStore, accuracy_in
from neural_mp.util.optuna_logging import quiet_optuna
from neural_mp.util.validators import file_path, validate_option, without_nul

logger = logging.getLogger(__name__)

HISTORY_FILE = "history.db"


def storage_url(workspace: str | Path, storage: str | None = None) -> str:
    """Return the Optuna storage URL of a workspace: `storage`, or a SQLite file in its folder."""
    if storage is not None:
        if not isinstance(storage, str):
            raise HistoryError(f"storage must be an Optuna storage URL, got {storage!r}")
        if "://" not in storage:
            raise HistoryError(
                f"storage must be an Optuna storage URL, got {storage!r}; for a SQLite file, write "
                f"{'sqlite:///' + storage!r}"
            )
        return validate_option("storage", without_nul, storage)
    if not isinstance(workspace, str | Path):
        raise HistoryError(f"workspace must be the path of a folder, got {workspace!r}")
    folder = validate_option("workspace", file_path, workspace)
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise HistoryError(f"the workspace {str(folder)!r} cannot be created: {error}") from None
    return f"sqlite:///{os.path.realpath(folder / HISTORY_FILE)}"


class History(RunStore):
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
                    name, self._lease = lease_run(storage, fingerprint, url)
                else:
                    name, self._lease = new_run(storage, fingerprint, higher_is_better)
                super().__init__(storage, str(name))
                if resume:
                    self.close_killed_trials()
            except HistoryError:
                raise
            except Exception as error:
                raise _opening_error(url, error) from error
        # Weak, so that a discarded history releases its lease at once.
        history = weakref.proxy(self)
        self.cache = RunCache(
            self.measurements(),
            lambda key, value: history.set_attribute(MEASURED + key, value),
            self.name,
        )

    def __enter__(self) -> History:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Release the lease of the run and close the storage."""
        self._lease.release()
        close_storage(self._storage)

    def begin(self, setup: RunStart) -> None:
        """Store the description of the run, and delete a previous ending."""
        self.set_packed(SETUP, setup_to_dict(setup))
        if self.has_ended:
            self.set_attribute(ENDING, None)

    def end(self, ending: RunEnd) -> None:
        """Store the ending of the run."""
        self.set_packed(ENDING, ending.to_dict())

    def start(self) -> int:
        """Open a trial and return its number.

        Raises:
            RunInUseError: another process has taken over the run.
        """
        self._lease.check()
        return self.open_trial()

    def keep(self, trial: Trial) -> None:
        """Store an open trial, so that a resumed run has it among its trials."""
        self.set_trial_attributes(trial.number, {TRIAL: json.dumps(trial.to_dict())})

    def finish(self, trial: Trial) -> None:
        """Store and close a trial; afterwards, no crash loses it."""
        self.keep(trial)
        self.set_trial_attributes(trial.number, _dashboard_attributes(trial))
        value = None if trial.outcome is Outcome.FAILED else trial.accuracy
        self.close_trial(trial.number, value, pruned=trial.outcome is Outcome.PRUNED)

    def abandon(self, number: int, plan: PrecisionPlan, error: str) -> None:
        """Close a trial that was interrupted from outside.

        A resumed run tries the plan again, unless `keep` stored its result.
        """
        self.set_trial_attributes(number, {"error": error, "plan": json.dumps(plan.to_dict())})
        self.close_trial(number, accuracy_in(self._trials[number], number))


def _dashboard_attributes(trial: Trial) -> dict[str, Any]:
    """Return the trial attributes displayed in a dashboard; each costs a transaction."""
    attributes = {
        "outcome": trial.outcome.value,
        "loss": trial.loss,
        "error": trial.error,
        "node": trial.node,
        **{f"metric {name}": value for name, value in trial.metrics.items()},
        **trial.objectives,
        **{f"{precision} ops": count for precision, count in trial.plan.counts().items()},
    }
    return {name: value for name, value in attributes.items() if value is not None}


def compared_runtimes(url: str, fingerprint: Mapping[str, str]) -> tuple[RuntimeFigures, ...]:
    """Return the figures of the runtimes that the run to be resumed compared, if any.

    Raises:
        HistoryError: the storage cannot be opened or read.
    """
    with quiet_optuna():
        try:
            storage = open_storage(url)
            try:
                name = latest_run(storage, fingerprint)
                return () if name is None else RunStore(storage, str(name)).runtimes
            finally:
                close_storage(storage)
        except HistoryError:
            raise
        except Exception as error:
            raise _opening_error(url, error) from error


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
            require_file(url)
            storage = open_storage(url)
            try:
                names = run_names(storage)
                while not has_study(storage, name := chosen_run(names, number, model, url)):
                    names.remove(name)
                return RunStore(storage, str(name)).record()
            finally:
                close_storage(storage)
        except HistoryError:
            raise
        except Exception as error:
            raise _opening_error(url, error) from error


def _opening_error(url: str, error: Exception) -> HistoryError:
    """Return a HistoryError for any exception of SQLAlchemy or a database driver."""
    logger.debug("history %r: opening failed", without_passwords(url), exc_info=True)
    return HistoryError(f"the history {url!r} cannot be opened: {one_line(error)}")
