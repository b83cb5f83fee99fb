"""Persistent history of tuning runs: every trial, in an Optuna storage."""

from __future__ import annotations

import json
import logging
import math
import os
import weakref
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from neural_mp.core.observations import Observations
from neural_mp.core.plan import PrecisionPlan
from neural_mp.core.trial import Outcome, Trial
from neural_mp.errors import HistoryError, one_line, without_passwords
from neural_mp.io.measurement_cache import RunCache
from neural_mp.io.readers import compress_text, parse_json, prefix_file_errors
from neural_mp.runs.lease import is_leased
from neural_mp.runs.record_schema import BASELINE_FIGURES, setup_from_dict, setup_to_dict
from neural_mp.runs.registry import (
    choose_stored_run,
    close_storage,
    create_run,
    find_latest_run,
    has_study,
    lease_run,
    open_storage,
    require_file,
    run_names,
)
from neural_mp.runs.report import (
    ELEMENTS,
    LAYER_ERRORS,
    TIMES,
    ProbeMeasurements,
    RunEnd,
    RunRecord,
    RunSource,
    RunStart,
    RuntimeFigures,
    output_nsr_in,
)
from neural_mp.runs.sqlite_checks import make_file_url
from neural_mp.util.optional_packages import silence_optuna_log
from neural_mp.util.validators import Validator, file_path, validate_option, without_nul

if TYPE_CHECKING:
    from optuna.storages import RDBStorage

logger = logging.getLogger(__name__)
T = TypeVar("T")

#: Attempts per write, since some failures are transient, e.g. a lost connection.
_ATTEMPTS = 2
#: Attributes of a run, and of a trial; the keys of measurements follow `MEASURED`.
BASELINE, OBSERVATIONS, TRIAL = "baseline", "observations", "trial"
SETUP, ENDING, SOURCE = "setup", "ending", "source"
MEASURED = "measured: "


class RunStore:
    """The stored data of a run and its trials.

    If the disk is full or the database is lost, the run goes on in memory, so that hours of
    computation are not lost.

    Optuna's storage is called directly: `Study.ask` and `Study.tell` read the trials again for
    their samplers, which takes longer than the writing.

    Attributes:
        name: name of the run in the storage.
        degraded_because: reason why the storage holds only a part of the run; empty if complete.
    """

    def __init__(self, storage: RDBStorage, name: str) -> None:
        self.name = name
        self.degraded_because = ""
        self._run_id = storage.get_study_id_from_name(name)
        self._attributes: dict[str, Any] = dict(storage.get_study_user_attrs(self._run_id))
        trials = storage.get_all_trials(self._run_id, deepcopy=False)
        #: Trial number → attributes, oldest first.
        self._trials = {int(trial.number): dict(trial.user_attrs) for trial in trials}
        self._storage = storage
        #: Number of an open trial → its ID in the storage.
        self._open: dict[int, int] = {}

    @property
    def baseline(self) -> dict[str, Any] | None:
        """The FP32 baseline; None before it was measured; a HistoryError if damaged."""
        figures = self._attributes.get(BASELINE)
        with prefix_file_errors(f"{self.name}: {BASELINE}", HistoryError):
            return None if figures is None else BASELINE_FIGURES(figures)

    @baseline.setter
    def baseline(self, values: Mapping[str, Any]) -> None:
        self.set_attribute(BASELINE, dict(values))

    @property
    def observations(self) -> Observations | None:
        """The observations of calibration; None before calibration; a HistoryError if damaged."""
        return self._read_attribute(OBSERVATIONS, Observations.from_dict)

    @observations.setter
    def observations(self, observations: Observations) -> None:
        self.set_packed(OBSERVATIONS, observations.to_dict())

    @property
    def has_ended(self) -> bool:
        """Whether the ending of the run is stored."""
        return self._attributes.get(ENDING) is not None

    def read_measurements(self) -> dict[str, Any]:
        """Return the entries of the run's cache."""
        return {
            key.removeprefix(MEASURED): value
            for key, value in self._attributes.items()
            if key.startswith(MEASURED)
        }

    def read_trials(self) -> list[Trial]:
        """Return all stored trials, oldest first.

        Raises:
            HistoryError: a trial is damaged.
        """
        return [
            replace(_parse_trial(attributes[TRIAL], f"{self.name}: trial {number}"), number=number)
            for number, attributes in self._trials.items()
            if TRIAL in attributes
        ]

    @property
    def runtimes(self) -> tuple[RuntimeFigures, ...]:
        """The figures of the runtimes compared before the search; a HistoryError if damaged."""
        setup = self._read_attribute(SETUP, setup_from_dict)
        return () if setup is None else setup.runtimes

    @property
    def is_in_use(self) -> bool:
        """Whether a process writes to the run, as far as this machine can observe."""
        return is_leased(self._storage.engine, self.name)

    @property
    def trial_count(self) -> int:
        """Number of finished trials."""
        return sum(TRIAL in attributes for attributes in self._trials.values())

    @property
    def source(self) -> RunSource | None:
        """The options of the run as text; None for objects in Python; an error if damaged."""
        return self._read_attribute(SOURCE, RunSource.from_dict)

    def read_record(self) -> RunRecord:
        """Return all stored data of the run.

        Raises:
            HistoryError: the data is damaged, or an earlier version stored less.
        """
        setup = self._read_attribute(SETUP, setup_from_dict)
        if setup is None:
            raise HistoryError(
                f"run {self.name!r} must have a description of its model and settings, got none: "
                f"the run was created by an earlier version, or killed before its search; start a "
                f"new run"
            )
        entries = self.read_measurements()
        stored = {key: entries[key] for key in (TIMES, ELEMENTS, LAYER_ERRORS) if entries.get(key)}
        with prefix_file_errors(self.name, HistoryError):
            measured = ProbeMeasurements.from_dict({**stored, "output_nsr": output_nsr_in(entries)})
        return RunRecord(
            setup,
            self.name,
            self.baseline,
            self.observations or Observations(),
            tuple(self.read_trials()),
            measured,
            self._read_attribute(ENDING, RunEnd.from_dict),
        )

    def _read_attribute(self, key: str, kind: Validator[T]) -> T | None:
        stored = self._attributes.get(key)
        origin = f"{self.name}: {key}"
        return None if stored is None else parse_json(stored, kind, origin, HistoryError)

    def set_attribute(self, name: str, value: object) -> None:
        """Set an attribute of the run."""
        self._attributes[name] = value
        self._write_or_degrade(lambda s: s.set_study_user_attr(self._run_id, name, value))

    def set_packed(self, name: str, value: Mapping[str, Any]) -> None:
        """Set an attribute of the run, compressed."""
        self.set_attribute(name, compress_text(json.dumps(value).encode()))

    def open_trial(self) -> int:
        """Open a trial and return its number; no other process adds trials to the run."""
        number = max(self._trials, default=-1) + 1
        opened = self._write_or_degrade(lambda storage: storage.create_new_trial(self._run_id))
        if opened is not None:
            self._open[number] = opened
        self._trials[number] = {}
        return number

    def set_trial_attributes(self, number: int, values: Mapping[str, Any]) -> None:
        """Set attributes of an open trial."""
        self._trials[number] |= values

        def store_attributes(storage: RDBStorage) -> None:
            for name, value in values.items():
                storage.set_trial_user_attr(self._open[number], name, value)

        if number in self._open:
            self._write_or_degrade(store_attributes)

    def close_trial(self, number: int, value: float | None, *, pruned: bool = False) -> None:
        """Close a trial with a value, or as failed if the value is None or NaN."""
        trial = self._open.pop(number, None)
        if trial is not None:
            self._write_or_degrade(lambda storage: _end_trial(storage, trial, value, pruned))

    def close_killed_trials(self) -> None:
        """Close trials that are still marked as running because their process was killed."""
        from optuna.trial import TrialState

        storage, states = self._storage, (TrialState.RUNNING,)
        for trial in storage.get_all_trials(self._run_id, deepcopy=False, states=states):
            number = trial.number
            trial_id = storage.get_trial_id_from_study_id_trial_number(self._run_id, number)
            _end_trial(storage, trial_id, read_trial_accuracy(trial.user_attrs, number))

    def _write_or_degrade(self, write: Callable[[RDBStorage], Any]) -> Any:
        """Write to the storage unless it was given up; return the result."""
        if self.degraded_because:
            return None
        for attempt in range(_ATTEMPTS):
            try:
                return write(self._storage)
            except Exception as error:
                # SQLAlchemy and the database drivers raise dozens of types.
                logger.debug("run %r: write attempt %d failed", self.name, attempt, exc_info=True)
                cause = one_line(error.__cause__ or error)  # Optuna's own message is vaguer
        self.degraded_because = (
            f"the storage of run {self.name!r} cannot be written to: {cause}; the run continues in "
            f"memory, and its further trials cannot be resumed"
        )
        logger.warning(self.degraded_because)
        return None


def _end_trial(
    storage: RDBStorage, trial_id: int, value: float | None, pruned: bool = False
) -> None:
    """End a trial with a value, or as failed if the value is None or NaN."""
    from optuna.trial import TrialState

    if value is None or math.isnan(value):
        storage.set_trial_state_values(trial_id, TrialState.FAIL)
        return
    if pruned:
        storage.set_trial_intermediate_value(trial_id, 0, value)
    state = TrialState.PRUNED if pruned else TrialState.COMPLETE
    storage.set_trial_state_values(trial_id, state, [float(value)])


def _parse_trial(stored: object, origin: str) -> Trial:
    return parse_json(stored, Trial.from_dict, origin, HistoryError)


def read_trial_accuracy(attributes: Mapping[str, Any], number: int) -> float | None:
    """Return the accuracy in the attributes of a trial; None if no result was stored."""
    stored = attributes.get(TRIAL)
    return None if stored is None else _parse_trial(stored, f"trial {number}").accuracy


HISTORY_FILE = "history.db"


def get_storage_url(workspace: str | Path, storage: str | None = None) -> str:
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
    return make_file_url(os.path.realpath(folder / HISTORY_FILE))


class History(RunStore):
    """One run: its subject, FP32 baseline, observations and trials.

    No other process can write to the run while the history is open.

    Args:
        url: an Optuna storage URL.
        fingerprint: subject of the run: `model`, `data`, `metric`… → a digest or word.
        higher_is_better: the direction of the metric.
        resume: continue the latest run with the same fingerprint instead of starting a new run.
        name: name of the run to continue, if not the latest.

    Attributes:
        cache: measurements of this run.

    Raises:
        HistoryError: the storage cannot be opened, or `resume` finds no run with this
            fingerprint.
        RunInUseError: another process writes to the run to be resumed.
    """

    def __init__(
        self,
        url: str,
        fingerprint: Mapping[str, str],
        higher_is_better: bool,
        resume: bool = False,
        name: str = "",
    ) -> None:
        with _translate_database_errors(url):
            storage = open_storage(url)
            if resume:
                run, self._lease = lease_run(storage, fingerprint, url, name)
            else:
                run, self._lease = create_run(storage, fingerprint, higher_is_better)
            super().__init__(storage, str(run))
            if resume:
                self.close_killed_trials()
        # Weak, so that a discarded history releases its lease at once.
        history = weakref.proxy(self)
        self.cache = RunCache(
            self.read_measurements(),
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

    def begin_run(self, setup: RunStart, source: RunSource | None = None) -> None:
        """Store the description of the run, and delete a previous ending."""
        self.set_packed(SETUP, setup_to_dict(setup))
        if source is not None:
            self.set_packed(SOURCE, source.to_dict())
        if self.has_ended:
            self.set_attribute(ENDING, None)

    def end_run(self, ending: RunEnd) -> None:
        """Store the ending of the run."""
        self.set_packed(ENDING, ending.to_dict())

    def begin_trial(self) -> int:
        """Open a trial and return its number.

        Raises:
            RunInUseError: another process has taken over the run.
        """
        self._lease.check_ownership()
        return self.open_trial()

    def keep_trial(self, trial: Trial) -> None:
        """Store an open trial, so that a resumed run has it among its trials."""
        self.set_trial_attributes(trial.number, {TRIAL: json.dumps(trial.to_dict())})

    def finish_trial(self, trial: Trial) -> None:
        """Store and close a trial; afterwards, no crash loses it."""
        self.keep_trial(trial)
        self.set_trial_attributes(trial.number, _make_dashboard_attributes(trial))
        value = None if trial.outcome is Outcome.FAILED else trial.accuracy
        self.close_trial(trial.number, value, pruned=trial.outcome is Outcome.PRUNED)

    def abandon_trial(self, number: int, plan: PrecisionPlan, error: str) -> None:
        """Close a trial that was interrupted from outside.

        A resumed run tries the plan again, unless `keep_trial` stored its result.
        """
        self.set_trial_attributes(number, {"error": error, "plan": json.dumps(plan.to_dict())})
        self.close_trial(number, read_trial_accuracy(self._trials[number], number))


def _make_dashboard_attributes(trial: Trial) -> dict[str, Any]:
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


def read_compared_runtimes(
    url: str, fingerprint: Mapping[str, str], name: str = ""
) -> tuple[RuntimeFigures, ...]:
    """Return the figures of the runtimes that the run to be resumed compared, if any.

    Raises:
        HistoryError: the storage cannot be opened or read.
    """
    with _translate_database_errors(url), _open_storage_context(url) as storage:
        run = find_latest_run(storage, fingerprint, name)
        return () if run is None else RunStore(storage, str(run)).runtimes


def read_record(url: str, number: int | None = None, model: str | None = None) -> RunRecord:
    """Return all stored data of a run, finished or not, without changing the storage.

    Args:
        url: an Optuna storage URL.
        number: default: the latest.
        model: prefix of the model's fingerprint; default: any model.

    Raises:
        HistoryError: no run matches, several runs match, or the storage cannot be opened or
            read.
    """
    with _translate_database_errors(url):
        require_file(url)
        with _open_storage_context(url) as storage:
            names = run_names(storage)
            while not has_study(storage, name := choose_stored_run(names, number, model, url)):
                names.remove(name)
            return RunStore(storage, str(name)).read_record()


@contextmanager
def open_runs(url: str, latest: int, name: str = "") -> Iterator[list[RunStore]]:
    """Yield the latest runs of a storage, or those of a name, the newest first, to be read only.

    Raises:
        HistoryError: the storage cannot be opened or read.
    """
    with _translate_database_errors(url):
        require_file(url)
        with _open_storage_context(url) as storage:
            runs = [run for run in run_names(storage) if name in ("", str(run))][-latest:]
            yield [RunStore(storage, str(r)) for r in reversed(runs) if has_study(storage, r)]


@contextmanager
def _open_storage_context(url: str) -> Iterator[RDBStorage]:
    storage = open_storage(url)
    try:
        yield storage
    finally:
        close_storage(storage)


@contextmanager
def _translate_database_errors(url: str) -> Iterator[None]:
    """Report any exception of SQLAlchemy or a database driver as a HistoryError."""
    with silence_optuna_log():
        try:
            yield
        except HistoryError:
            raise
        except Exception as error:
            logger.debug("history %r: opening failed", without_passwords(url), exc_info=True)
            raise HistoryError(
                f"the history {url!r} cannot be opened: {one_line(error)}"
            ) from error
